"""`sum_over_ranks` in Triton: one launch, in which each program uses one channel of the windows."""

import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.all_reduce.window import BUFFERS_AT, CHANNELS, MOST_RANKS, Windows
from mtpkit.kernels.device import Early, begin

_MOST_POLLS = 1 << 30
"""Looks at the flags, each about a microsecond, after which a rank that waits for another one fails: ten minutes and
more, since the other may have kernels to compile. A rank that dies ends the others long before."""
_WARPS = 16


@triton.jit
def _set_flags(windows, channel, epoch, RANK: tl.constexpr, RANKS: tl.constexpr, MOST_RANKS: tl.constexpr):
    """Set the flag of this rank in the windows of all, once what this program wrote is visible to them."""
    rank = tl.arange(0, MOST_RANKS)
    window = windows[0] + rank * 0
    for other in tl.static_range(1, RANKS):
        window = tl.where(rank == other, windows[other], window)
    flags = window.to(tl.pointer_type(tl.int64)) + channel * MOST_RANKS + RANK
    tl.debug_barrier()  # a release of one thread counts for what the others wrote before the barrier
    tl.atomic_xchg(flags, epoch + rank * 0, mask=rank < RANKS, sem="release", scope="sys")


@triton.jit
def _await_flags(window, channel, epoch, RANKS: tl.constexpr, MOST_RANKS: tl.constexpr, MOST_POLLS: tl.constexpr):
    """Wait until all ranks have set their flags in the window of this one."""
    rank = tl.arange(0, MOST_RANKS)
    flags = window.to(tl.pointer_type(tl.int64)) + channel * MOST_RANKS + rank
    missing, polls = RANKS, 0
    while (missing > 0) & (polls < MOST_POLLS):
        seen = tl.atomic_add(flags, rank.to(tl.int64) * 0, mask=rank < RANKS, sem="acquire", scope="sys")
        missing = tl.sum(((seen < epoch) & (rank < RANKS)).to(tl.int32), 0)
        polls += 1
    tl.device_assert(missing == 0, "a rank waited in vain for another one's part of a sum")
    tl.debug_barrier()


@Early
@triton.jit(debug=True)
def _sum_kernel(
    values_ptr,
    windows,
    epochs_ptr,
    count,
    share,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    MOST_RANKS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BUFFERS_AT: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST_POLLS: tl.constexpr,
):
    """Sum `share` values."""
    begin()
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    summed_in: tl.constexpr = tl.float32 if dtype.primitive_bitwidth <= 32 else dtype
    channel = tl.program_id(0)
    epoch = tl.load(epochs_ptr + channel) + 1
    buffer = BUFFERS_AT + (epoch % 2 * CHANNELS + channel) * CAPACITY
    own = (windows[RANK] + buffer).to(tl.pointer_type(dtype))
    for start in range(0, share, BLOCK):
        item = start + tl.arange(0, BLOCK)
        index = channel * share + item
        tl.store(own + item, tl.load(values_ptr + index, mask=index < count), mask=index < count)
    _set_flags(windows, channel, epoch, RANK, RANKS, MOST_RANKS)
    _await_flags(windows[RANK], channel, epoch, RANKS, MOST_RANKS, MOST_POLLS)
    for start in range(0, share, BLOCK):
        item = start + tl.arange(0, BLOCK)
        index = channel * share + item
        total = tl.zeros([BLOCK], summed_in)
        for rank in tl.static_range(RANKS):
            part = (windows[rank] + buffer).to(tl.pointer_type(dtype))
            total += tl.load(part + item, mask=index < count, other=0.0).to(summed_in)
        tl.store(values_ptr + index, total.to(dtype), mask=index < count)
    tl.store(epochs_ptr + channel, epoch)


def sum_over_ranks(values: Tensor, windows: Windows) -> Tensor:
    """See the reference."""
    block, programs, share = windows.shares(values)
    _sum_kernel[(programs,)](
        values,
        windows.windows,
        windows.epochs,
        values.numel(),
        share,
        RANK=windows.rank,
        RANKS=len(windows.windows),
        MOST_RANKS=MOST_RANKS,
        CHANNELS=CHANNELS,
        BUFFERS_AT=BUFFERS_AT,
        CAPACITY=windows.capacity,
        BLOCK=block,
        MOST_POLLS=_MOST_POLLS,
        num_warps=_WARPS,
        sanitize_overflow=False,
    )
    return values
