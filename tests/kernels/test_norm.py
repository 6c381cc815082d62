"""RMS norms against their definition in fp64."""

import math

import pytest
import torch

from mtpkit.kernels.norm import reference
from tests.kernels.recurrence import relative

EPS = 1e-5
SHAPES = [(1, 1), (3, 17), (2, 5, 63), (4, 1, 128), (1, 500)]


def definition(x, weight, group=None):
    """Norm in fp64 over groups of the last dimension."""
    groups = x.double().unflatten(-1, (-1, group or x.shape[-1]))
    return (groups / torch.sqrt(groups.square().mean(-1, keepdim=True) + EPS)).flatten(
        -2
    ) * weight.double()


def gated_definition(x, z, weight, group):
    x = x.double()
    z = z.double()
    return definition(x * z / (1 + torch.exp(-z)), weight, group)


def draw(shape, dtype=torch.float32, wider=0):
    """Normal numbers; with `wider`, a slice of a tensor that is NaN around it."""
    whole = torch.full((*shape[:-1], shape[-1] + 2 * wider), math.nan, dtype=dtype)
    part = whole[..., wider : wider + shape[-1]]
    return part.copy_(torch.randn(shape))


def place(twin, *tensors):
    """Move tensors to the twin's device and keep their strides."""
    return [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=twin.device).copy_(t)
        for t in tensors
    ]


def assert_close(twin, have, want, low):
    """fp32 to 1e-5; bf16 within twice the error of PyTorch's, and more where Triton's interpreter
    does not round."""
    bound = 2 * relative(low, want) + (2**-6 if twin.name == "interpreter" else 1e-6)
    assert have.dtype == low.dtype and relative(have.cpu(), want) < (
        1e-5 if have.dtype == torch.float32 else bound
    )


@pytest.mark.parametrize("wider", [0, 8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(twin, dtype, shape, wider):
    x = draw(shape, dtype, wider)
    weight = draw(shape[-1:], dtype)
    have = twin("norm").rms_norm(*place(twin, x, weight), EPS)
    assert_close(twin, have, definition(x, weight), reference.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_gate(twin, dtype, zero_centered):
    """Norm first, then gate; the other order is not nearly the same."""
    width = 17
    heads = 5
    x = draw((2, 3, heads * width), dtype)
    z = draw((2, 3, heads * width), dtype, wider=8)
    weight = draw((width,), dtype)
    factor = weight.double().repeat(heads) + zero_centered
    want = definition(x, factor, width) * z.double() / (1 + torch.exp(-z.double()))
    have = twin("norm").norm_gate(*place(twin, x, z, weight), EPS, zero_centered)
    assert_close(twin, have, want, reference.norm_gate(x, z, weight, EPS, zero_centered))
    assert relative(gated_definition(x, z, factor, width), want) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_around_zero(twin, dtype):
    """1 + w is not rounded to bf16 before it multiplies."""
    x = draw((5, 63), dtype)
    weight = 2**-9 * draw((63,), dtype)
    have = twin("norm").rms_norm(*place(twin, x, weight), EPS, True)
    want = definition(x, 1 + weight.double())
    assert_close(twin, have, want, reference.rms_norm(x, weight, EPS, True))
    assert relative(reference.rms_norm(x, weight, EPS), want) > 0.9


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's exp, in numpy
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (2, 17), (3, 63), (8, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_rms_norm(twin, dtype, heads, group):
    """z is a slice of a wider projection, as in the mixer."""
    shape = (3, 1, heads * group)
    x = draw(shape, dtype)
    z = 4 * draw(shape, dtype, wider=5)
    weight = draw(shape[-1:], dtype)
    z[0, 0, 0] = -200.0  # its sigmoid underflows
    have = twin("norm").gated_rms_norm(*place(twin, x, z, weight), group, EPS)
    assert_close(
        twin,
        have,
        gated_definition(x, z, weight, group),
        reference.gated_rms_norm(x, z, weight, group, EPS),
    )


def test_sequences_of_a_batch(twin):
    """The input is [s, b, h] transposed to [b, s, h]: no view of it has a single row stride."""
    x = draw((2, 3, 34)).transpose(0, 1)
    z = draw((2, 3, 34), wider=4).transpose(0, 1)
    weight = draw((34,))
    have = twin("norm").gated_rms_norm(*place(twin, x, z, weight), 17, EPS)
    assert relative(have.cpu(), gated_definition(x, z, weight, 17)) < 1e-5


def test_many_narrow_rows(twin):
    """A program has several rows, and the last program is partly empty."""
    x = draw((67, 60))
    weight = draw((60,))
    assert (
        relative(twin("norm").rms_norm(*place(twin, x, weight), EPS).cpu(), definition(x, weight))
        < 1e-5
    )


def test_a_nan_stays_in_its_row(twin):
    x = draw((40, 64))
    weight = draw((64,))
    clean = definition(x, weight)
    x[5, 3] = math.nan
    have = twin("norm").rms_norm(*place(twin, x, weight), EPS).cpu()
    assert have[5].isnan().all()
    others = torch.arange(40) != 5
    assert relative(have[others], clean[others]) < 1e-5
