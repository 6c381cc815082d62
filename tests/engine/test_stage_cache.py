"""A prefix cache on two pipeline stages: turns of conversations get the tokens of one rank without
a cache, in fp32.

Broken on the first stage on purpose, they do not: see `SABOTAGE`.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtpkit.engine import SamplingParams
from mtpkit.engine.device import pipeline
from mtpkit.engine.device.checkpoints import CheckpointStore
from mtpkit.engine.ranks.returned import unpack_returned
from mtpkit.model import build, build_model
from tests.engine.rank_cases import MIXED, PROMPTS, Case, config, names, split_model
from tests.engine.replayed import replay_on_cpu
from tests.engine.test_stages import halves
from tests.engine.tiny import greedy, guide, make_llm
from tests.ranks import run_ranks
from tests.shared import look_at_new_objects, made_once

TURNS = 3
PARAMS = [greedy(6), SamplingParams(seed=3, max_tokens=6, ignore_eos=True)]
PREEMPTED = dict(block_size=2, num_blocks=37)
FEW = dict(prefix_cache_bytes=30_000, max_num_seqs=3)
"""Room for other numbers of checkpoints on each stage."""
CASES = [
    Case("mamba2", 3),
    Case("mamba2", 2, settings=dict(state_rollback="snapshot", async_scheduling=False, **MIXED)),
    Case("mamba2", 3, settings=PREEMPTED),
    Case("mamba2", 1, settings=FEW),
    Case("delta", 0),
    Case("delta", 3),
    Case("latent", 3, settings=MIXED),
    Case("attention", 2, settings=MIXED),
    Case("distinct heads", 3),
]
GRAPHS = CASES[0]
"""The case that is run again with steps that are run as CUDA graphs are."""


def other_tokens(packed, batch):
    verdict, drafts = unpack_returned(packed, batch)
    return replace(verdict, token_ids=verdict.token_ids + int(batch.shape.resumed)), drafts


SABOTAGE: dict[str, list[Any]] = {
    "nothing": [],
    "states that are not restored": [CheckpointStore, "restore", lambda self, restores: None],
    "rings that are not folded": [CheckpointStore, "_settle", lambda self, slots, noise_keys: None],
    "results of resumed rows": [pipeline, "unpack_returned", other_tokens],
}


def talk(model, case: Case, truth: list | None = None, cached: bool = True) -> dict:
    """The outputs of each turn, whose prompts are the turns before and a token, and at last of
    prompts known in full.

    Args:
        truth: what they will be, of which the drafts have some; None: drafts are the heads' own.
    """
    llm = make_llm(model, case.k, enable_prefix_caching=cached, **case.settings)
    params = [one for one, _ in zip(itertools.cycle(PARAMS), PROMPTS, strict=False)]
    histories = PROMPTS
    turns = []
    for turn in range(TURNS):
        if truth and case.k:
            guide(
                llm,
                histories,
                truth=[
                    known + tokens for known, tokens in zip(histories, truth[turn], strict=True)
                ],
            )
        outputs = llm.generate([dict(prompt_token_ids=prompt) for prompt in histories], params)
        llm.engine.scheduler.check_integrity()
        turns.append([output.outputs[0].token_ids for output in outputs])
        histories = [
            [*known, *tokens, 5 + turn] for known, tokens in zip(histories, turns[-1], strict=True)
        ]
    stats = llm.stats()
    for _ in range(2):
        before = llm.stats().prefilled_tokens
        outputs = llm.generate(
            [dict(prompt_token_ids=prompt) for prompt in PROMPTS[3:]], params[3:]
        )
    turns.append([output.outputs[0].token_ids for output in outputs])
    return dict(
        turns=turns,
        cached=stats.cached_tokens,
        prompts=stats.prompt_tokens,
        prefilled_again=llm.stats().prefilled_tokens - before,
        preemptions=stats.preemptions,
        accepted=sum(stats.acceptance.accepted_per_depth),
        checkpoints=llm.engine.config.num_checkpoints,
        room=llm.memory_plan.checkpoint_bytes,
    )


def two_stages(rank: int, wanted: list, out: Path) -> None:
    look_at_new_objects()
    models: dict[str, Any] = {}
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "stage_patterns", halves)
        for case, truth in zip(CASES, wanted, strict=True):
            if case.base not in models:
                models[case.base] = split_model(config(case.base), ranks=1, stages=2)
            found.append(talk(models[case.base], case, truth))
        replay_on_cpu(patch)
        graphs = talk(models[GRAPHS.base], GRAPHS)
    survived = {}
    for name, broken in SABOTAGE.items():
        with pytest.MonkeyPatch.context() as patch:
            if broken and rank == 0:
                patch.setattr(*broken)
            survived[name] = talk(models[CASES[0].base], CASES[0], wanted[0])["turns"] == wanted[0]
    (out / f"{rank}.json").write_text(
        json.dumps(dict(found=found, graphs=graphs, survived=survived))
    )


@pytest.fixture(scope="module")
def decoded(tmp_path_factory):
    """What one rank decodes without a cache and drafts, and what each of two stages does."""

    def make(path: Path) -> None:
        known = {}
        for case in CASES:
            if case.base not in known:
                model = build_model(config(case.base), device="cpu", seed=1)
                known[case.base] = talk(model, Case(case.base, 0), cached=False)["turns"]
        wanted = [known[case.base] for case in CASES]
        (path / "wanted.json").write_text(json.dumps(wanted))
        run_ranks(two_stages, wanted, path)

    path = made_once(tmp_path_factory, "cache_on_two_stages", make)
    return [json.loads((path / f"{name}.json").read_text()) for name in ("wanted", 0, 1)]


@pytest.mark.parametrize("index", range(len(CASES)), ids=[names(case) for case in CASES])
def test_turns_are_those_of_one_rank_without_a_cache(decoded, index):
    wanted, *stages = decoded
    case = CASES[index]
    for stage in stages:
        one = stage["found"][index]
        assert one["turns"] == wanted[index]
        assert (one["preemptions"] > 0) == ("num_blocks" in case.settings)
        assert one["accepted"] > 0 or not case.k
        assert one["cached"] > (0.5 if case.settings in ({}, MIXED) else 0) * one["prompts"]
    first, last = (stage["found"][index] for stage in stages)
    assert first["checkpoints"] == last["checkpoints"] and first["cached"] == last["cached"]


def test_a_known_prompt_costs_no_base_run(decoded):
    """All of it is at a checkpoint of each stage."""
    for stage in decoded[1:]:
        assert stage["found"][0]["prefilled_again"] == 0


def test_stages_with_room_for_different_numbers(decoded):
    """The stage with the fewest checkpoints sets the number; one of attention alone has nothing to
    keep."""
    first, last = (stage["found"][3] for stage in decoded[1:])
    assert first["room"] != last["room"]
    assert last["checkpoints"] == FEW["prefix_cache_bytes"] // max(first["room"], last["room"]) > 1
    assert decoded[1]["found"][7]["room"] == 0 < decoded[2]["found"][7]["room"]


def test_graphs_are_replayed_beside_checkpoints(decoded):
    for stage in decoded[1:]:
        assert stage["graphs"]["turns"] == decoded[0][0] and stage["graphs"]["cached"] > 0


@pytest.mark.parametrize("name", SABOTAGE)
def test_what_is_broken_shows(decoded, name):
    assert [stage["survived"][name] for stage in decoded[1:]] == [name == "nothing"] * 2
