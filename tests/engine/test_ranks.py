"""Two ranks decode what one decodes, token for token, in fp32; each has half of the memory.

Broken on purpose, they do not: see `SABOTAGE`.
"""

import itertools
import json
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core import parallel_state

from mtpkit.engine.ranks.announcement import Announcement
from mtpkit.engine.ranks.follow import SplitRanks
from mtpkit.engine.ranks.join import _sizes_of
from mtpkit.engine.requests.tree import parse_tree
from mtpkit.engine.scheduling.adaptive import FixedSpeculation
from mtpkit.engine.scheduling.decision import Decision
from mtpkit.engine.steps import vocabulary as choices
from mtpkit.engine.steps.plan import Plan, Row
from mtpkit.engine.steps.vocabulary import SplitVocabulary, Vocabulary
from mtpkit.errors import MtpkitError, UserError
from mtpkit.model import build_model, collectives
from mtpkit.model.layers import linear, moe
from tests.engine.rank_cases import (
    MIXED,
    PROMPTS,
    VOCAB,
    Case,
    cases,
    config,
    decode,
    names,
    one_rank,
    split_model,
)
from tests.engine.tiny import held_bytes, make_llm
from tests.ranks import run_ranks
from tests.shared import look_at_new_objects, made_once

TESTED = cases()
TREE = parse_tree([2, 1])


GREEDY = Case("mamba2", 0)
FILTERED = Case("attention", 2, settings=MIXED)
EXPERTS = Case("latent", 0, True)
DRAWN = Case("mamba2", 3, guided=False, settings=dict(draft_sampling=True))
PENALISED = Case("mamba2", 2, penalised=True, settings=dict(state_rollback="snapshot"))


def test_the_sizes_of_a_model_that_is_given_are_its_own():
    sizes = SimpleNamespace(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=2,
        sequence_parallel=False,
    )
    options = SimpleNamespace(
        model=SimpleNamespace(config=sizes),
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        enable_expert_parallel=False,
    )
    assert _sizes_of(options) == (2, 1, True)
    sizes.expert_model_parallel_size = 1
    assert _sizes_of(options) == (2, 1, False)
    options.enable_expert_parallel = True
    with pytest.raises(UserError, match=r"split over 2 ranks, experts over 1, .* leave all sizes"):
        _sizes_of(options)


def alone(values, group):
    return values


def of_first_part(values, tokens, group, first):
    return tuple(
        part[0]
        for part in (collectives.all_gather(values, group), collectives.all_gather(tokens, group))
    )


SABOTAGE = {
    "nothing": (GREEDY, []),
    "nothing with filters": (FILTERED, []),
    "nothing with experts": (EXPERTS, []),
    "nothing with draws": (DRAWN, []),
    "nothing with penalties": (PENALISED, []),
    "no sum after linears": (GREEDY, [(linear, "all_reduce", alone)]),
    "no sum after experts": (EXPERTS, [(moe, "all_reduce", alone)]),
    "the first rank's best tokens": (GREEDY, [(choices, "best_of_ranks", of_first_part)]),
    "shares in the wrong order": (
        GREEDY,
        [
            (
                choices,
                "all_gather",
                lambda values, group: collectives.all_gather(values, group).flip(0),
            )
        ],
    ),
    "no top-p": (FILTERED, [(SplitVocabulary, "_keep_mass", lambda self, scaled, top_p: scaled)]),
    "no top-k": (FILTERED, [(SplitVocabulary, "_keep_best", lambda self, scaled, top_k: scaled)]),
    "penalties of wrong columns": (
        PENALISED,
        [(SplitVocabulary, "place", lambda self, ids: ids % self.width)],
    ),
    "drafts that every rank holds": (
        DRAWN,
        [(SplitVocabulary, "place", lambda self, ids: ids % self.width)],
    ),
}
"""What is broken, the case in which it must show, and how."""


def measured(case: Case, model, truth) -> dict:
    tokens, llm = decode(model, case, truth)
    stats = llm.stats()
    plan = llm.memory_plan
    return dict(
        tokens=tokens,
        preemptions=stats.preemptions,
        accepted=sum(stats.acceptance.accepted_per_depth),
        weights=sum(parameter.nbytes for parameter in llm.model.parameters()),
        held=held_bytes(llm.engine),
        planned=plan.slot_bytes * plan.max_num_seqs + plan.kv_bytes,
    )


