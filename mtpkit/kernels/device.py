"""What the kernels share: sizes of the GPU that they are tuned for, tensor layouts, tiles, chunks of sequences.

In functions that kernels call, parameters in capitals are compile-time constants.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit import kernels
from mtpkit.platform import to_device

MULTIPROCESSORS = 132
"""Streaming multiprocessors of an H200."""
PROGRAMS = 2 * MULTIPROCESSORS
"""Programs that keep all multiprocessors busy with loads."""
SMALLEST_DOT = 16
"""Smallest number of rows and columns that `tl.dot` takes."""
NARROW = tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16
"""The dtype that tensor cores multiply; fp32 in the interpreter, which would multiply the raw bits of bf16 numbers."""
NO_TOKEN = tl.constexpr(kernels.NO_TOKEN)


class Tile(NamedTuple):
    """Outputs and input channels that a program multiplies at a time; pipeline stages; warps; programs that share the
    input channels of an output."""

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    splits: int = 1

    def fits(self, width: int) -> bool:
        """Whether `width` input channels divide into whole tiles for every program."""
        return width % (self.splits * self.block_k) == 0

    def launch(self) -> dict[str, int]:
        """Keyword arguments of a kernel's launch."""
        sizes = dict(BLOCK_N=self.block_n, BLOCK_K=self.block_k)
        return dict(num_stages=self.num_stages, num_warps=self.num_warps, **sizes)


WIDE_TILE = Tile(64, 16, 2, 4)
"""Tile for fp32, which tensor cores do not multiply at full precision: small, so that operands stay in registers."""


def padded(size: int) -> int:
    """Rows or columns of a tile that holds `size` of them and that tensor cores take."""
    return max(SMALLEST_DOT, triton.next_power_of_2(size))


def with_rows(t: Tensor) -> Tensor:
    """`t` [..., n] with a contiguous last dimension; copied only if it is not."""
    return t if t.stride(-1) == 1 else t.contiguous()


def as_rows(t: Tensor) -> Tensor:
    """t [..., n] as [rows, n] with contiguous channels; copied only if no view has a single row stride."""
    return with_rows(t.reshape(-1, t.shape[-1]))


def strided(t: Tensor) -> tuple[Tensor | int, ...]:
    """t, whose last dimension must be contiguous, and the strides of the others: one argument of a kernel."""
    assert t.stride(-1) == 1
    return t, *t.stride()[:-1]


@triton.jit
def load(ptrs, mask, WHOLE):
    """Load, zero where `mask` is False; WHOLE: it is True everywhere."""
    if WHOLE:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=mask, other=0.0)


@dataclass(frozen=True)
class Chunks:
    """C chunks of R sequences; each chunk lies within one sequence. All tensors are int64 on the device."""

    start: Tensor
    """[C + 1], first token of each chunk, then the total number of tokens."""
    row: Tensor
    """[C], sequence of each chunk."""
    last: Tensor
    """[R], last chunk of each sequence."""
    row_start: Tensor
    """[R + 1], first token of each sequence, then the total number of tokens."""


@functools.lru_cache(maxsize=8)
def chunks(lens: tuple[int, ...], size: int, device: torch.device) -> Chunks:
    """Cut sequences of `lens` tokens into chunks of up to `size`. The cache lets all layers of a step share the result.

    Example: lens (5, 2), size 4: start [0, 4, 5, 7], row [0, 0, 1], last [1, 2], row_start [0, 5, 7].
    """
    start, row_start = [0], [0]
    row: list[int] = []
    last: list[int] = []
    for index, length in enumerate(lens):
        row_start.append(row_start[-1] + length)
        start += [*range(start[-1] + size, row_start[-1], size), row_start[-1]]
        row += [index] * (len(start) - 1 - len(row))
        last.append(len(row) - 1)
    parts = (start, row, last, row_start)
    numbers = to_device([number for part in parts for number in part], torch.int64, device)
    return Chunks(*numbers.split([len(part) for part in parts]))
