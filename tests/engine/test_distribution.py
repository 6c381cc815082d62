"""Speculative sampling draws from the base's own distribution: joint law of the first three tokens,
20,000 seeds."""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

from mtpkit.engine import Engine, EngineConfig, SamplingParams
from mtpkit.engine.drafting import NoDrafter
from mtpkit.engine.drafting.growth import Shape
from mtpkit.engine.drafting.protocol import MtpDrafter
from mtpkit.engine.drafting.trees import RepeatedTreeDrafter
from mtpkit.engine.requests.tree import parse_tree
from mtpkit.engine.steps.plan import Drafts, HeadSpan, StepOutput
from mtpkit.kernels import acceptance, sampling
from mtpkit.kernels.acceptance import drawn_tree
from mtpkit.model.state import StateLayout
from tests.engine.fakes import CPU, StandIn, state_sizes

VOCAB_SIZE = 4
SEEDS = 20_000
START = 1
TABLE = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(8)) * 0.7
HEADS = {
    "good": (
        TABLE
        + 0.3 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(6))
    ),
    "bad": torch.zeros(VOCAB_SIZE, VOCAB_SIZE),
    "adversarial": -3 * TABLE,
}
"""Logits of drafts after a token: near the base's, blind, and fond of what the base avoids."""


class TableRunner(StandIn):
    """A base whose logits depend on the newest token."""

    table = TABLE

    def run(self, batch) -> StepOutput:
        newest = batch.token_ids[batch.logit_indices]
        return StepOutput(self.table[newest], torch.zeros(len(batch.token_ids), 1, 1))


MODEL = SimpleNamespace(
    mtpkit_config=SimpleNamespace(mtp=SimpleNamespace(hands_on_normed=lambda _: True))
)
"""Of drafters whose states need no norm."""


class TableDrafter(MtpDrafter):
    """Drafts from a table, the best tokens or draws. A state is the token before."""

    def __init__(self, table, depths, draw) -> None:
        self.table = table
        self.depths = depths
        self.sample = draw
        self.draft_token_ids = None
        self.model = MODEL

    def logits(self, state):
        return self.table[state[:, 0].long()]

    def draft(self, hidden, batch, verdict) -> Drafts:
        count = batch.shape.sampling_rows
        newest = batch.newest(verdict.accepted)[1]
        tokens = [verdict.token_ids.gather(1, verdict.accepted[:, None])[:count, 0]]
        probs = []
        for depth in range(1, self.depths + 1):
            state = tokens[-1][:, None].float()
            if not self.sample:
                tokens.append(self.logits(state).argmax(-1))
                continue
            token, drawn_from, _ = self.choose(state, depth, batch, newest)
            tokens.append(token)
            probs.append(drawn_from)
        return Drafts(torch.stack(tokens[1:], 1), torch.stack(probs, 1) if probs else None)


def table_engine(k, heads=None, draw=False) -> Engine:
    config = EngineConfig(
        64, k, max_num_seqs=1000, max_num_batched_tokens=6000, draft_sampling=draw
    )
    drafter = TableDrafter(HEADS[heads], k, draw) if k else NoDrafter()
    layout = StateLayout({}, state_sizes(config))
    return Engine(config, layout, 2000, TableRunner(), drafter, VOCAB_SIZE, CPU)


def decode(k, heads=None, draw=False, seeds=range(SEEDS), **params):
    return decoded(table_engine(k, heads, draw), seeds, params)


@functools.cache
def seeded(**params):
    """Of each seed, which takes longer to check than to decode; kept for all drafts."""
    return [SamplingParams(max_tokens=3, seed=seed, **params) for seed in range(SEEDS)]


@functools.cache
def plain(**params):
    """[SEEDS, 3] tokens of decoding without drafts."""
    return decode(0, **params)


@functools.cache
def drawn_drafts(heads, **params):
    """[SEEDS, 3] tokens of decoding with drafts that are drawn."""
    return decode(3, heads, draw=True, **params)


