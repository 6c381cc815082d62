"""Properties of the GPU that kernels are tuned for, and the tensor layouts that they need."""

import triton
import triton.language as tl
from torch import Tensor

MULTIPROCESSORS = 132
"""Streaming multiprocessors of an H200."""
PROGRAMS = 2 * MULTIPROCESSORS
"""Programs that keep all multiprocessors busy with loads."""
SMALLEST_DOT = 16
"""Smallest number of rows and columns that `tl.dot` takes."""
NARROW = tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16
"""The dtype that tensor cores multiply; fp32 in the interpreter, which would multiply the raw bits of bf16 numbers."""


def with_rows(t: Tensor) -> Tensor:
    """`t` [..., n] with a contiguous last dimension; copied only if it is not."""
    return t if t.stride(-1) == 1 else t.contiguous()


def as_rows(t: Tensor) -> Tensor:
    """t [..., n] as [rows, n] with contiguous channels; copied only if no view has a single row stride."""
    return with_rows(t.reshape(-1, t.shape[-1]))
