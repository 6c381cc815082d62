"""Rows in fp8 against the numbers in fp64."""

import pytest
import torch

from mtpkit.kernels.linear import FP8, FP8_MAX, reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (2, 5, 100), (7, 600)])
def test_rows_come_back_within_the_bound(twin, shape, dtype):
    x = (torch.randn(shape) * torch.logspace(-6, 4, shape[-1])).to(twin.device, dtype)
    values, scale = twin("linear").quantize_rows(x)
    assert values.dtype == FP8 and values.shape == x.shape and scale.shape == (*x.shape[:-1], 1)
    largest = x.double().abs().amax(-1, keepdim=True)
    assert torch.allclose(scale.double() * FP8_MAX, largest)
    error = values.double() * scale.double() - x.double()
    assert (error.abs() <= (x.double().abs() / 16 + largest / FP8_MAX / 1024) * 1.001).all()
    assert (values.double().abs().amax(-1) == FP8_MAX).all()


def test_views_and_rows_of_zeros(twin):
    wide = torch.randn(4, 3, 40).to(twin.device)
    wide[1] = 0
    for x in (wide[:, 1], wide[:, :, 3:19], wide[:, 2, ::2]):
        values, scale = twin("linear").quantize_rows(x)
        want, want_scale = twin("linear").quantize_rows(x.contiguous())
        assert torch.equal(values.float(), want.float()) and torch.equal(scale, want_scale)
        assert (values[1].float() == 0).all() and (scale[1] == 1).all()


def test_twins_agree_to_the_bit(twin):
    x = torch.randn(9, 130).bfloat16()
    want, want_scale = (t.to(twin.device) for t in reference.quantize_rows(x))
    values, scale = twin("linear").quantize_rows(x.to(twin.device))
    assert torch.equal(values.float(), want.float()) and torch.equal(scale, want_scale)
