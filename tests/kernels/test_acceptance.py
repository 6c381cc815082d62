"""Acceptance: worked examples, and the output distribution by enumeration of uniforms."""

import pytest
import torch
from scipy import stats

from mtpkit.kernels import NO_TOKEN, sampling
from mtpkit.kernels.acceptance import reference

# NumPy's, under the interpreter.
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore:Conversion of an array:DeprecationWarning"
)


def run(twin, name, *tensors):
    """Run an op of a twin on its device; returns accepted counts and token ids on the CPU."""
    accepted, token_ids = getattr(twin("acceptance"), name)(
        *(tensor.to(twin.device) for tensor in tensors)
    )
    return accepted.cpu(), token_ids.cpu()


@pytest.mark.parametrize(
    ("drafts", "choices", "accepted", "token_ids"),
    [
        ([5, 7, 9], [5, 7, 2, 4], 2, [5, 7, 2, 0]),
        ([5, 7, 9], [5, 7, 9, 4], 3, [5, 7, 9, 4]),
        ([5, 7, 9], [1, 7, 9, 4], 0, [1, 0, 0, 0]),
        ([], [4], 0, [4]),
        ([5, 7, 9], [5, NO_TOKEN, 9, 4], 1, [5, NO_TOKEN, 0, 0]),
        ([5, 7, 9], [5, 7, 2, NO_TOKEN], 2, [5, 7, 2, 0]),
        ([5], [5, NO_TOKEN], 1, [5, NO_TOKEN]),
        ([], [NO_TOKEN], 0, [NO_TOKEN]),
    ],
)
def test_matching_accepts_the_longest_equal_prefix(twin, drafts, choices, accepted, token_ids):
    got = run(
        twin, "accept_matching", torch.tensor([drafts], dtype=torch.int64), torch.tensor([choices])
    )
    assert got[0].tolist() == [accepted] and got[1].tolist() == [token_ids]


@pytest.mark.parametrize("rows", [0, 1, 3, 63])
@pytest.mark.parametrize("depths", [0, 1, 2, 5])
def test_matching_of_many_rows_in_views(twin, rows, depths):
    drafts = torch.randint(0, 2, (rows, 2 * depths))[:, ::2]
    choices = torch.randint(0, 2, (rows + 1, 2 + depths))
    choices = choices[1:, 1:]
    accepted, token_ids = run(twin, "accept_matching", drafts, choices)
    for row in range(rows):
        count = 0
        while count < depths and drafts[row, count] == choices[row, count]:
            count += 1
        assert accepted[row] == count
        assert token_ids[row].tolist() == choices[row, : count + 1].tolist() + [0] * (
            depths - count
        )


def draw_from_drafts(twin, p, q, rows):
    """Verdicts of `rows` rows whose drafts are drawn from q [K, V] and verified against p [1 + K,
    V]."""
    depths = len(q)
    seeds = torch.arange(rows)

    def numbers(stream, count):
        return torch.stack(
            [sampling.uniform(seeds, torch.full((rows,), i), stream) for i in range(count)], 1
        )

    draft_uniforms = numbers(2, depths)
    drafts = torch.stack(
        [sampling.sample(q[k].expand(rows, -1), draft_uniforms[:, k]) for k in range(depths)], 1
    )
    q = q.to(twin.device).expand(rows, -1, -1)
    p = p.to(twin.device).expand(rows, -1, -1)
    return drafts, run(
        twin, "accept_rejection", drafts, q, p, numbers(1, depths), numbers(0, depths + 1)
    )


@pytest.mark.parametrize("kind", ["equal", "near", "far", "disjoint"])
def test_rejection_gives_the_target_distribution(twin, kind):
    rows = 120 if twin.name == "interpreter" else 20_000
    generator = torch.Generator().manual_seed(3)
    p = torch.rand(3, 6, generator=generator)
    p[:, 5] = 0
    q = {
        "equal": p[:2],
        "near": p[:2] + 0.2 * torch.rand(2, 6, generator=generator),
        "far": torch.rand(2, 6, generator=generator) ** 4,
        "disjoint": torch.eye(6)[[5, 5]],
    }[kind]
    p = p / p.sum(-1, keepdim=True)
    q = q / q.sum(-1, keepdim=True)
    drafts, (accepted, token_ids) = draw_from_drafts(twin, p, q, rows)
    for position in range(3):
        reached = accepted >= position
        if not reached.any():
            continue
        counts = torch.bincount(token_ids[reached, position], minlength=6)
        assert counts[5] == 0
        expected = p[position, :5].double() / p[position, :5].double().sum()
        assert stats.chisquare(counts[:5].numpy(), (expected * reached.sum()).numpy()).pvalue > 1e-3
    rate = torch.minimum(p[0], q[0]).sum()
    assert abs((accepted > 0).double().mean() - rate) < 3 / rows**0.5
    for row in range(50):
        count = int(accepted[row])
        assert token_ids[row, :count].tolist() == drafts[row, :count].tolist()
        assert not token_ids[row, count + 1 :].any()


