"""Rotations against complex numbers in fp64."""

import pytest
import torch

from tests.kernels.conftest import Twin
from tests.kernels.recurrence import relative

FREQUENCIES = 30.0 ** -torch.linspace(0, 1, 3)


def turned(x, positions, factor):
    """x [s, b, heads, 6]: first half plus i times second half, times factor exp(i angle)."""
    angles = positions.t()[:, :, None, None].double() * FREQUENCIES.double()
    rotated = torch.complex(*x.double().chunk(2, -1)) * torch.polar(
        torch.full_like(angles, factor), angles
    )
    return torch.cat([rotated.real, rotated.imag], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [6, 7, 20])
@pytest.mark.parametrize(("paired", "factor"), [(False, 1.0), (True, 1.3)])
def test_each_pair_is_turned_by_its_angle(twin: Twin, width, paired, factor, dtype):
    """Of heads that are parts of a wider projection, all of their channels or the first of them."""
    positions = torch.tensor([[0, 1, 2, 3, 40000], [4, 4, 0, 7, 1]])
    x = torch.randn(2, 5, 5, width + 3).to(dtype).transpose(0, 1)[:, :, 1:4, 2 : 2 + width]
    given = x[..., [0, 2, 4, 1, 3, 5]] if paired else x[..., :6]
    moved = x.transpose(0, 1).to(twin.device).transpose(0, 1)
    out = (
        twin("rotary")
        .rotate(moved, positions.to(twin.device), FREQUENCIES.to(twin.device), factor, paired)
        .cpu()
    )
    assert out.dtype == dtype and out.shape == x.shape and torch.equal(out[..., 6:], x[..., 6:])
    # of an angle of 40,000, fp32 leaves 1e-3 of a turn
    tolerance = 2e-5 if dtype == torch.float32 else 2**-7
    assert relative(out[:4, ..., :6], turned(given, positions, factor)[:4]) < tolerance
    assert relative(out[4:, ..., :6], turned(given, positions, factor)[4:]) < max(tolerance, 5e-3)


def test_positions_of_one_sequence_hold_for_all_of_a_group(twin: Twin):
    x = torch.randn(4, 3, 2, 6)
    positions = torch.tensor([[5, 0, 9, 2]])
    arguments = (t.to(twin.device) for t in (x, positions, FREQUENCIES))
    out = twin("rotary").rotate(*arguments).cpu()
    assert relative(out, turned(x, positions.expand(3, -1), 1.0)) < 1e-5


def test_no_tokens(twin: Twin):
    x = torch.randn(0, 1, 2, 6)
    positions = torch.zeros(1, 0, dtype=torch.int64)
    arguments = (t.to(twin.device) for t in (x, positions, FREQUENCIES))
    assert twin("rotary").rotate(*arguments).shape == x.shape


def test_gradients_come_from_the_reference():
    from mtpkit.kernels.rotary import rotate

    x = torch.randn(4, 1, 2, 8, dtype=torch.float64).requires_grad_()
    positions = torch.tensor([[5, 0, 9, 2]])
    (rotate(x, positions, FREQUENCIES, 2.0) ** 2).sum().backward()
    assert x.grad is not None
    # the square of a rotated vector is its own, times 4
    lengths = torch.cat([4 * 2 * x[..., :6], 2 * x[..., 6:]], -1)
    assert relative(x.grad, lengths.detach()) < 1e-5
