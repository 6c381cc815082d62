"""Stochastic rounding of states to float16: which neighbour, how often, and by which noise."""

import pytest
import torch

from mtpkit.kernels.rounding.reference import Noise, narrowed, noise_bits, to_half
from tests.kernels.conftest import Twin

HALF = torch.float16


def copied(twin: Twin, values: torch.Tensor, requests, positions, layer=5, first_head=0):
    """States [R, h, p, n] rounded by a copy."""
    written = torch.full(values.shape, torch.nan, dtype=HALF, device=twin.device)
    rows = torch.arange(len(values), device=twin.device)
    keys, ends = (torch.tensor(one, device=twin.device) for one in (requests, positions))
    noise = Noise(keys, layer, first_head, ends)
    twin("rounding").narrow_units(rows, rows, values.to(twin.device), written, noise)
    return written.cpu()


def spread(count: int) -> torch.Tensor:
    """Numbers of all magnitudes that fp32 has, and the special ones."""
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-140, 128, (count,), generator=generator)
    numbers = torch.ldexp(torch.rand(count, generator=generator) + 1, exponents)
    numbers *= torch.where(torch.rand(count, generator=generator) < 0.5, -1, 1)
    edges = [0.0, -0.0, 65504, 65519, 65520, -7e4, 3e38, 2**-14, 2**-24, 2**-25, 1e-45]
    edges += [torch.inf, -torch.inf, torch.nan]
    numbers[: len(edges)] = torch.tensor(edges)
    return numbers


def test_each_number_becomes_one_of_its_neighbours(twin: Twin):
    """Or itself, if float16 has it; beyond its range the largest one. NaN and infinities stay."""
    values = spread(3 * 4 * 5 * 19).view(3, 4, 5, 19)
    have = copied(twin, values, [3, 2**62 + 7, 11], [0, 9, 123456]).float()
    finite = values.isfinite()
    assert torch.equal(have.isnan(), values.isnan())
    assert torch.equal(have[values.isinf()], values[values.isinf()])
    bounded = values.clamp(-65504, 65504)
    # The neighbour towards zero, in exact arithmetic.
    step = torch.exp2(torch.frexp(bounded).exponent.clamp_min(-13).double() - 11)
    low = (bounded.double() / step).trunc() * step
    high = low + step * bounded.double().sign()
    is_low = have.double() == low
    is_high = (have.double() == high) & (low != bounded.double())
    assert bool((is_low | is_high)[finite].all())
    inside = finite & (values.abs() < 65504) & (values.abs() > 2**-20) & (low != bounded.double())
    assert 0.3 < float(is_high[inside].float().mean()) < 0.7
    assert torch.equal(have[finite].signbit(), values[finite].signbit())


def test_kernel_and_twin_are_equal_to_the_bit(twin: Twin):
    values = spread(2 * 3 * 33 * 20).view(2, 3, 33, 20)
    requests, positions = [2**62 - 3, 5], [40, 2**20]
    noise = Noise(torch.tensor(requests), 77, 6)
    want = narrowed(values, HALF, noise, torch.tensor(positions))
    have = copied(twin, values, requests, positions, layer=77, first_head=6)
    assert torch.equal(have.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize(
    "number", [1 + 0.3 * 2**-10, -1500.123, 2**-15 + 0.7 * 2**-24, 0.2 * 2**-24]
)
def test_the_mean_over_keys_is_the_number(number: float):
    """Within five standard errors of a fair draw, over layers, requests and positions alike."""
    value = torch.tensor(number)
    step = 2.0 ** (max(torch.frexp(value).exponent.item(), -13) - 11)
    part = abs(value.item()) / step % 1
    shape = torch.Size((4, 8, 32))
    draws = []
    for layer in (1, 2, 900):
        noise = Noise(torch.arange(16), layer, 0)
        for position in (0, 1, 5000):
            bits = noise_bits(noise, torch.full((16,), position), shape)
            draws.append(to_half(value.expand(bits.shape), bits).double())
    mean = torch.stack(draws).mean().item()
    error = step * (part * (1 - part) / (9 * 16 * shape.numel())) ** 0.5
    assert abs(mean - value.item()) < 5 * error + step * 2**-16
    assert abs(value.half().double().item() - value.item()) > 20 * error, "the nearest is as good"


def test_small_additions_are_not_swallowed():
    """A sum of 4,096 numbers of a tenth of a step each."""
    noise = Noise(torch.tensor([9]), 3, 0)
    total = torch.ones(1, 2, 8, 16, dtype=HALF)
    for position in range(4096):
        added = total.float() + 0.1 * 2**-10
        total = narrowed(added, HALF, noise, torch.tensor([position]))
    assert abs(total.float().mean().item() - 1.4) < 0.02
    assert (torch.ones((), dtype=HALF) + torch.tensor(0.1 * 2**-10).half()).item() == 1


def test_noise_depends_on_each_part_of_its_key():
    """And on nothing else: neither on the row nor on what is split over ranks."""
    shape = torch.Size((4, 6, 20))
    base = Noise(torch.tensor([5, 6, 5]), 2, 0)
    positions = torch.tensor([8, 8, 8])
    bits = noise_bits(base, positions, shape)
    assert torch.equal(bits[0], bits[2])
    others = [
        bits[1],
        noise_bits(base, positions + 1, shape)[0],
        noise_bits(base._replace(layer=3), positions, shape)[0],
    ]
    for other in others:
        assert (bits[0] == other).float().mean() < 0.02
    second = noise_bits(base._replace(first_head=2), positions, torch.Size((2, 6, 20)))
    assert torch.equal(second, bits[:, 2:])
    # Bits of different elements, and the low and the high ones of one, do not go together.
    flat = bits[0].flatten()
    assert len(flat.unique()) > 0.99 * len(flat)
    wide = noise_bits(base, positions, torch.Size((64, 32, 64)))[0].flatten().double()
    assert abs(wide.mean() - 32767.5) < 5 * 65536 / (12 * len(wide)) ** 0.5
    centred = wide - wide.mean()
    for lag in (1, 2, 3, 4, 7, 8):
        related = (centred[:-lag] * centred[lag:]).mean() / centred.square().mean()
        assert abs(related) < 5 / len(wide) ** 0.5


def test_units_that_are_not_copied(twin: Twin):
    """Null rows; views with gaps between units, as of one entry of several."""
    entries = torch.randn(4, 3, 2, 5, 12, device=twin.device)
    written = torch.full((6, 2, 5, 12), 7.0, dtype=HALF, device=twin.device)
    sources, targets = torch.tensor([[3, -1, 0, 2], [1, 2, -1, 5]], device=twin.device)
    keys = torch.tensor([4, 5, 6, 7], device=twin.device)
    noise = Noise(keys, 9, 0, keys * 10)
    twin("rounding").narrow_units(sources, targets, entries[:, 1], written, noise)
    assert bool((written[[0, 2, 3, 4]] == 7).all())
    for row, (source, target) in ((0, (3, 1)), (3, (2, 5))):
        one = noise.at(torch.tensor([row], device=twin.device))
        assert one.positions is not None
        want = narrowed(entries[source, 1][None], HALF, one, one.positions)[0]
        assert torch.equal(written[target], want)