def decoded(engine, seeds, params):
    """[N, 3] tokens after `START`, of a request for each seed."""
    for seed in seeds:
        engine.add_request([START], seeded(**params)[seed], str(seed))
    outputs = {}
    while engine.has_unfinished:
        outputs |= {
            output.request_id: output.outputs[0].token_ids
            for output in engine.step()
            if output.finished
        }
    return torch.tensor([outputs[str(seed)] for seed in seeds])


@functools.cache
def law(params: SamplingParams) -> torch.Tensor:
    """[V, V, V] probabilities of the first three tokens."""
    joint = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE, dtype=torch.float64)
    one = torch.ones(1)
    top_k = torch.tensor([params.top_k or VOCAB_SIZE])
    for tokens in itertools.product(range(VOCAB_SIZE), repeat=3):
        probability = 1.0
        for i, token in enumerate(tokens):
            counts = torch.bincount(
                torch.tensor(tokens[:i], dtype=torch.int64), minlength=VOCAB_SIZE
            )
            logits = sampling.apply_penalties(
                TABLE[[tokens[i - 1] if i else START]],
                torch.arange(VOCAB_SIZE)[None] == START,
                counts[None],
                params.repetition_penalty * one,
                params.frequency_penalty * one,
                params.presence_penalty * one,
                torch.zeros(1, dtype=torch.int64),
                torch.zeros(0, 0, dtype=torch.int64),
            )
            probs = sampling.probabilities(
                logits, params.temperature * one, top_k, params.top_p * one, params.min_p * one
            )
            probability *= float(probs[0, token])
        joint[tokens] = probability
    return joint / joint.sum()


def check(drawn: torch.Tensor, params: SamplingParams) -> None:
    """Chi-square test of [N, 3] tokens."""
    assert fit(drawn, params) > 1e-3


def fit(drawn: torch.Tensor, params: SamplingParams) -> float:
    """The p-value of [N, 3] tokens under the law, rare triples pooled."""
    expected = law(params).flatten() * len(drawn)
    index = drawn @ torch.tensor([VOCAB_SIZE**2, VOCAB_SIZE, 1])
    counts = torch.bincount(index, minlength=len(expected)).double()
    assert not counts[expected == 0].any()
    rare = (expected < 5) & (expected > 0)
    common = expected >= 5
    assert common.sum() >= 8
    if rare.any():
        counts, expected = (torch.cat([v[common], v[rare].sum()[None]]) for v in (counts, expected))
    else:
        counts = counts[common]
        expected = expected[common]
    scaled = expected * counts.sum() / expected.sum()
    return float(stats.chisquare(counts.numpy(), scaled.numpy()).pvalue)


SETTINGS = [
    {},
    {"temperature": 0.9, "top_p": 0.85},
    {"temperature": 1.5, "top_k": 3},
    {"min_p": 0.2},
    {
        "temperature": 0.8,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.5,
    },
]


@pytest.mark.parametrize("params", SETTINGS)
def test_plain_sampling_follows_the_law(params):
    check(plain(**params), SamplingParams(**params))


def test_of_one_token_the_best_is_drawn():
    best = decode(0, seeds=range(5), temperature=0)
    assert torch.equal(decode(0, seeds=range(5), temperature=5, top_k=1), best)


@pytest.mark.parametrize("params", SETTINGS)
@pytest.mark.parametrize("heads", HEADS)
def test_drawn_drafts_leave_the_law_alone(heads, params):
    check(drawn_drafts(heads, **params), SamplingParams(**params))


@pytest.mark.parametrize("draw", [False, True])
def test_four_outputs_of_each_prompt_follow_the_law(draw):
    engine = table_engine(3, "good", draw)
    for seed in range(0, SEEDS, 4):
        engine.add_request([START], SamplingParams(n=4, max_tokens=3, seed=seed), str(seed))
    outputs = {}
    while engine.has_unfinished:
        outputs |= {one.request_id: one.outputs for one in engine.step(finished_only=True)}
    tokens = [one.token_ids for seed in range(0, SEEDS, 4) for one in outputs[str(seed)]]
    check(torch.tensor(tokens), SamplingParams())
    assert draw or torch.equal(torch.tensor(tokens), plain())