def two_ranks(rank: int, wanted: list[list[list[int]]], out: Path) -> None:
    look_at_new_objects()
    order = sorted(
        range(len(TESTED)), key=lambda index: (TESTED[index].whole_experts, TESTED[index].base)
    )
    found: list[dict] = [{}] * len(TESTED)
    models: dict[tuple[str, bool], Any] = {}
    for index in order:
        case = TESTED[index]
        key = (case.base, case.whole_experts)
        if key not in models:
            models[key] = split_model(config(case.base), case.whole_experts)
        found[index] = measured(case, models[key], wanted[index])
    survived = {}
    parallel_state.destroy_model_parallel()
    for name, (case, patches) in SABOTAGE.items():
        with pytest.MonkeyPatch.context() as patch:
            for where, attribute, value in patches:
                patch.setattr(where, attribute, value)
            model = split_model(config(case.base), case.whole_experts)
            survived[name] = decode(model, case)[0] == wanted[TESTED.index(case)]
    (out / f"{rank}.json").write_text(json.dumps(found))
    (out / f"sabotage{rank}.json").write_text(json.dumps(survived))
    check_choices(rank)
    check_that_rank_0_decides(rank, wanted)


def check_choices(rank: int) -> None:
    """What two ranks choose from parts of logits is what one chooses from all of them, ties and
    invalid rows, too."""
    split = SplitVocabulary(VOCAB, parallel_state.get_tensor_model_parallel_group())
    whole = Vocabulary(VOCAB)
    own = slice(split.first, split.first + split.width)
    generator = torch.Generator().manual_seed(11)
    rows = 400
    # most tokens tie
    logits = (2 * torch.randn(rows, VOCAB, generator=generator)).round(decimals=0)
    logits[:5, 3], logits[5:9, 60], logits[9:10] = torch.nan, torch.inf, -torch.inf
    logits[11:40, :32] = -torch.inf
    uniforms = torch.rand(rows, generator=generator, dtype=torch.float64)
    temperature = torch.tensor([0.0, 0.6, 1.0, 2.5]).repeat(rows // 4)
    top_k = torch.randint(1, VOCAB + 1, (rows,), generator=generator)
    top_p = torch.rand(rows, generator=generator).clamp_min(0.01)
    top_p[::3] = 1.0
    min_p = 0.2 * torch.rand(rows, generator=generator)
    assert torch.equal(split.argmax(logits[:, own]), whole.argmax(logits))
    for filters in itertools.product([None, top_k], [None, top_p], [None, min_p]):
        shaping = (temperature, *filters)
        want = whole.probabilities(logits, shaping)
        have = split.probabilities(logits[:, own], shaping)
        torch.testing.assert_close(have, want[:, own], rtol=1e-5, atol=1e-7, equal_nan=True)
        drawn = split.sample_logits(logits[:, own], shaping, uniforms)
        assert torch.equal(drawn, whole.sample_logits(logits, shaping, uniforms)), filters
    probs, other = (
        torch.randn(60, 4, VOCAB, generator=generator).mul(2).softmax(-1) for _ in range(2)
    )
    drafts = torch.randint(VOCAB, (60, 3), generator=generator)
    accept, draw = torch.rand(2, 60, 4, generator=generator, dtype=torch.float64)
    parts = probs[..., own].contiguous(), other[:, :3, own].contiguous()
    have = split.accept_rejection(drafts, parts[1], parts[0], accept[:, :3], draw)
    want = whole.accept_rejection(drafts, other[:, :3], probs, accept[:, :3], draw)
    assert all(map(torch.equal, have, want)) and 0 < int(want[0].sum()) < 180


class Undecided:
    """Another K in each step; no rank but the first may ask it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.steps = 0

    def decide(self, requests):
        assert self.rank == 0
        self.steps += 1
        k = self.steps % 4
        short = (len(requests) // 2, self.steps % k) if k else (0, 0)
        return k, short

    def observe(self, accepted, fresh, rates=()) -> None:
        pass


def check_that_rank_0_decides(rank: int, wanted) -> None:
    """K, and prompt tokens beside decoding requests, though each rank's clock says something
    else."""
    model = split_model(config("mamba2"))
    case = Case("mamba2", 3, settings=dict(max_inter_token_latency=1e-6 + rank, max_num_seqs=2))
    with pytest.raises(
        UserError,
        match=r"rank 1 differs from rank 0: max_inter_token_latency is 1\.000001, not 1e-06",
    ):
        decode(model, case)
    case = replace(
        case, settings=dict(max_inter_token_latency=1e-6, max_num_seqs=2, max_mixed_tokens=0)
    )
    llm = make_llm(model, case.k, **case.settings)
    llm.engine.speculation = Undecided(rank)
    llm.engine.pacing._most = lambda *args: 3 + 2 * rank
    outputs = llm.generate([dict(prompt_token_ids=prompt) for prompt in PROMPTS], case.params)
    assert [output.outputs[0].token_ids for output in outputs] == wanted[0]


FILES = ("wanted.json", "0.json", "1.json", "sabotage0.json", "sabotage1.json")


@pytest.fixture(scope="module")
def decoded(tmp_path_factory):
    """What one rank decoded, and what each of two did."""

    def make(path: Path) -> None:
        wanted = one_rank(TESTED)
        (path / "wanted.json").write_text(json.dumps(wanted))
        run_ranks(two_ranks, wanted, path)

    path = made_once(tmp_path_factory, "two_ranks", make)
    return [json.loads((path / name).read_text()) for name in FILES]


@pytest.mark.parametrize("index", range(len(TESTED)), ids=[names(case) for case in TESTED])
def test_two_ranks_decode_what_one_does(decoded, index):
    wanted, first, second, *_ = decoded
    assert first[index]["tokens"] == wanted[index]
    assert second[index]["tokens"] == wanted[index]


@pytest.mark.parametrize("name", SABOTAGE)
def test_what_is_broken_shows(decoded, name):
    assert [one[name] for one in decoded[3:]] == [name.startswith("nothing")] * 2


def test_drafts_are_accepted_and_requests_preempted(decoded):
    for case, one in zip(TESTED, decoded[1], strict=True):
        assert (one["preemptions"] > 0) == ("num_blocks" in case.settings), names(case)
        assert one["accepted"] > 0 or case.k == 0 or not case.guided, names(case)


@pytest.mark.parametrize("base", ["mamba2", "delta", "latent", "attention"])
def test_each_rank_has_half_of_the_memory(decoded, base):
    case = Case(base, 3)
    one = decode(build_model(config(base), device="cpu", seed=1), case)[1]
    whole = sum(parameter.nbytes for parameter in one.model.parameters())
    for rank in (1, 2):
        mine = decoded[rank][TESTED.index(case)]
        assert mine["weights"] < 0.6 * whole
        share = mine["held"] / held_bytes(one.engine)
        assert share == (1 if base in ("latent", "attention") else 0.5), (
            "latents, and groups of fewer heads, are whole"
        )
        assert mine["planned"] >= mine["held"]


def announcement(step=3, preemptions=2, drafts=2, limit=40, rows=2, **changed) -> Announcement:
    """The announcement of a step of two rows, the first of which decodes; `changed`: of the second,
    a chunk."""
    own = dict(arrival=7, seed=11, start=4, length=5, slot=1, block_table=[8, 9]) | changed
    request = SimpleNamespace(arrival=1, seed=3, slot=0, block_table=[2])
    other = SimpleNamespace(
        **{name: own[name] for name in ("arrival", "seed", "slot", "block_table")}
    )
    chunk = Row(other, own["start"], own["length"], samples=True)
    plan = Plan((Row(request, 6, 3, samples=True), chunk)[:rows], 1, rows, 2)
    return Announcement.of(step, Decision(drafts, prompt_tokens=limit), [plan], preemptions)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (dict(step=4), "step"),
        (dict(drafts=1), "num_speculative_tokens"),
        (dict(drafts=TREE), "trees"),
        (dict(limit=41), "prompt_tokens"),
        (dict(limit=None), "prompt_tokens"),
        (dict(preemptions=3), "preemptions"),
        (dict(rows=1), "chunks"),
        (dict(length=6), "chunk_tokens"),
        (dict(arrival=8), "digest"),
        (dict(seed=12), "digest"),
        (dict(start=3), "digest"),
        (dict(slot=2), "digest"),
        (dict(block_table=[8, 10]), "digest"),
    ],
)
def test_ranks_notice_all_in_which_their_plans_differ(changed, said):
    differences = announcement().differences(announcement(**changed))
    assert any(one.startswith(f"{said} ") for one in differences)
    assert not announcement().differences(announcement())
    assert Announcement.unpack(astuple(announcement(**changed))) == announcement(**changed)


@pytest.mark.parametrize(
    "decision", [Decision(0), Decision(3, (2, 1), 17), Decision(TREE, prompt_tokens=40)]
)
def test_a_decision_arrives_as_it_was_made(decision):
    sent = astuple(Announcement.of(0, decision, [], 0))
    assert Announcement.unpack(sent).decision(TREE) == decision


def test_a_rank_plans_with_all_that_the_first_one_decided(monkeypatch):
    """The drafts and the number of prompt tokens, which rank 0 takes from times that it measured
    itself. Nothing of the scheduler is written."""
    ranks = object.__new__(SplitRanks)
    ranks.rank = 1
    ranks._steps = 3
    sent = list(astuple(announcement(drafts=TREE)))
    monkeypatch.setattr(ranks, "_broadcast", lambda values: sent, raising=False)
    asked = []

    class Planner(NamedTuple):
        has_unfinished: bool = True
        decision: Decision = Decision(TREE, prompt_tokens=40)
        config: Any = SimpleNamespace(tree=TREE)
        admission: Any = SimpleNamespace(num_preemptions=0)

        def plan(self, decision):
            asked.append(decision)
            return []

    with pytest.raises(
        MtpkitError, match=r"rank 0 plans another step than rank 1: .*plans 1, not 0"
    ):
        ranks.plan(Planner(), FixedSpeculation(0))
    assert asked == [Decision(TREE, prompt_tokens=40)]