@pytest.mark.parametrize("vocab_size", [3, 17, 63, 5000])
@pytest.mark.parametrize("depths", [0, 1, 3, 5])
@pytest.mark.parametrize("rows", [1, 7])
def test_rejection_agrees_with_the_reference(twin, vocab_size, depths, rows):
    """The same uniforms give the same tokens. Tensors are views, and probabilities that rows do not
    need are NaN."""
    q = (2 * torch.randn(rows, depths, vocab_size)).softmax(-1)
    p = (2 * torch.randn(rows, 1 + depths, vocab_size)).softmax(-1)
    p[:, :depths] = 0.8 * q + 0.2 * p[:, :depths]
    if vocab_size > 3:  # a token that filters took out of both
        q[..., 3], p[..., 3] = 0, 0
    drafts = (
        torch.multinomial(q.flatten(0, 1), 1).view(rows, depths)
        if depths
        else torch.empty(rows, 0).long()
    )
    numbers = torch.rand(rows, 2 + 2 * depths, dtype=torch.float64)
    uniforms = numbers[:, :depths], numbers[:, 1 + depths :]
    accepted, token_ids = reference.accept_rejection(drafts, q, p, *uniforms)
    if twin.name != "reference":  # whose gathers touch all
        later = torch.arange(1 + depths)[None] > accepted[:, None]
        p[later], q[later[:, :depths]] = torch.nan, torch.nan
    wide = torch.full((rows, depths, vocab_size + 7), torch.nan)
    wide[..., :vocab_size] = q
    got = run(twin, "accept_rejection", drafts, wide[..., :vocab_size], p, *uniforms)
    assert torch.equal(got[0], accepted) and torch.equal(got[1], token_ids)


def test_rejection_of_certain_drafts_by_certain_targets_is_greedy_verification(twin):
    certain = torch.eye(6)
    drafts = torch.tensor([[1, 2], [1, 3], [0, 2]])
    targets = certain[torch.tensor([1, 2, 4])].expand(3, -1, -1)
    numbers = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    accepted, token_ids = run(
        twin, "accept_rejection", drafts, certain[drafts], targets, numbers[:, :2], numbers
    )
    assert accepted.tolist() == [2, 1, 0]
    assert token_ids.tolist() == [[1, 2, 4], [1, 2, 0], [1, 0, 0]]


def test_a_draft_is_accepted_below_the_ratio_and_not_at_it(twin):
    p = torch.tensor([[0.25, 0.75], [1.0, 0.0]]).expand(3, -1, -1)
    q = torch.tensor([[0.5, 0.5]]).expand(3, -1, -1)
    uniforms = torch.tensor([[0.5 - 2.0**-48], [0.5], [0.75]], dtype=torch.float64)
    accepted, _ = run(
        twin,
        "accept_rejection",
        torch.zeros(3, 1).long(),
        q,
        p,
        uniforms,
        torch.zeros(3, 2, dtype=torch.float64),
    )
    assert accepted.tolist() == [1, 0, 0]


def test_a_draft_without_a_residual_is_replaced_from_the_target(twin):
    """p is below q everywhere, as rounding can make it: the residual is empty, and tokens are drawn
    from p."""
    q = torch.tensor([[[0.5, 0.5, 0.0]]])
    p = torch.stack([q[0] * 0.999, torch.tensor([[0.0, 0.0, 1.0]])], 1)
    numbers = torch.full((1, 2), 0.9995, dtype=torch.float64)
    for uniform, token in ((0.25, 0), (0.75, 1)):
        accepted, token_ids = run(
            twin,
            "accept_rejection",
            torch.tensor([[0]]),
            q,
            p,
            numbers[:, :1],
            torch.full_like(numbers, uniform),
        )
        assert accepted.tolist() == [0] and token_ids.tolist() == [[token, 0]]


@pytest.mark.parametrize("vocab_size", [50, 5000])
def test_rejection_has_no_token_where_the_target_is_invalid(twin, vocab_size):
    """A row stops at its invalid position; other rows, and positions after the stop, do not
    matter."""
    drafts = torch.tensor([[1, 2]]).expand(5, -1)
    p = torch.eye(vocab_size)[[1, 2, 3]].repeat(5, 1, 1)
    p[1, 0], p[2, 1], p[3, 2] = torch.nan, torch.nan, torch.nan
    p[4, 0], p[4, 1] = torch.eye(vocab_size)[7], torch.nan
    q = torch.eye(vocab_size)[[1, 2]].repeat(5, 1, 1)
    numbers = torch.rand(5, 2).double(), torch.rand(5, 3).double()
    accepted, token_ids = run(twin, "accept_rejection", drafts, q, p, *numbers)
    assert accepted.tolist() == [2, 0, 1, 2, 0]
    none = NO_TOKEN
    assert token_ids.tolist() == [[1, 2, 3], [none, 0, 0], [1, none, 0], [1, 2, none], [7, 0, 0]]


def test_rows_that_pad_a_batch_give_a_token_of_the_vocabulary_or_none(twin):
    if twin.name == "reference":
        pytest.skip("batches are padded for CUDA graphs")
    drafts = torch.tensor([[1, 2], [-1, 2**40], [1, 2]])
    p = torch.full((3, 3, 50), torch.nan)
    q = torch.full((3, 2, 50), torch.nan)
    p[0], q[0] = torch.eye(50)[[1, 2, 3]], torch.eye(50)[[1, 2]]
    p[1], q[1] = p[0], q[0]
    accepted, token_ids = run(
        twin, "accept_rejection", drafts, q, p, torch.rand(3, 2).double(), torch.rand(3, 3).double()
    )
    assert accepted.tolist() == [2, 0, 0] and token_ids[:2].tolist() == [[1, 2, 3], [1, 0, 0]]
    assert token_ids[2].tolist() == [NO_TOKEN, 0, 0]
