"""Choose which twin of an op runs: the Triton kernels on a GPU, plain PyTorch elsewhere."""

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

CHOICE = "MTPKIT_KERNELS"
"""Environment variable; the value `reference` runs the PyTorch twins on a GPU too, to see if a
kernel is at fault."""


def pick[**P, R](reference: Callable[P, R], differentiable: bool = False) -> Callable[P, R]:
    """Return a function that runs `reference`, or its namesake in the neighbouring `triton.py` for
    a tensor on a GPU.

    The device is that of the first argument. Most kernels have no backward: unless they are
    `differentiable`, the reference runs where a gradient is needed.
    """
    package = reference.__module__.rpartition(".")[0]

    @functools.wraps(reference)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not on_kernels(args[0]) or not (differentiable or no_grad(*args, *kwargs.values())):
            return reference(*args, **kwargs)
        # Imported here, since Triton is installed on Linux only.
        return getattr(importlib.import_module(f"{package}.triton"), reference.__name__)(
            *args, **kwargs
        )

    return call


def on_kernels(tensor: Any) -> bool:
    """Whether the device of a tensor and the environment variable `CHOICE` allow Triton kernels."""
    return tensor.is_cuda and os.environ.get(CHOICE) != "reference"


def no_grad(*values: object) -> bool:
    """Whether no gradient is needed for any of `values`."""
    return not torch.is_grad_enabled() or not any(
        isinstance(v, torch.Tensor) and v.requires_grad for v in values
    )
