"""Acceptance: worked examples, and the output distribution by enumeration of uniforms."""

import pytest
import torch
from scipy import stats

from mtpkit.kernels import sampling
from mtpkit.kernels.acceptance import accept_matching, accept_rejection


@pytest.mark.parametrize(
    "drafts, choices, accepted, token_ids",
    [
        ([5, 7, 9], [5, 7, 2, 4], 2, [5, 7, 2, 0]),
        ([5, 7, 9], [5, 7, 9, 4], 3, [5, 7, 9, 4]),
        ([5, 7, 9], [1, 7, 9, 4], 0, [1, 0, 0, 0]),
        ([], [4], 0, [4]),
    ],
)
def test_matching_accepts_the_longest_equal_prefix(drafts, choices, accepted, token_ids):
    got = accept_matching(torch.tensor([drafts], dtype=torch.int64), torch.tensor([choices]))
    assert got[0].tolist() == [accepted] and got[1].tolist() == [token_ids]


def draw_from_drafts(p, q, rows):
    """Verdicts of `rows` rows whose drafts are drawn from q [K, V] and verified against p [1 + K, V]."""
    depths = len(q)
    seeds = torch.arange(rows)

    def numbers(stream, count):
        return torch.stack([sampling.uniform(seeds, torch.full((rows,), i), stream) for i in range(count)], 1)

    draft_uniforms = numbers(2, depths)
    drafts = torch.stack([sampling.sample(q[k].expand(rows, -1), draft_uniforms[:, k]) for k in range(depths)], 1)
    return drafts, accept_rejection(
        drafts, q.expand(rows, -1, -1), p.expand(rows, -1, -1), numbers(1, depths), numbers(0, depths + 1)
    )


@pytest.mark.parametrize("kind", ["equal", "near", "far", "disjoint"])
def test_rejection_gives_the_target_distribution(kind):
    generator = torch.Generator().manual_seed(3)
    p = torch.rand(3, 6, generator=generator)
    p[:, 5] = 0
    q = {
        "equal": p[:2],
        "near": p[:2] + 0.2 * torch.rand(2, 6, generator=generator),
        "far": torch.rand(2, 6, generator=generator) ** 4,
        "disjoint": torch.eye(6)[[5, 5]],
    }[kind]
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    drafts, (accepted, token_ids) = draw_from_drafts(p, q, 20_000)
    for position in range(3):
        reached = accepted >= position
        if not reached.any():
            continue
        counts = torch.bincount(token_ids[reached, position], minlength=6)
        assert counts[5] == 0
        expected = p[position, :5].double() / p[position, :5].double().sum()
        assert stats.chisquare(counts[:5].numpy(), (expected * reached.sum()).numpy()).pvalue > 1e-3
    rate = torch.minimum(p[0], q[0]).sum()
    assert abs((accepted > 0).double().mean() - rate) < 0.02
    for row in range(50):
        count = int(accepted[row])
        assert token_ids[row, :count].tolist() == drafts[row, :count].tolist()
        assert not token_ids[row, count + 1 :].any()


def test_rejection_of_certain_drafts_by_certain_targets_is_greedy_verification():
    certain = torch.eye(6)
    drafts = torch.tensor([[1, 2], [1, 3], [0, 2]])
    targets = certain[torch.tensor([1, 2, 4])].expand(3, -1, -1)
    numbers = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    accepted, token_ids = accept_rejection(drafts, certain[drafts], targets, numbers[:, :2], numbers)
    assert accepted.tolist() == [2, 1, 0]
    assert token_ids.tolist() == [[1, 2, 4], [1, 2, 0], [1, 0, 0]]
