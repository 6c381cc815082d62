"""Two ranks decode with trees of drafts what one decodes: the same trees, token for token, in fp32.

Broken on purpose, they do not: see `SABOTAGE`.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state

from mtpkit.engine.steps import vocabulary as choices
from mtpkit.engine.steps.vocabulary import SplitVocabulary, Vocabulary
from mtpkit.kernels import NO_TOKEN, sampling
from mtpkit.kernels.acceptance import drawn_tree
from mtpkit.model import build_model, collectives
from mtpkit.model.inputs import TreeInput
from tests.engine.rank_cases import PREEMPTED, PROMPTS, VOCAB, Case, config, split_model
from tests.engine.test_trees import FIXED, GROWN, watched
from tests.engine.tiny import make_llm
from tests.kernels.test_tree_acceptance import CHILDREN
from tests.ranks import run_ranks
from tests.shared import look_at_new_objects, made_once

GROWN_SHAPE = {key: value for key, value in GROWN.items() if key != "num_speculative_tokens"}
SNAPSHOT = dict(state_rollback="snapshot")
AHEAD = dict(async_scheduling=True)
DRAWN = dict(speculative_token_tree=[3, 2], draft_sampling=True)
CASES = [
    Case("mamba2", 3, settings=FIXED),
    Case("mamba2", 3, settings=GROWN_SHAPE | SNAPSHOT),
    Case("delta", 3, settings=FIXED | SNAPSHOT),
    Case("delta", 3, settings=GROWN_SHAPE),
    Case("attention", 3, settings=FIXED),
    Case("latent", 3, True, settings=GROWN_SHAPE),
    # with filters
    Case("mamba2", 2, settings=dict(speculative_token_tree=[2, 2], max_num_batched_tokens=17)),
    Case("attention", 3, penalised=True, settings=GROWN_SHAPE | AHEAD | PREEMPTED),
    Case("mamba2", 3, settings=FIXED | AHEAD | dict(enable_prefix_caching=True)),
    Case(
        "delta",
        2,
        penalised=True,
        settings=dict(speculative_token_tree=[3, 1], draft_vocab=[1, 33, 40]),
    ),
    Case("mamba2", 2, settings=DRAWN),
    Case("attention", 2, settings=DRAWN | dict(draft_vocab=[1, 33, 40, 41, 60])),
]
"""A rank of two holds one token of the small draft vocabularies, whose trees have more siblings
than that."""
DRAWN_CASE = CASES[-2]
GREEDY_CASE = CASES[0]


def of_first_part(values, tokens, log_sums, group):
    gathered = [collectives.all_gather(part, group)[0] for part in (tokens, values)]
    return gathered[0], gathered[1]


SABOTAGE = {
    "nothing": (GREEDY_CASE, []),
    "nothing with draws": (DRAWN_CASE, []),
    "candidates of the first rank": (GREEDY_CASE, [(choices, "top_of_ranks", of_first_part)]),
    "siblings that every rank leaves out": (
        DRAWN_CASE,
        [(SplitVocabulary, "without", lambda self, w, ids: w)],
    ),
    "p and q of the rank's own column": (
        DRAWN_CASE,
        [(drawn_tree, "_at", lambda w, at: w[:, :1].double())],
    ),
}
"""What is broken, the case in which it must show, and how."""


def names(case: Case) -> str:
    return (
        f"{case.base} K={case.k}"
        f" {'EP ' if case.whole_experts else ''}{case.settings}{case.penalised or ''}"
    )


def decode(model, case: Case, truth: list[list[int]] | None) -> dict:
    """Output tokens of each prompt, and the trees that were made; with a prefix cache those of the
    second time.

    Args:
        truth: what follows each prompt, on some path of each tree; None: trees are the heads' own.
    """
    llm = make_llm(model, case.k, **case.settings)
    trees = watched(
        llm, [prompt + tokens for prompt, tokens in zip(PROMPTS, truth or [], strict=False)]
    )
    for _ in range(2 if llm.engine.executor.checkpoints else 1):
        outputs = llm.generate([dict(prompt_token_ids=prompt) for prompt in PROMPTS], case.params)
        llm.engine.scheduler.check_integrity()
    stats = llm.stats()
    return dict(
        tokens=[output.outputs[0].token_ids for output in outputs],
        trees=sorted([list(known), *tree] for known, tree in trees.made.items() if known),
        ranks=stats.acceptance.ranks_per_depth,
        preemptions=stats.preemptions,
    )


def is_drawn(case: Case) -> bool:
    return case.settings.get("draft_sampling", False)


def one_rank() -> list[list]:
    """Of each case what plain decoding gives, None where drafts are drawn, and what one rank makes
    with trees."""
    models = {}
    plain = {}
    found = []
    for case in CASES:
        model = models.setdefault(case.base, None) or build_model(
            config(case.base), device="cpu", seed=1
        )
        models[case.base] = model
        truth = None
        if not is_drawn(case):
            key = (case.base, case.penalised, case.filtered)
            if key not in plain:
                llm = make_llm(model, 0)
                outputs = llm.generate(
                    [dict(prompt_token_ids=prompt) for prompt in PROMPTS], case.params
                )
                plain[key] = [output.outputs[0].token_ids for output in outputs]
            truth = plain[key]
        found.append([truth, decode(model, case, truth)])
    return found


def two_ranks(rank: int, wanted: list, out: Path) -> None:
    look_at_new_objects()
    found: list[dict] = [{}] * len(CASES)
    models: dict[tuple, object] = {}
    for index in sorted(
        range(len(CASES)), key=lambda index: (CASES[index].whole_experts, CASES[index].base)
    ):
        case = CASES[index]
        key = (case.base, case.whole_experts)
        if key not in models:
            models[key] = split_model(config(case.base), case.whole_experts)
        found[index] = decode(models[key], case, wanted[index][0])
    model = split_model(config("mamba2"))
    survived = {}
    for name, (case, patches) in SABOTAGE.items():
        with pytest.MonkeyPatch.context() as patch:
            for where, attribute, value in patches:
                patch.setattr(where, attribute, value)
            truth, want = wanted[CASES.index(case)]
            survived[name] = decode(model, case, truth) == json.loads(json.dumps(want))
    (out / f"{rank}.json").write_text(json.dumps([found, survived]))
    check_candidates()
    check_acceptance()
    check_that_rank_0_decides(rank, model, wanted[0][0])


def split_vocabulary() -> tuple[SplitVocabulary, slice]:
    split = SplitVocabulary(VOCAB, parallel_state.get_tensor_model_parallel_group())
    return split, slice(split.first, split.first + split.width)


def check_candidates() -> None:
    """The best tokens of two parts are those of the whole, ties and invalid rows, too."""
    split, own = split_vocabulary()
    generator = torch.Generator().manual_seed(11)
    logits = (2 * torch.randn(200, VOCAB, generator=generator)).round(decimals=0)  # most tokens tie
    logits[:5, 3], logits[5:9, 60], logits[9:12] = torch.nan, torch.inf, -torch.inf
    logits[12:30, :32], logits[30:40, 2:] = -torch.inf, -torch.inf
    for count in (1, 3, 7):
        tokens, log_probs = split.top_tokens(logits[:, own], count)
        want = Vocabulary(VOCAB).top_tokens(logits, count)
        assert tokens.equal(want[0]) and (count == 1 or tokens[30:40, 2:].eq(NO_TOKEN).all())
        torch.testing.assert_close(log_probs, want[1], rtol=1e-5, atol=1e-5, equal_nan=True)
    for drafted in ([1, 5, 31, 32, 60], [33, 40, 63]):
        ids = torch.tensor(drafted)
        mine = ids[(ids >= own.start) & (ids < own.stop)]
        tokens, log_probs = split.top_tokens(logits[:, mine], 3, mine)
        want = Vocabulary(VOCAB).top_tokens(logits[:, ids], 3, ids)
        assert tokens.equal(want[0])
        torch.testing.assert_close(log_probs, want[1], rtol=1e-5, atol=1e-5, equal_nan=True)


def check_acceptance() -> None:
    """Of trees of seven tokens, some of whose siblings had nothing left to be drawn from."""
    split, own = split_vocabulary()
    whole = Vocabulary(VOCAB)
    rows = 300
    generator = torch.Generator().manual_seed(5)
    q, p = (torch.randn(rows, n, VOCAB, generator=generator).mul(3).softmax(-1) for n in (3, 7))
    q[:20], p[20:30, :] = torch.eye(VOCAB)[37], torch.nan
    tokens = torch.zeros(rows, 7, dtype=torch.int64)
    for token, children in enumerate(CHILDREN[:3].tolist()):
        left = q[:, token]
        for child in (one for one in children if one > 0):
            drawn = sampling.sample(
                left, torch.rand(rows, generator=generator, dtype=torch.float64)
            ).clamp_min(0)
            tokens[:, child], left = drawn, whole.without(left, drawn)
            assert split.without(q[:, token, own], drawn).equal(
                whole.without(q[:, token], drawn)[:, own]
            )
    accept, draw = torch.rand(2, rows, 7, generator=generator, dtype=torch.float64)
    index = torch.tensor([0, 1, 2, 0, 0, 0, 0])
    tree = TreeInput(index, index, None, 0, CHILDREN, index)
    have = split.accept_drawn_tree(
        tokens, tree, q[..., own].contiguous(), p[..., own].contiguous(), accept, draw, 2
    )
    want = whole.accept_drawn_tree(tokens, tree, q, p, accept, draw, 2)
    assert (
        all(map(torch.equal, have, want))
        and set(want[0].tolist()) == {0, 1, 2}
        and (want[1] == NO_TOKEN).any()
    )


class Undecided:
    """Trees and chains of any K in turn; no rank but the first may ask it."""

    def __init__(self, rank: int, tree) -> None:
        self.rank, self.turns = rank, itertools.cycle([tree, 2, tree, tree, 0, 3])

    def decide(self, requests):
        assert self.rank == 0
        return next(self.turns), (0, 0)

    def observe(self, accepted, fresh, rates=()) -> None:
        pass

    def observe_trees(self, ranks) -> None:
        pass


def check_that_rank_0_decides(rank: int, model, wanted: list[list[int]]) -> None:
    llm = make_llm(model, 3, **FIXED)
    llm.engine.speculation = Undecided(rank, llm.engine.config.tree)
    outputs = llm.generate([dict(prompt_token_ids=prompt) for prompt in PROMPTS], CASES[0].params)
    assert [output.outputs[0].token_ids for output in outputs] == wanted


@pytest.fixture(scope="module")
def decoded(tmp_path_factory):
    """What one rank decoded, and what each of two did."""

    def make(path: Path) -> None:
        wanted = one_rank()
        (path / "wanted.json").write_text(json.dumps(wanted))
        run_ranks(two_ranks, wanted, path)

    path = made_once(tmp_path_factory, "two_ranks_with_trees", make)
    return [json.loads((path / name).read_text()) for name in ("wanted.json", "0.json", "1.json")]


@pytest.mark.parametrize("index", range(len(CASES)), ids=[names(case) for case in CASES])
def test_two_ranks_decode_what_one_does(decoded, index):
    truth, want = decoded[0][index]
    assert truth is None or want["tokens"] == truth
    for found, _ in decoded[1:]:
        assert found[index] == want


def test_siblings_are_accepted_and_requests_preempted(decoded):
    for case, (_, want) in zip(CASES, decoded[0], strict=True):
        assert (want["preemptions"] > 0) == ("num_blocks" in case.settings), names(case)
        assert want["ranks"][0][0] > 0 and (want["ranks"][0][1] > 0 or is_drawn(case)), names(case)


@pytest.mark.parametrize("name", SABOTAGE)
def test_what_is_broken_shows(decoded, name):
    assert [survived[name] for _, survived in decoded[1:]] == [name.startswith("nothing")] * 2
