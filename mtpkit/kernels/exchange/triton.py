"""Exchanges between ranks in Triton: one launch per exchange, in which each program uses one
channel of the windows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import early_launch, wait_for_previous
from mtpkit.kernels.exchange.window import BEST_ROWS, BUFFERS_AT, CHANNELS, MOST_RANKS, Windows

_MOST_POLLS = 1 << 30
"""Number of polls of the flags, about a microsecond each, after which a waiting rank fails. They
take more than ten minutes, since another rank may still be compiling kernels. When a rank dies, the
other ranks are ended long before that."""
_WARPS = 16
_NO_NUMBER = tl.constexpr(2**63 - 1)


@triton.jit
def _set_flags(
    windows, channel, epoch, RANK: tl.constexpr, RANKS: tl.constexpr, MOST_RANKS: tl.constexpr
):
    """Set the flag of this rank in the windows of all ranks, once this program's writes are visible
    to them."""
    rank = tl.arange(0, MOST_RANKS)
    # Lane r holds the address of rank r's window, so that one instruction signals all ranks.
    window = windows[0] + rank * 0
    for other in tl.static_range(1, RANKS):
        window = tl.where(rank == other, windows[other], window)
    flags = window.to(tl.pointer_type(tl.int64)) + channel * MOST_RANKS + RANK
    # a release by one thread covers the other threads' writes before the barrier
    tl.debug_barrier()
    tl.atomic_xchg(flags, epoch + rank * 0, mask=rank < RANKS, sem="release", scope="sys")


@triton.jit
def _await_flags(
    window, channel, epoch, RANKS: tl.constexpr, MOST_RANKS: tl.constexpr, MOST_POLLS: tl.constexpr
):
    """Wait until all ranks have set their flags in the window of this rank."""
    rank = tl.arange(0, MOST_RANKS)
    flags = window.to(tl.pointer_type(tl.int64)) + channel * MOST_RANKS + rank
    missing = RANKS
    polls = 0
    while (missing > 0) & (polls < MOST_POLLS):
        # Adding 0 is a read with acquire semantics, which `tl.load` does not offer.
        seen = tl.atomic_add(
            flags, rank.to(tl.int64) * 0, mask=rank < RANKS, sem="acquire", scope="sys"
        )
        # Not `!=`: a faster rank may have set its flag to the next epoch already.
        missing = tl.sum(((seen < epoch) & (rank < RANKS)).to(tl.int32), 0)
        polls += 1
    # Compiled only into kernels with `debug`.
    tl.device_assert(missing == 0, "timed out waiting for the part of another rank")
    tl.debug_barrier()


@triton.jit
def _buffer(
    epoch, channel, CHANNELS: tl.constexpr, BUFFERS_AT: tl.constexpr, CAPACITY: tl.constexpr
):
    """Byte offset in a window of the channel's buffer for an epoch."""
    return BUFFERS_AT + (epoch % 2 * CHANNELS + channel) * CAPACITY


@triton.jit(debug=True)
def _values_kernel(
    values_ptr,
    gathered_ptr,
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
    EARLY: tl.constexpr,
):
    """Exchange `share` values per program: gather those of all ranks in `gathered` [ranks, count];
    without `gathered`, sum them in place."""
    wait_for_previous(EARLY)
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    summed_in: tl.constexpr = tl.float32 if dtype.primitive_bitwidth <= 32 else dtype
    channel = tl.program_id(0)
    epoch = tl.load(epochs_ptr + channel) + 1
    buffer = _buffer(epoch, channel, CHANNELS, BUFFERS_AT, CAPACITY)
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
        # All ranks add in the order of ranks, so that they get the same bits.
        total = tl.zeros([BLOCK], summed_in)
        for rank in tl.static_range(RANKS):
            part = tl.load(
                (windows[rank] + buffer).to(tl.pointer_type(dtype)) + item,
                mask=index < count,
                other=0.0,
            )
            if gathered_ptr is None:
                total += part.to(summed_in)
            else:
                tl.store(gathered_ptr + rank * count + index, part, mask=index < count)
        if gathered_ptr is None:
            tl.store(values_ptr + index, total.to(dtype), mask=index < count)
    tl.store(epochs_ptr + channel, epoch)