@pytest.mark.parametrize("params", SETTINGS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_best_token_drafts_leave_the_very_tokens_alone(k, heads, params):
    """Stronger than the law: a seed gives the same tokens at every K."""
    assert torch.equal(decode(k, heads, seeds=range(1000), **params), plain(**params)[:1000])


def test_the_law_is_checked_sharply_enough():
    """A temperature that is 10% off is found."""
    drawn = drawn_drafts("bad")
    with pytest.raises(AssertionError):
        check(drawn, SamplingParams(temperature=1.1))


@pytest.mark.parametrize("sabotage", ["accept all", "replace from p"])
def test_broken_rejection_is_found(monkeypatch, sabotage):
    accept = acceptance.accept_rejection

    def broken(drafts, draft_probs, target_probs, accept_uniforms, sample_uniforms):
        if sabotage == "accept all":
            return accept(drafts, draft_probs, target_probs, 0 * accept_uniforms, sample_uniforms)
        accepted, token_ids = accept(
            drafts, draft_probs, target_probs, accept_uniforms, sample_uniforms
        )
        at_stop = accepted[:, None, None].expand(-1, 1, VOCAB_SIZE)
        chosen = sampling.sample(target_probs.gather(1, at_stop)[:, 0], sample_uniforms[:, 0])
        return accepted, token_ids.scatter(1, accepted[:, None], chosen[:, None])

    monkeypatch.setattr(acceptance, "accept_rejection", broken)
    with pytest.raises(AssertionError):
        check(decode(3, "bad", draw=True), SamplingParams())


class TableTreeDrafter(RepeatedTreeDrafter):
    """Draws trees from a table."""

    span = HeadSpan(after=1)

    def __init__(self, table, tree) -> None:
        self.table, self.shape, self.sample, self.draft_token_ids = (
            table,
            Shape(tree, CPU),
            True,
            None,
        )
        self.model = MODEL

    def logits(self, state):
        return self.table[state[:, 0].long()]

    def draft(self, hidden, batch, verdict) -> Drafts:
        count = batch.shape.sampling_rows
        growth, probs, (_, newest) = self.shape.start(), [], batch.newest(verdict.accepted)
        tokens = verdict.token_ids.gather(1, verdict.accepted[:, None])[:count]
        for _ in range(self.shape.tree.depth):
            self.grow(growth, tokens.flatten()[:, None, None].float(), batch, newest, probs)
            tokens = growth.levels[-1].tokens.clamp_min(0) if growth.levels else tokens
        return self.finished(growth, probs, batch)


@pytest.mark.parametrize(
    ("heads", "params", "tree"),
    [
        ("good", SETTINGS[4], [2, 2]),
        ("adversarial", SETTINGS[1], [[0], [1], [2], [0, 0], [0, 0, 0], [1, 0]]),
    ],
)
def test_drawn_trees_leave_the_law_alone(heads, params, tree):
    check(decode_trees(heads, parse_tree(tree), **params), SamplingParams(**params))


def test_trees_that_take_siblings_for_independent_draws_would_be_seen(monkeypatch):
    """A sibling that is judged as if the one before it had not been rejected."""
    monkeypatch.setattr(drawn_tree, "_normalised", lambda weights, otherwise, total: otherwise)
    params = SETTINGS[0]
    with pytest.raises(AssertionError):
        check(
            decode_trees("adversarial", parse_tree([3, 1]), range(4000), **params),
            SamplingParams(**params),
        )


def decode_trees(heads, tree, seeds=range(SEEDS), **params):
    config = EngineConfig(
        64, tree.depth, tree, max_num_seqs=1000, max_num_batched_tokens=9000, draft_sampling=True
    )
    drafter = TableTreeDrafter(HEADS[heads], tree)
    layout = StateLayout({}, state_sizes(config))
    return decoded(
        Engine(config, layout, 2000, TableRunner(), drafter, VOCAB_SIZE, CPU), seeds, params
    )
