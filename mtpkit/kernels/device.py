"""Helpers that all kernels share: sizes of the GPU that they are tuned for, early launches, tensor
layouts, tiles.

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

SMALLEST_DOT = 16
"""Smallest number of rows and columns that `tl.dot` takes."""
NARROW = tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16
"""Dtype that tensor cores multiply; fp32 in the interpreter of Triton, which would multiply the raw
bits of bf16."""
NO_TOKEN = tl.constexpr(kernels.NO_TOKEN)
_FUSED = tl.constexpr(not triton.knobs.runtime.interpret)
"""Whether `tl.fma` rounds once; the interpreter of Triton rounds twice."""
_LEAST_DIVISOR = tl.constexpr(2.0**-64)
_LINE = tl.constexpr(128)
"""Bytes that one prefetch brings into the L2 cache."""


class Tile(NamedTuple):
    """Launch sizes of a matrix product: outputs and input channels that a program multiplies at a
    time, pipeline stages, warps, and the number of programs among which the input channels of an
    output are split."""

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


@functools.cache
def multiprocessors() -> int:
    """Number of streaming multiprocessors of the current GPU, which a process does not change; that
    of an H200 where kernels run in Triton's interpreter."""
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return 132
    count: int = torch.cuda.get_device_properties().multi_processor_count
    return count


_WHOLE = 0.8
"""Least share of the room on a GPU that counts as all of it."""


def evenness(programs: int, resident: int) -> float:
    """How well a launch that starts early uses the GPU, from 0 to 1. `resident` of its programs fit
    on a multiprocessor.

    Those that find room beside the previous launch start first, and the others where that one's
    programs end. So some multiprocessors get more than others, unless all programs find room at
    once, as in launches of at most half the room there is, or none, as where each takes all of it.
    """
    share = programs / (resident * multiprocessors())
    if share <= 0.5:
        return 2 * share
    return share if _WHOLE <= share <= 1 else 0.5 * min(share, 1 / share)


def busy_programs() -> int:
    """Number of programs that keeps all multiprocessors busy with loads."""
    return 2 * multiprocessors()


