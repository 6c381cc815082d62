"""What the kernels share: sizes of the GPU that they are tuned for, tensor layouts, tiles.

In functions that kernels call, parameters in capitals are compile-time constants.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit import kernels

MULTIPROCESSORS = 132
"""Streaming multiprocessors of an H200."""
PROGRAMS = 2 * MULTIPROCESSORS
"""Programs that keep all multiprocessors busy with loads."""
SMALLEST_DOT = 16
"""Smallest number of rows and columns that `tl.dot` takes."""
NARROW = tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16
"""The dtype that tensor cores multiply; fp32 in the interpreter, which would multiply the raw bits of bf16 numbers."""
NO_TOKEN = tl.constexpr(kernels.NO_TOKEN)
_LINE = tl.constexpr(128)
"""Bytes that a prefetch brings to the L2 cache."""


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


def early_launch(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """Keyword arguments of a launch whose programs may be placed before the kernel before it has ended, if that is
    wanted and the GPU can do it (programmatic dependent launch, CUDA C++ programming guide). The kernel has a constant
    EARLY, and every program of it calls `wait_for_previous`, also those that return at once: a kernel waits for the one
    before it alone, and through that one's wait for all earlier ones."""
    return dict(EARLY=True, launch_pdl=True) if wanted and overlaps(device) else dict(EARLY=False)


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel on a device can begin before the one before it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class Early:
    """Decorator of a kernel that is launched as `early_launch` says.

    Args:
        most: only with at most so many programs: those of more are busy for longer than a launch takes, and spread over
            the multiprocessors less evenly where the kernel before still has programs; None: any number.
    """

    def __init__(self, kernel: Any, most: int | None = 8 * MULTIPROCESSORS) -> None:
        self.kernel, self.most = kernel, most

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """The launch on a grid."""
        launch, wanted = self.kernel[grid], self.most is None or math.prod(grid) <= self.most
        return lambda *args, **constants: launch(*args, **constants, **early_launch(next(_devices(args)), wanted))


def _devices(args: Iterable[Any]) -> Iterator[torch.device]:
    """The devices of the tensors among a kernel's arguments."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg.device
        elif isinstance(arg, tuple):
            yield from _devices(arg)


@triton.jit
def wait_for_previous(EARLY):
    """With EARLY, wait until all kernels before this one have ended, and let the programs of the next one be placed.
    Programs call it before they read or write what an earlier kernel may have touched."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(rows, ITEMS: tl.constexpr):
    """Begin to bring to the L2 cache the first ITEMS items, a power of two, at each of the pointers `rows` [N]."""
    item: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth // 8
    if ITEMS * item >= _LINE:
        line = tl.arange(0, ITEMS * item // _LINE) * (_LINE // item)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [rows[:, None] + line[None, :]],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


_counters: dict[tuple[torch.device, int], Tensor] = {}


def counters_of(device: torch.device, count: int) -> Tensor:
    """Counters of programs that have stored their part of something that the last one of them puts together; that one
    resets its counter to zero.

    All calls on a device share the counters, so that two streams must not run them at once. They are never freed, since
    CUDA graphs hold their address. During a capture nothing runs: counters created then become zero only by a memset
    that belongs to the graph and is replayed with it. A call before the capture avoids that.
    """
    key = device, max(4096, triton.next_power_of_2(count))
    if key in _counters:
        return _counters[key]
    counters = torch.zeros(key[1], dtype=torch.int32, device=device)
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        _counters[key] = counters
    return counters


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


@triton.jit
def row_of_tile(starts_ptr, rows, tile, ITEMS, SIZE, SPARE):
    """Find the row of a tile, where each token has ITEMS items and a tile has up to SIZE items of one row.

    The tiles of row r are numbered from starts[r] * ITEMS // SIZE + r * SPARE on. With SPARE 1 that leaves a number for
    each row's partial tile, and at least one for every row; with SPARE 2, for a partial tile at either end. Of T tokens
    in R rows, all tiles are numbered below T * ITEMS // SIZE + R * SPARE, whatever the rows' lengths; some numbers
    belong to no tile.

    Args:
        starts_ptr: [rows + 1], first token of each row and the end of the last one; tokens count from starts[0].

    Returns:
        The row, its first token, its number of tokens, and the first item of the tile within the row, which lies beyond
        the row's last one if the number belongs to no tile.
    """
    zero = tl.load(starts_ptr)
    row = -1
    for start in range(0, rows, 128):
        index = start + tl.arange(0, 128)
        begin = tl.load(starts_ptr + index, mask=index < rows, other=0) - zero
        row += tl.sum(((index < rows) & (begin * ITEMS // SIZE + index * SPARE <= tile)).to(tl.int32), 0)
    begin = tl.load(starts_ptr + row) - zero
    tokens = (tl.load(starts_ptr + row + 1) - zero - begin).to(tl.int32)
    return row, begin, tokens, ((tile - row * SPARE - begin * ITEMS // SIZE) * SIZE).to(tl.int32)
