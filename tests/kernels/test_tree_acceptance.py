"""Acceptance in trees, the candidates of a head, and penalties along paths."""

import pytest
import torch
from scipy import stats

from mtpkit.kernels import NO_TOKEN, sampling
from mtpkit.kernels.acceptance import accept_drawn_tree
from tests.kernels.test_sampling import run
from tests.kernels.test_trees import MASKS, PARENTS, PATHS, TOKENS, path

# the interpreter's loops
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.mark.parametrize(
    ("choices", "accepted", "chosen", "along", "ranks"),
    [
        ([5, 3, 4, 8, 6, 1, 2], 3, [5, 3, 6, 2], [0, 1, 4, 6], [0, 1, 0]),
        ([6, 3, 7, 8, 9, 1, 2], 2, [6, 7, 1, 0], [0, 2, 5, 0], [1, 0, -2]),
        ([6, 3, 3, 8, 9, 1, 2], 1, [6, 3, 0, 0], [0, 2, 0, 0], [1, -1, -2]),
        ([1, 3, 7, 8, 9, 1, 2], 0, [1, 0, 0, 0], [0, 0, 0, 0], [-1, -2, -2]),
        ([NO_TOKEN, 3, 7, 8, 9, 1, 2], 0, [NO_TOKEN, 0, 0, 0], [0, 0, 0, 0], [-1, -2, -2]),
    ],
)
def test_the_child_that_was_chosen_is_followed(twin, choices, accepted, chosen, along, ranks):
    """The tree 0 -> (5, 6), 5 -> (4, 3), 6 -> 7, 3 -> 6: its tokens in order are -, 5, 6, 4, 3, 7,
    6."""
    tokens = torch.tensor([[0, 5, 6, 4, 3, 7, 6]])
    inputs = (t.to(twin.device) for t in (tokens, PARENTS[:1], torch.tensor([choices])))
    got = twin("acceptance").accept_tree(*inputs, 3)
    assert [part.tolist()[0] for part in got] == [accepted, chosen, along, ranks]


@pytest.mark.parametrize("rows", [0, 3])
def test_a_chain_is_accepted_as_by_matching(twin, rows):
    tokens, choices = torch.randint(0, 2, (2, rows, 5))
    chain = torch.arange(-1, 4).expand(rows, -1)
    inputs = [t.to(twin.device) for t in (tokens, chain, choices)]
    accepted, chosen, along, _ = twin("acceptance").accept_tree(*inputs, 4)
    want = twin("acceptance").accept_matching(inputs[0][:, 1:], inputs[2])
    assert accepted.equal(want[0]) and chosen.equal(want[1])
    depth = torch.arange(5, device=twin.device)
    assert along.equal(torch.where(depth <= accepted[:, None], depth, 0))


CHILDREN = torch.tensor([[1, 2, 3], [4, 5, -1], [6, -1, -1]] + [[-1, -1, -1]] * 4)
Q = torch.tensor([[0.6, 0.3, 0.1, 0.0], [0.05, 0.05, 0.1, 0.8], [0.25, 0.25, 0.25, 0.25]])
P = torch.tensor(
    [[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.0, 0.5, 0.5, 0.0], [0.4, 0.3, 0.2, 0.1]]
)


def test_drawn_siblings_leave_the_law_alone():
    """Two tokens over 20,000 seeds: whatever the drafts were, the first is distributed as p at
    token 0, and the second as p after the first, which is `P` of that token."""
    rows = 20_000
    seeds = torch.arange(rows)
    uniforms = []
    tokens = torch.zeros(rows, 7, dtype=torch.int64)
    drafts = Q.expand(rows, -1, -1)
    for token, children in enumerate(CHILDREN[:3].tolist()):
        weights = drafts[:, token].clone()
        for child in (one for one in children if one > 0):
            numbers = sampling.uniform(
                seeds, torch.full_like(seeds, token), 2, torch.full_like(seeds, child)
            )
            tokens[:, child] = sampling.sample(weights, numbers)
            weights = weights.scatter(1, tokens[:, child : child + 1], 0.0)
    for stream in (0, 1):
        each = [sampling.uniform(seeds, torch.full_like(seeds, node), stream) for node in range(7)]
        uniforms.append(torch.stack(each, 1))
    target = torch.cat([P[:1].expand(rows, -1, -1), P[tokens[:, 1:]]], 1)
    index = torch.tensor([0, 1, 2, 0, 0, 0, 0])
    accepted, chosen, along, ranks = accept_drawn_tree(
        tokens, CHILDREN, drafts, index, target, uniforms[1], uniforms[0], 2
    )
    assert {0, 1, 2} == set(accepted.tolist()) and {-2, -1, 0, 1, 2} == set(
        ranks.flatten().tolist()
    )
    first = torch.bincount(chosen[:, 0], minlength=4)
    assert (
        stats.chisquare(first.numpy(), (P[0].double() * rows / P[0].double().sum()).numpy()).pvalue
        > 1e-3
    )
    for token in range(3):  # q never draws the last one
        at = (accepted > 0) & (chosen[:, 0] == token)
        second = torch.bincount(chosen[at, 1], minlength=4)
        possible = P[token] > 0
        assert not second[~possible].any()
        want = P[token][possible].double()
        have = second[possible]
        assert stats.chisquare(have.numpy(), (want * have.sum() / want.sum()).numpy()).pvalue > 1e-3
    for row in range(50):
        assert along[row, : accepted[row] + 1].tolist() in [
            path(PARENTS_OF_CHILDREN, node) for node in range(7)
        ]


