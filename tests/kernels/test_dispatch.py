"""Which twin `pick` calls, shown with an op whose twins only say their names."""

import sys
from types import ModuleType

import pytest
import torch

from mtpkit.kernels.dispatch import CHOICE, pick


class OnGpu(torch.Tensor):
    """A CPU tensor that reports to be on a GPU."""

    is_cuda = True


def on_gpu(requires_grad: bool = False) -> torch.Tensor:
    return torch.ones(2).as_subclass(OnGpu).requires_grad_(requires_grad)


@pytest.fixture(params=[False])
def op(monkeypatch, request):
    """A picked op of two tensors, positional or keyword, that returns its twin's name and what it
    was given; its kernel has a backward if the parameter says so."""
    monkeypatch.delenv(CHOICE, raising=False)

    def scale(x, *others, **named):
        return "reference", (x, *others), named

    triton = ModuleType("an_op.triton")
    triton.scale = lambda x, *others, **named: ("triton", (x, *others), named)
    monkeypatch.setitem(sys.modules, "an_op.triton", triton)
    scale.__module__ = "an_op.reference"
    return pick(scale, differentiable=request.param)


def test_a_gpu_takes_the_kernel_and_a_cpu_the_reference(op):
    x = on_gpu()
    other = torch.ones(2)
    assert op(x, other, factor=other) == ("triton", (x, other), {"factor": other})
    assert op(other, x, factor=x) == ("reference", (other, x), {"factor": x})


def test_what_asks_for_a_gradient_takes_the_reference(op):
    """The tensor that needs a gradient may be any of the arguments."""
    plain = on_gpu()
    wanting = on_gpu(requires_grad=True)
    for arguments, named in (
        ((wanting,), {}),
        ((plain, wanting), {}),
        ((plain, None, 0.5), {"weight": wanting}),
        ((plain,), {"residual": None, "weight": wanting}),
    ):
        assert op(*arguments, **named)[0] == "reference"
    assert op(plain, 0.5, None, weight=plain)[0] == "triton"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_where_none_is_recorded_the_kernel_runs(op, mode):
    wanting = on_gpu(requires_grad=True)
    with mode():
        assert op(wanting, weight=wanting)[0] == "triton"
    assert op(wanting, weight=wanting)[0] == "reference"


def test_the_environment_may_choose_the_reference(op, monkeypatch):
    monkeypatch.setenv(CHOICE, "reference")
    assert op(on_gpu())[0] == "reference"
    monkeypatch.setenv(CHOICE, "triton")
    assert op(on_gpu())[0] == "triton"


@pytest.mark.parametrize("op", [True], indirect=True)
def test_a_kernel_with_a_backward_runs_where_a_gradient_is_asked_for(op, monkeypatch):
    assert op(on_gpu(requires_grad=True))[0] == "triton"
    assert op(torch.ones(2, requires_grad=True))[0] == "reference"
    monkeypatch.setenv(CHOICE, "reference")
    assert op(on_gpu(requires_grad=True))[0] == "reference"
