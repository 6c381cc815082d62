"""Trees of drafts on two pipeline stages: the trees of one rank, and the tokens of plain decoding,
in fp32.

Broken on the first stage on purpose, they are not: see `SABOTAGE`.
"""

import json
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mtpkit import SamplingParams
from mtpkit.engine.device import pipeline
from mtpkit.engine.ranks.returned import check_returned, columns_of, unpack_returned
from mtpkit.engine.requests.tree import DynamicTree, TokenTree
from mtpkit.engine.steps.plan import Plan, Row
from mtpkit.errors import MtpkitError
from mtpkit.model import build, build_model
from mtpkit.model.inputs import StepInput
from tests.engine.rank_cases import PREEMPTED, PROMPTS, Case, config, names, split_model
from tests.engine.rank_cases import one_rank as plain_tokens
from tests.engine.replayed import replay_on_cpu
from tests.engine.test_rank_trees import DRAWN, GROWN_SHAPE, SNAPSHOT
from tests.engine.test_stages import halves
from tests.engine.test_trees import FIXED, changing, watched
from tests.engine.tiny import make_llm
from tests.ranks import run_ranks
from tests.shared import look_at_new_objects, made_once

CACHED = dict(enable_prefix_caching=True)
CASES = [
    Case("mamba2", 3, settings=FIXED),
    Case("mamba2", 3, settings=GROWN_SHAPE | SNAPSHOT | CACHED),
    Case("delta", 3, settings=GROWN_SHAPE | dict(max_num_batched_tokens=19)),
    Case("attention", 3, settings=FIXED | PREEMPTED),
    Case("latent", 3, penalised=True, settings=GROWN_SHAPE | PREEMPTED),
    Case("mamba2", 2, settings=dict(speculative_token_tree=[2, 2], max_num_seqs=3)),
    Case("mamba2", 2, guided=False, settings=DRAWN),
    Case("distinct heads", 3, settings=FIXED),
    Case(
        "mamba2", 3, settings=FIXED | dict(max_num_batched_tokens=12, max_num_seqs=2)
    ),  # chunks of which no row samples
]
"""PREEMPTED has so few blocks that those of a request that ends go to another one at once."""
FIXED_CASE = CASES[0]
ENDING = CASES[4]
GRAPHS = CASES[2]
FOUR = [
    Case("attention", 3, settings=FIXED | PREEMPTED),
    Case("latent", 3, True, penalised=True, settings=GROWN_SHAPE | PREEMPTED),
    Case("delta", 3, settings=GROWN_SHAPE | PREEMPTED | SNAPSHOT),
    Case("mamba2", 3, settings=FIXED | PREEMPTED),
]
"""For two stages of two tensor-parallel ranks."""


def no_path(packed, batch):
    verdict, drafts = unpack_returned(packed, batch)
    first = None if verdict.path is None else verdict.path * 0
    return replace(verdict, path=first), drafts


SABOTAGE: dict[str, tuple[Case, list[Any]]] = {
    "nothing": (FIXED_CASE, []),
    "nothing of grown trees": (GRAPHS, []),
    "a path that is not kept": (
        FIXED_CASE,
        [StepInput, "keep_path", lambda self, path, accepted: None],
    ),
    "another path": (GRAPHS, [pipeline, "unpack_returned", no_path]),
}
"""What is broken, the case in which it must show, and how."""


def decode(
    model, case: Case, truth: list | None, drafts_change: bool = False, watch: bool = True
) -> dict:
    """Outputs of each prompt, with a prefix cache those of the second time, and the trees that the
    heads made.

    Args:
        truth: what follows each prompt, on some path of each tree; None: trees are the heads' own.
        drafts_change: whether steps of trees and of chains take turns.
        watch: False: nothing looks at the trees or changes them.
    """
    llm = make_llm(model, case.k, **case.settings)
    following = [prompt + tokens for prompt, tokens in zip(PROMPTS, truth or [], strict=False)]
    made = watched(llm, following).made if watch else {}
    if drafts_change:
        changing(llm)
    for _ in range(2 if llm.engine.executor.checkpoints else 1):
        outputs = llm.generate([dict(prompt_token_ids=prompt) for prompt in PROMPTS], case.params)
        llm.engine.scheduler.check_integrity()
    stats = llm.stats()
    return dict(
        tokens=[output.outputs[0].token_ids for output in outputs],
        trees=sorted([list(known), *tree] for known, tree in made.items() if known),
        ranks=stats.acceptance.ranks_per_depth,
        preemptions=stats.preemptions,
        cached=stats.cached_tokens,
        returned=stats.returned_bytes,
    )


