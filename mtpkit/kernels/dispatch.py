"""Which twin of an op runs: the Triton kernels on a GPU, plain PyTorch elsewhere."""

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

CHOICE = "MTPKIT_KERNELS"
"""Environment variable; `reference` keeps the PyTorch twins on a GPU too, to tell a kernel's fault from others."""


def pick[**P, R](reference: Callable[P, R], differentiable: bool = False) -> Callable[P, R]:
    """`reference`, replaced by the function of its name in `triton.py` beside it where the first argument is on a GPU.

    Most kernels have no backward: where a gradient is asked for, the reference runs unless they are `differentiable`.
    """
    package = reference.__module__.rpartition(".")[0]

    @functools.wraps(reference)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not on_kernels(args[0]) or not (differentiable or no_grad(*args, *kwargs.values())):
            return reference(*args, **kwargs)
        return getattr(importlib.import_module(f"{package}.triton"), reference.__name__)(*args, **kwargs)

    return call


def on_kernels(tensor: Any) -> bool:
    """Whether ops of a tensor run as kernels, as far as its device and the user have a say."""
    return tensor.is_cuda and os.environ.get(CHOICE) != "reference"


def no_grad(*values: Any) -> bool:
    """Whether nothing of `values` is differentiated."""
    return not torch.is_grad_enabled() or not any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