def early_launch(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """Keyword arguments of a launch that may start before the previous kernel has ended, if
    `wanted` and supported by the GPU (programmatic dependent launch, CUDA C++ programming guide).
    The kernel needs a constant EARLY, and each of its programs must call `wait_for_previous`, even
    a program that returns at once: a kernel waits only for its direct predecessor, and for all
    earlier kernels through the predecessor's own wait."""
    return dict(EARLY=True, launch_pdl=True) if wanted and overlaps(device) else dict(EARLY=False)


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel on a device can start before the previous kernel has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class Early:
    """Decorator that launches a kernel with `early_launch`.

    Args:
        most: largest grid, in programs per multiprocessor, that is launched early; None: no limit.
            A larger grid runs for longer than a launch takes, and would spread less evenly over
            multiprocessors where the previous kernel still runs.
    """

    def __init__(self, kernel: Any, most: int | None = 8) -> None:
        self.kernel = kernel
        self.most = most

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """Return a function that launches the kernel on a grid."""
        launch = self.kernel[grid]
        wanted = self.most is None or math.prod(grid) <= self.most * multiprocessors()
        return lambda *args, **constants: launch(
            *args, **constants, **early_launch(next(_devices(args)), wanted)
        )


def _devices(args: Iterable[Any]) -> Iterator[torch.device]:
    """The devices of the tensors among a kernel's arguments."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg.device
        elif isinstance(arg, tuple):
            yield from _devices(arg)


@triton.jit
def at_least(a, bound):
    """The larger number; NaN where `a` is NaN, of which `tl.maximum` alone would make the bound."""
    return tl.maximum(a, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def at_most(a, bound):
    """The smaller number; NaN where `a` is NaN."""
    return tl.minimum(a, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quotient(value, divisor):
    """Divide fp32 numbers, of which many share a divisor above 0: rounded as PyTorch's division
    rounds, with few operations per number instead of about 25. `divisor` broadcasts to `value`.
    Quotients that are subnormal numbers may be off: fp8 makes 0 of them.

    A product with the reciprocal is at most one unit in the last place off; what is left of the
    dividend, exact in a fused operation, corrects it (P. Markstein, Computation of elementary
    functions on the IBM RISC System/6000 processor, 1990).
    """
    if _FUSED:
        # Powers of two, so that the reciprocal of a tiny or a huge divisor is a normal number too.
        lift = tl.where(divisor < _LEAST_DIVISOR, 1 / _LEAST_DIVISOR, 1.0)
        lift = tl.where(divisor > 1 / _LEAST_DIVISOR, _LEAST_DIVISOR, lift)
        value *= lift
        divisor *= lift
        reciprocal = tl.div_rn(1.0, divisor)
        result = value * reciprocal
        left = tl.fma(-result, divisor + tl.zeros_like(value), value)
        corrected = tl.fma(left, reciprocal + tl.zeros_like(value), result)
        # Not a number where dividend, divisor or quotient is infinite.
        return tl.where(corrected == corrected, corrected, result)
    else:
        return tl.div_rn(value, divisor + tl.zeros_like(value))


@triton.jit
def only_if(mask, flag):
    """The mask of a block where `flag`, one number of the whole program, is set; otherwise nothing
    of the block.

    `mask & flag` alone is a block of integers in the interpreter of Triton 3.9, which refuses
    integers as the mask of a load or store. The comparison leaves no trace in a compiled kernel.
    """
    return (mask & flag) != 0


@triton.jit
def wait_for_previous(EARLY):
    """With EARLY, wait until all earlier kernels have ended, then allow the next kernel to start. A
    program calls this function before it reads or writes memory that an earlier kernel may have
    touched."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(rows, ITEMS: tl.constexpr):
    """Prefetch into the L2 cache the first ITEMS items (a power of two) at each of the pointers
    `rows` [N]."""
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
    """Counters with which the programs that share a result count how many have stored their part.
    The last program combines the parts and resets its counter to zero.

    All calls on a device share the counters, so two streams must not run such kernels at the same
    time. Counters are never freed, since CUDA graphs hold their address. Nothing runs during a
    capture: counters created then are zeroed only by a memset that becomes part of the graph and
    runs at every replay. A call before the capture avoids that.
    """
    key = device, max(4096, triton.next_power_of_2(count))
    if key in _counters:
        return _counters[key]
    counters = torch.zeros(key[1], dtype=torch.int32, device=device)
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        _counters[key] = counters
    return counters


WIDE_TILE = Tile(64, 16, 2, 4)
"""Tile for fp32, which tensor cores do not multiply at full precision: small, so that operands stay
in registers."""


def padded(size: int) -> int:
    """Number of rows or columns of a tile that tensor cores take and that holds `size` of them."""
    return max(SMALLEST_DOT, triton.next_power_of_2(size))


def with_rows(t: Tensor) -> Tensor:
    """`t` [..., n] with a contiguous last dimension; copied only if it is not."""
    return t if t.stride(-1) == 1 else t.contiguous()


def as_rows(t: Tensor) -> Tensor:
    """t [..., n] as [rows, n] with contiguous channels; copied only if no view has a single row
    stride."""
    return with_rows(t.reshape(-1, t.shape[-1]))


def strided(t: Tensor) -> tuple[Tensor | int, ...]:
    """Pack t, whose last dimension must be contiguous, and its other strides into one argument of a
    kernel."""
    assert t.stride(-1) == 1
    return t, *t.stride()[:-1]


@triton.jit
def load(ptrs, mask, WHOLE):
    """Load values, zero where `mask` is False; WHOLE: the mask is True everywhere."""
    if WHOLE:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def row_of_tile(starts_ptr, rows, tile, ITEMS, SIZE, SPARE):
    """Find the row that a tile belongs to, where each token has ITEMS items and a tile has up to
    SIZE items of one row.

    The tiles of row r are numbered from starts[r] * ITEMS // SIZE + r * SPARE on. SPARE 1 leaves
    one number for each row's partial tile, and at least one number for every row; SPARE 2 leaves
    room for a partial tile at either end. With T tokens in R rows, all tile numbers are below T *
    ITEMS // SIZE + R * SPARE, whatever the rows' lengths; some numbers belong to no tile.

    Args:
        starts_ptr: [rows + 1], first token of each row and the end of the last one; tokens count
            from starts[0].

    Returns:
        The row, its first token, its number of tokens, and the first item of the tile within the
        row. That item lies beyond the row's last item if the number belongs to no tile.
    """
    zero = tl.load(starts_ptr)
    # Tile numbers grow from row to row, so the rows that begin at or before the tile are counted;
    # the last one of them is its row.
    row = -1
    for start in range(0, rows, 128):
        index = start + tl.arange(0, 128)
        begin = tl.load(starts_ptr + index, mask=index < rows, other=0) - zero
        row += tl.sum(
            ((index < rows) & (begin * ITEMS // SIZE + index * SPARE <= tile)).to(tl.int32), 0
        )
    begin = tl.load(starts_ptr + row) - zero
    tokens = (tl.load(starts_ptr + row + 1) - zero - begin).to(tl.int32)
    return row, begin, tokens, ((tile - row * SPARE - begin * ITEMS // SIZE) * SIZE).to(tl.int32)