def is_drawn(case: Case) -> bool:
    return case.settings.get("draft_sampling", False)


def one_rank() -> list[list]:
    """Of each case what plain decoding gives, None where drafts are drawn, and what one rank makes
    with trees."""
    models: dict[str, Any] = {}
    found = []
    for case in CASES:
        if case.base not in models:
            models[case.base] = build_model(config(case.base), device="cpu", seed=1)
        truth = None
        if not is_drawn(case):
            llm = make_llm(models[case.base], 0)
            outputs = llm.generate(
                [dict(prompt_token_ids=prompt) for prompt in PROMPTS], case.params
            )
            truth = [output.outputs[0].token_ids for output in outputs]
        found.append([truth, decode(models[case.base], case, truth)])
    return found


def two_stages(rank: int, wanted: list, out: Path) -> None:
    look_at_new_objects()
    models: dict[str, Any] = {}
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "stage_patterns", halves)
        for case, (truth, _) in zip(CASES, wanted, strict=True):
            if case.base not in models:
                models[case.base] = split_model(config(case.base), ranks=1, stages=2)
            found.append(decode(models[case.base], case, truth))
        mixed = decode(models[FIXED_CASE.base], FIXED_CASE, wanted[0][0], drafts_change=True)
        replay_on_cpu(patch)
        graphs = decode(models[GRAPHS.base], GRAPHS, None, watch=False)
    survived = {}
    for name, (case, broken) in SABOTAGE.items():
        with pytest.MonkeyPatch.context() as patch:
            if broken and rank == 0:
                patch.setattr(*broken)
            truth = wanted[CASES.index(case)][0]
            survived[name] = decode(models[case.base], case, truth)["tokens"] == truth
    (out / f"{rank}.json").write_text(
        json.dumps(dict(found=found, mixed=mixed, graphs=graphs, survived=survived))
    )


