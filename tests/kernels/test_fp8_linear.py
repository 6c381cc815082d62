"""Rows in fp8, and linears of them, against the numbers in fp64."""

import pytest
import torch

from mtpkit.kernels.linear import FP8, FP8_MAX, reference
from tests.kernels.recurrence import relative


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (2, 5, 100), (7, 600)])
def test_rows_come_back_within_the_bound(twin, shape, dtype):
    x = (torch.randn(shape) * torch.logspace(-6, 4, shape[-1])).to(twin.device, dtype)
    values, scale = twin("linear").quantize_rows(x)
    assert values.dtype == FP8 and values.shape == x.shape and scale.shape == (*x.shape[:-1], 1)
    largest = x.double().abs().amax(-1, keepdim=True)
    assert torch.allclose(scale.double() * FP8_MAX, largest)
    error = values.double() * scale.double() - x.double()
    if twin.name == "interpreter":  # it converts to fp8 in a way of its own
        assert error.norm() < 0.1 * x.double().norm()
    else:
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
    if twin.name == "interpreter":
        pytest.skip("the interpreter cuts off what a GPU rounds")
    x = torch.randn(9, 130).bfloat16()
    want, want_scale = (t.to(twin.device) for t in reference.quantize_rows(x))
    values, scale = twin("linear").quantize_rows(x.to(twin.device))
    assert torch.equal(values.float(), want.float()) and torch.equal(scale, want_scale)


@pytest.mark.parametrize(("rows", "width", "outputs"), [(1, 16, 16), (17, 64, 48), (40, 256, 80)])
def test_linear(twin, rows, width, outputs):
    if twin.name == "interpreter":
        pytest.skip("the product is torch's, on a GPU")
    module = twin("linear")
    x = torch.randn(rows, width).to(twin.device).bfloat16()
    weight = torch.randn(outputs, width).to(twin.device)
    values, scale = module.quantize_rows(weight)
    y = module.fp8_linear(x, values, scale)
    assert y.dtype == x.dtype and y.shape == (rows, outputs)
    x8, x_scale = module.quantize_rows(x)
    exact = (x8.double() * x_scale) @ (values.double() * scale).t()
    assert relative(y, exact) < 2**-8, "what was rounded is multiplied as it is"
    assert 1e-4 < relative(y, x.double() @ weight.double().t()) < 0.06
