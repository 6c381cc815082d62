"""Sampling: known answers of the generator, filters against definitions, draws against distributions."""

import pytest
import torch
from scipy import stats

from mtpkit.kernels import sampling


def logits(rows=7, vocab_size=50, seed=0):
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    "key, counter, words",
    [  # Random123's known answers for philox4x32-10
        (0, [0] * 4, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (-1, [0xFFFFFFFF] * 4, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            0x299F31D0_A4093822,
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(key, counter, words):
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert [int(word) for word in sampling.philox(torch.tensor([key]), (c0, c1, c2, c3))] == words


def test_uniforms_depend_on_their_own_row_alone_and_are_uniform():
    seeds, positions = torch.arange(100).repeat_interleave(200), torch.arange(200).repeat(100)
    together = sampling.uniform(seeds, positions, 0)
    assert torch.equal(together[4321:4322], sampling.uniform(seeds[4321:4322], positions[4321:4322], 0))
    assert stats.kstest(together.numpy(), "uniform").pvalue > 1e-3
    other = sampling.uniform(seeds, positions, 1)
    for shifted in (other, together.roll(1), together.roll(200)):
        assert abs(stats.pearsonr(together.numpy(), shifted.numpy()).statistic) < 0.03


def test_plain_probabilities_are_a_softmax():
    temperature = torch.full((7,), 0.7)
    torch.testing.assert_close(sampling.probabilities(logits(), temperature), (logits() / 0.7).softmax(-1))


def test_zero_temperature_is_certain_in_a_mixed_batch():
    temperature = torch.tensor([0.0, 1.0, 0.0, 0.5, 1.0, 2.0, 0.0])
    probs = sampling.probabilities(logits(), temperature, top_k=torch.full((7,), 4))
    assert torch.equal(probs.max(-1).values == 1, temperature == 0)
    assert torch.equal(probs.argmax(-1), logits().argmax(-1))


@pytest.mark.parametrize("top_k, top_p, min_p", [(5, 1.0, 0.0), (50, 0.6, 0.0), (50, 1.0, 0.2), (8, 0.7, 0.05)])
def test_filters_keep_what_their_definitions_keep(top_k, top_p, min_p):
    rows = logits()
    probs = sampling.probabilities(
        rows, torch.ones(7), torch.full((7,), top_k), torch.full((7,), top_p), torch.full((7,), min_p)
    )
    for row, got in zip(rows.double(), probs, strict=True):
        mass = row.softmax(-1)
        kept = mass >= min_p * mass.max()
        kept &= row >= row[kept].sort(descending=True).values[: min(top_k, int(kept.sum()))].min()
        mass = torch.where(kept, mass, 0) / mass[kept].sum()
        order = mass.argsort(descending=True)
        nucleus = order[: int((mass[order].cumsum(0) < top_p).sum()) + 1]
        want = torch.zeros_like(mass).scatter(0, nucleus, mass[nucleus])
        torch.testing.assert_close(got.double(), want / want.sum(), rtol=1e-4, atol=1e-6)


def test_filters_of_one_row_do_not_touch_another():
    plain = sampling.probabilities(logits(), torch.ones(7))
    top_k, top_p = torch.full((7,), 50), torch.ones(7)
    top_k[2], top_p[4] = 3, 0.5
    mixed = sampling.probabilities(logits(), torch.ones(7), top_k, top_p, torch.zeros(7))
    untouched = [0, 1, 3, 5, 6]
    torch.testing.assert_close(mixed[untouched], plain[untouched])
    assert int((mixed[2] > 0).sum()) == 3 and int((mixed[4] > 0).sum()) < 50


def test_penalties_follow_their_definitions():
    rows = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    prompt = torch.tensor([[True, True, False, False]])
    counts = torch.tensor([[0, 3, 2, 0]])
    one = torch.ones(1)
    got = sampling.apply_penalties(rows, prompt, counts, 2 * one, 0.5 * one, 0.25 * one)
    assert got.tolist() == [[1.0, -4.0 - 1.5 - 0.25, 0.5 - 1.0 - 0.25, 0.5]]
    assert torch.equal(sampling.apply_penalties(rows, prompt, counts, one, 0 * one, 0 * one), rows)


def test_draws_follow_the_weights_and_never_take_a_zero():
    weights = torch.tensor([0.0, 0.3, 0.0, 1.0, 0.7, 0.0])
    numbers = sampling.uniform(torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64), 0)
    counts = torch.bincount(sampling.sample(weights.expand(20_000, -1), numbers), minlength=6)
    assert counts[weights == 0].sum() == 0
    drawn = weights > 0
    assert stats.chisquare(counts[drawn].numpy(), (weights[drawn] / 2 * 20_000).numpy()).pvalue > 1e-3


def test_the_extreme_numbers_draw_the_first_and_the_last_token():
    weights = torch.rand(1, 1000, generator=torch.Generator().manual_seed(0)) * (torch.arange(1000) % 3 == 1)
    first, last = weights[0].nonzero()[[0, -1], 0]
    assert sampling.sample(weights, torch.zeros(1, dtype=torch.float64)) == first
    assert sampling.sample(weights, torch.full((1,), 1 - 2.0**-48, dtype=torch.float64)) == last
