"""Activations against their definition in fp64."""

from functools import partial

import pytest
import torch

from mtpkit.kernels.activation import reference
from tests.kernels.recurrence import relative

SHAPES = [(1, 4), (3, 34), (2, 5, 126), (1, 1, 2500)]


def definition(name, x):
    x = x.double()
    if name == "relu2":
        return x.clamp_min(0) ** 2
    gate, value = x.split(x.shape[-1] // 2, -1)
    return gate / (1 + torch.exp(-gate)) * value


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's exp, in numpy
@pytest.mark.parametrize("name", ["relu2", "swiglu"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations(twin, dtype, shape, name):
    x = (4 * torch.randn(shape)).to(dtype)
    x[..., 0], x[..., 1] = -200.0, 3.0  # the sigmoid of a gate underflows
    want = definition(name, x)
    low = getattr(reference, name)(x)
    have = getattr(twin("activation"), name)(x.to(twin.device))
    # Triton's interpreter cuts bf16 off instead of rounding.
    bound = 2 * relative(low, want) + (2**-7 if twin.name == "interpreter" else 1e-6)
    assert have.dtype == dtype and relative(have.cpu(), want) < (
        1e-5 if dtype == torch.float32 else bound
    )


@pytest.mark.parametrize("name", ["relu2", "swiglu"])
def test_slices(twin, name):
    whole = torch.full((5, 3, 60), torch.nan)
    x = whole[:, 1:2, 10:44].copy_(torch.randn(5, 1, 34))
    on_device = whole.to(twin.device)[:, 1:2, 10:44]
    assert relative(getattr(twin("activation"), name)(on_device).cpu(), definition(name, x)) < 1e-5


def test_relu2_keeps_nan(twin):
    x = torch.tensor([[-1.0, torch.nan, 2.0]], device=twin.device)
    assert torch.equal(
        twin("activation").relu2(x).cpu().nan_to_num(nan=7.0), torch.tensor([[0.0, 7.0, 4.0]])
    )


def gated_definition(x, gate):
    return x.double() / (1 + torch.exp(-gate.double().flatten(-2)))


GATES = [(1, 1, 1, 4), (3, 2, 3, 5), (2, 5, 2, 63), (1, 1, 4, 700)]
"""Sequences, tokens, groups, width of a group."""


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("shape", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sigmoid_gate(twin, dtype, shape):
    """The gate is a slice of each group of a wider projection; values and both gradients."""
    *rows, groups, width = shape
    x = torch.randn(*rows, groups * width).to(dtype)
    above = torch.randn(*rows, groups * width).to(dtype)
    wide = torch.full((*rows, groups, 2 * width + 3), torch.nan, dtype=dtype)
    wide[..., 3 : 3 + width] = (4 * torch.randn(shape)).to(dtype)
    wide[..., 3] = -200.0

    def outcome(function, x, wide, above):
        x = x.detach().requires_grad_()
        gate = wide.detach()[..., 3 : 3 + width].requires_grad_()
        out = function(x, gate)
        return [t.detach().cpu() for t in (out, *torch.autograd.grad(out, (x, gate), above))]

    want = outcome(gated_definition, x.double(), wide.double(), above.double())
    lows = outcome(reference.sigmoid_gate, x, wide, above)
    haves = outcome(twin("activation").sigmoid_gate, *(t.to(twin.device) for t in (x, wide, above)))
    for have, low, exact in zip(haves, lows, want, strict=True):
        bound = 2 * relative(low, exact) + (2**-7 if twin.name == "interpreter" else 1e-6)
        assert have.dtype == dtype and relative(have, exact) < (
            1e-5 if dtype == torch.float32 else bound
        )


def gradient(function, x, above):
    """The gradient of x on the CPU, where `above` is that of the output or is cut to it."""
    x = x.detach().requires_grad_()
    out = function(x)
    return torch.autograd.grad(out, x, above[..., : out.shape[-1]])[0].cpu()


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("name", ["relu2", "swiglu"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(twin, dtype, shape, name):
    x = (4 * torch.randn(shape)).to(dtype)
    above = torch.randn(shape).to(dtype)
    x[..., 0], x[..., 1] = -200.0, 3.0
    want = gradient(partial(definition, name), x.double(), above.double())
    low = gradient(getattr(reference, name), x, above)
    have = gradient(getattr(twin("activation"), name), x.to(twin.device), above.to(twin.device))
    bound = 2 * relative(low, want) + (2**-7 if twin.name == "interpreter" else 1e-6)
    assert have.dtype == dtype and relative(have, want) < (
        1e-5 if dtype == torch.float32 else bound
    )


@pytest.mark.parametrize("name", ["relu2", "swiglu"])
def test_gradients_of_slices(twin, name):
    """Input and gradient lie in wider tensors."""
    x = torch.randn(5, 3, 60)[:, 1:2, 10:44]
    above = torch.randn(5, 1, 80)
    have = gradient(getattr(twin("activation"), name), x.to(twin.device), above.to(twin.device))
    assert relative(have, gradient(partial(definition, name), x.double(), above.double())) < 1e-5