@triton.jit(debug=True)
def _best_kernel(
    values_ptr,
    tokens_ptr,
    best_ptr,
    token_ptr,
    windows,
    epochs_ptr,
    count,
    FIRST: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    MOST_RANKS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BUFFERS_AT: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROWS: tl.constexpr,
    MOST_POLLS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Find the best values and tokens of ROWS rows per program. A buffer holds the rows' values,
    then the rows' tokens."""
    wait_for_previous(EARLY)
    channel = tl.program_id(0)
    row = tl.arange(0, ROWS)
    index = channel * ROWS + row
    live = index < count
    epoch = tl.load(epochs_ptr + channel) + 1
    buffer = _buffer(epoch, channel, CHANNELS, BUFFERS_AT, CAPACITY)
    token = tl.load(tokens_ptr + index, mask=live, other=0)
    token = tl.where(token < 0, token, token + FIRST)
    own = windows[RANK] + buffer
    tl.store(
        own.to(tl.pointer_type(tl.float32)) + row,
        tl.load(values_ptr + index, mask=live, other=0.0),
        mask=live,
    )
    tl.store((own + ROWS * 4).to(tl.pointer_type(tl.int64)) + row, token, mask=live)
    _set_flags(windows, channel, epoch, RANK, RANKS, MOST_RANKS)
    _await_flags(windows[RANK], channel, epoch, RANKS, MOST_RANKS, MOST_POLLS)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    token = tl.full([ROWS], _NO_NUMBER, tl.int64)
    for rank in tl.static_range(RANKS):
        theirs = windows[rank] + buffer
        value = tl.load(theirs.to(tl.pointer_type(tl.float32)) + row, mask=live, other=0.0)
        number = tl.load(
            (theirs + ROWS * 4).to(tl.pointer_type(tl.int64)) + row, mask=live, other=0
        )
        token = tl.where(
            value > best, number, tl.where(value == best, tl.minimum(number, token), token)
        )
        best = tl.maximum(best, value)
    tl.store(best_ptr + index, best, mask=live)
    tl.store(token_ptr + index, token, mask=live)
    tl.store(epochs_ptr + channel, epoch)


def sum_over_ranks(values: Tensor, windows: Windows) -> Tensor:
    """See the reference."""
    _launch(values, None, windows)
    return values


def gather_ranks(values: Tensor, windows: Windows) -> Tensor:
    """See the reference."""
    gathered = values.new_empty(len(windows.windows), *values.shape)
    _launch(values, gathered, windows)
    return gathered


def _launch(values: Tensor, gathered: Tensor | None, windows: Windows) -> None:
    block, programs, share = windows.shares(values)
    _values_kernel[(programs,)](
        values,
        gathered,
        windows.windows,
        windows.epochs,
        values.numel(),
        share,
        BLOCK=block,
        **_constants(windows, values.device),
        num_warps=_WARPS,
    )


def best_of_ranks(
    values: Tensor, tokens: Tensor, first: int, windows: Windows
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    assert len(values) <= windows.most_rows
    best = torch.empty_like(values)
    token = torch.empty_like(tokens)
    if len(values):
        _best_kernel[(triton.cdiv(len(values), BEST_ROWS),)](
            values.contiguous(),
            tokens.contiguous(),
            best,
            token,
            windows.windows,
            windows.epochs,
            len(values),
            FIRST=first,
            ROWS=BEST_ROWS,
            **_constants(windows, values.device),
            num_warps=4,
        )
    return best, token


def _constants(windows: Windows, device: torch.device) -> dict[str, object]:
    """Keyword arguments that both kernels take."""
    return dict(
        RANK=windows.rank,
        RANKS=len(windows.windows),
        MOST_RANKS=MOST_RANKS,
        CHANNELS=CHANNELS,
        BUFFERS_AT=BUFFERS_AT,
        CAPACITY=windows.capacity,
        MOST_POLLS=_MOST_POLLS,
        # `debug`, which keeps the assertion, would also check integers for overflow.
        sanitize_overflow=False,
        **early_launch(device),
    )