PARENTS_OF_CHILDREN = [-1, 0, 0, 0, 1, 1, 2]


def test_a_child_that_nothing_was_left_for_is_no_candidate():
    """q has one token: the second sibling, which was drawn from nothing, holds token 0 and must not
    be accepted."""
    tokens = torch.tensor([[0, 2, 0]])
    q = torch.tensor([[[0.0, 0.0, 1.0]]])
    p = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]])
    children = torch.tensor([[1, 2], [-1, -1], [-1, -1]])
    none = torch.zeros(1, 3, dtype=torch.float64)
    got = accept_drawn_tree(
        tokens, children, q, torch.zeros(3, dtype=torch.int64), p, none + 0.5, none, 1
    )
    assert [part.tolist()[0] for part in got] == [0, [0, 0], [0, 0], [-1]]
    nan = accept_drawn_tree(
        tokens, children, q, torch.zeros(3, dtype=torch.int64), p * torch.nan, none, none, 1
    )
    assert nan[1].tolist() == [[NO_TOKEN, 0]]


@pytest.mark.parametrize("vocabulary", [3, 63, 4097, 9000])
@pytest.mark.parametrize("count", [1, 3])
def test_top_tokens(twin, vocabulary, count):
    logits = torch.randn(5, vocabulary + 3)[:, :vocabulary].bfloat16()
    logits[0, -2:] = 9.0  # ties
    logits[1, 1] = torch.nan
    logits[2, 1:] = -torch.inf
    logits[3] = -torch.inf
    tokens, log_probs = (
        t.cpu() for t in twin("draft_head").top_tokens(logits.to(twin.device), count)
    )
    want = logits.double().log_softmax(-1)
    order = torch.sort(want, dim=-1, descending=True, stable=True)
    for row in (0, 4):
        assert tokens[row].tolist() == order.indices[row, :count].tolist()
        torch.testing.assert_close(
            log_probs[row].double(), order.values[row, :count], rtol=1e-5, atol=1e-5
        )
    assert tokens[[1, 3]].eq(NO_TOKEN).all() and log_probs[[1, 3]].isnan().all()
    assert tokens[2].tolist() == [0] + [NO_TOKEN] * (count - 1) and log_probs[2, 0] == 0


def test_penalties_along_paths(twin):
    vocabulary = 30
    drafts = torch.randint(0, 4, (3, TOKENS - 1))
    x = torch.randn(3 * TOKENS + 1, vocabulary)
    prompt = torch.rand(4, vocabulary) < 0.3
    counts = torch.randint(0, 3, (4, vocabulary))
    penalties = torch.tensor([[1.3] * 4, [0.5] * 4, [0.7] * 4])
    slots = torch.tensor([2, 0, 1]).repeat_interleave(TOKENS)
    slots = torch.cat([slots, torch.tensor([3])])
    got = run(twin, "apply_penalties", x, prompt, counts, *penalties, slots, drafts, MASKS)
    for row, along in [*PATHS, (3, [0])]:
        n = row * TOKENS + along[-1]
        before = drafts[row, [token - 1 for token in along[1:]]] if row < 3 else drafts[0, :0]
        seen = counts[slots[n]] + torch.bincount(before, minlength=vocabulary)
        want = x[n].double()
        factor = torch.where(prompt[slots[n]] | (seen > 0), 1.3, 1.0).double()
        want = torch.where(want > 0, want / factor, want * factor) - 0.5 * seen - 0.7 * (seen > 0)
        torch.testing.assert_close(got[n].double(), want, rtol=1e-6, atol=1e-6)
