"""Which twin of an op runs: the Triton kernels on a GPU, plain PyTorch elsewhere."""

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

CHOICE = "MTPKIT_KERNELS"
"""Environment variable; `reference` keeps the PyTorch twins on a GPU too, to tell a kernel's fault from others."""


def pick[**P, R](reference: Callable[P, R]) -> Callable[P, R]:
    """`reference`, replaced by the function of its name in `triton.py` beside it where the first argument is on a GPU.

    Kernels have no backward: where a gradient is asked for, the reference runs.
    """
    package = reference.__module__.rpartition(".")[0]

    @functools.wraps(reference)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        if not first.is_cuda or _wants_grad(*args, *kwargs.values()) or os.environ.get(CHOICE) == "reference":
            return reference(*args, **kwargs)
        return getattr(importlib.import_module(f"{package}.triton"), reference.__name__)(*args, **kwargs)

    return call


def _wants_grad(*values: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