def two_stages_of_two(rank: int, wanted: list, out: Path) -> None:
    look_at_new_objects()
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "stage_patterns", halves)
        for case, truth in zip(FOUR, wanted, strict=True):
            model = split_model(config(case.base), case.whole_experts, ranks=2, stages=2)
            found.append(decode(model, case, truth))
    (out / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def decoded(tmp_path_factory):
    """What one rank decodes, and what each of two stages does."""

    def make(path: Path) -> None:
        wanted = one_rank()
        (path / "wanted.json").write_text(json.dumps(wanted))
        run_ranks(two_stages, wanted, path)

    path = made_once(tmp_path_factory, "trees_on_two_stages", make)
    return [json.loads((path / f"{name}.json").read_text()) for name in ("wanted", 0, 1)]


@pytest.mark.parametrize("index", range(len(CASES)), ids=[names(case) for case in CASES])
def test_two_stages_decode_what_one_rank_does(decoded, index):
    (truth, one), *stages = decoded[0][index], *(stage["found"][index] for stage in decoded[1:])
    case = CASES[index]
    for stage in stages:
        assert stage["tokens"] == one["tokens"] and one["tokens"] == (truth or one["tokens"])
        assert stage["ranks"][0][0] > 0 and (stage["ranks"][0][1] > 0 or is_drawn(case))
        assert (stage["preemptions"] > 0) == ("num_blocks" in case.settings)
        assert (stage["cached"] > 0) == ("enable_prefix_caching" in case.settings)
    made = {tuple(known): tree for known, *tree in stages[1]["trees"]}
    want = {tuple(known): tree for known, *tree in one["trees"]}
    both = made.keys() & want.keys()
    assert (
        len(both) > 10
        and all(made[known] == want[known] for known in both)
        and not stages[0]["trees"]
    )


def test_two_stages_of_two_ranks_decode_what_one_rank_does(tmp_path):
    wanted = plain_tokens([replace(case, guided=False, settings={}) for case in FOUR])
    run_ranks(two_stages_of_two, wanted, tmp_path, ranks=4)
    for rank in range(4):
        for one, tokens in zip(
            json.loads((tmp_path / f"{rank}.json").read_text()), wanted, strict=True
        ):
            assert one["tokens"] == tokens and one["preemptions"] > 0
            assert all(one["ranks"][0]), "siblings of both ranks were right"
            assert bool(one["trees"]) == (rank > 1)


def test_bytes_that_go_back(decoded):
    """Of the fixed tree the count, the tokens, which depths are invalid, ranks, the path and the
    tree's tokens; of the grown one its parents, too. Without rows that decode there are neither
    ranks nor a path."""
    for index, tokens, grows in ((0, 11, False), (1, 6, True), (5, 7, False)):
        k = CASES[index].k
        least = 1 + (1 + k) + k + (tokens - 1) + tokens * grows
        of_decoding = 2 * k
        for stage in decoded[1:]:
            assert 4 * least < stage["found"][index]["returned"] <= 4 * (least + of_decoding)


def test_steps_of_trees_and_of_chains(decoded):
    for stage in decoded[1:]:
        assert stage["mixed"]["tokens"] == decoded[0][0][0]


def test_stages_replay_graphs(decoded):
    truth = decoded[0][CASES.index(GRAPHS)][0]
    assert [stage["graphs"]["tokens"] for stage in decoded[1:]] == [truth, truth]


@pytest.mark.parametrize("name", SABOTAGE)
def test_what_is_broken_shows(decoded, name):
    assert [stage["survived"][name] for stage in decoded[1:]] == [name.startswith("nothing")] * 2


def test_results_that_no_step_has_are_refused():
    """K = 2, two children of the newest token and one child of each: 5 tokens."""
    tree = DynamicTree(2, 2, 5)
    good = np.array([[1, 7, 8, 0, 0, -1, 1, -2, 2, 0, 9, 10, 11, 12, -1, 0, 0, 1, 2]])
    columns = columns_of(tree, True, 64)
    check_returned(good, columns)
    for column, value, what in (
        (5, 1, "drafts"),
        (6, 5, "ranks"),
        (8, -1, "places on the path"),
        (13, 64, "tokens"),
        (14, 4, "parents"),
    ):
        wrong = good.copy()
        wrong[0, column] = value
        with pytest.raises(
            MtpkitError, match=f"the last stage sent {value} for {what}.*, which must be from"
        ):
            check_returned(wrong, columns)


@pytest.mark.parametrize("slot", [0, None, 2], ids=["stays", "left", "came back elsewhere"])
def test_a_tree_is_stored_before_the_blocks_of_a_request_that_left_have_another_owner(slot):
    """Its accepted path is moved within these blocks. A step of other slots does not wait for a
    request that stays."""
    request = SimpleNamespace(slot=0, constraint=None)
    stored = []
    plan = Plan((Row(request, 4, 3, samples=True),), 1, 1, TokenTree((-1, 0, 1)))
    executor = object.__new__(pipeline.StageExecutor)
    executor._open = deque()
    executor._most_open = 4
    executor.graphs = None
    executor._store_first = lambda: stored.append(executor._open.popleft())
    executor._opened(plan, frozenset([0]), lambda message: message)
    request.slot = slot
    executor.state = SimpleNamespace(admit=lambda requests: None)
    executor.checkpoints, executor.stage = None, SimpleNamespace(last=False)
    executor.runner = SimpleNamespace(receive=lambda tokens: None)
    executor._launch_before = lambda plan, slots: None
    executor.save = lambda saves: None
    executor.config = SimpleNamespace(draft_sampling=False)
    executor.vocab_size = 9
    free = SimpleNamespace(slot=1, constraint=None, params=SamplingParams())
    other = Row(free, 0, 3, samples=True)
    executor.launch(Plan((other,), 1, 1, TokenTree((-1, 0, 1))))
    assert len(stored) == (slot != 0)
