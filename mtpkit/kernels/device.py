"""The GPU that kernels are tuned for, and what they ask of a device and of a tensor."""

import triton
import triton.language as tl
from torch import Tensor

MULTIPROCESSORS = 132
"""Of an H200."""
PROGRAMS = 2 * MULTIPROCESSORS
"""Programs that keep them busy with loads."""
SMALLEST_DOT = 16
"""Rows and columns that a product of tiles has at least."""
NARROW = tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16
"""What tensor cores multiply. The interpreter would multiply the bits of bf16 numbers."""


def with_rows(t: Tensor) -> Tensor:
    """`t` [..., n], or a copy, whose last dimension is contiguous."""
    return t if t.stride(-1) == 1 else t.contiguous()


def as_rows(t: Tensor) -> Tensor:
    """t [..., n] as [rows, n] with contiguous channels; a copy only where no view has a single row stride."""
    return with_rows(t.reshape(-1, t.shape[-1]))
