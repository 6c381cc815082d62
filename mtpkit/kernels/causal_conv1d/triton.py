# mypy: disable-error-code="assignment"
"""Depthwise causal convolution with silu in Triton, for decode steps and prefill chunks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import (
    Early,
    busy_programs,
    only_if,
    row_of_tile,
    strided,
    wait_for_previous,
)

_TILE = 16
_BLOCK = 512
"""Tokens and channels per program of `causal_conv1d_varlen`."""


@triton.jit
def _load_tap(weight_ptr, channel, inside, j, WIDTH, PACKED):
    """Load tap j of each channel, in fp32. PACKED: the four bf16 taps of a channel are loaded
    together, as one int64."""
    if PACKED:
        four = tl.load(weight_ptr + channel, mask=inside, other=0)
        return ((four >> (16 * j)).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(weight_ptr + channel * WIDTH + j, mask=inside, other=0.0).to(tl.float32)


def _taps(weight: Tensor) -> tuple[Tensor, bool]:
    """The weights as `_load_tap` reads them, and whether they are packed."""
    packed = weight.dtype == torch.bfloat16 and weight.shape[-1] == 4
    return weight.view(torch.int64) if packed else weight, packed


@triton.jit
def _load_taps(weight_ptr, bias_ptr, channel, inside, WIDTH, PACKED):
    """Load the taps and the bias of each channel, in fp32."""
    taps = ()
    for j in tl.static_range(WIDTH):
        taps = taps + (_load_tap(weight_ptr, channel, inside, j, WIDTH, PACKED),)  # noqa: RUF005
    bias = tl.zeros(channel.shape, tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    return taps, bias


@triton.jit
def _convolve(inputs, taps, bias, t, WIDTH):
    """silu of the convolution that ends with input t + WIDTH - 1."""
    total = bias
    for j in tl.static_range(WIDTH):
        total += taps[j] * inputs[t + j].to(tl.float32)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _path(sources, newest, t: tl.constexpr, inside, CHANNELS, WIDTH):
    """The WIDTH inputs that the taps of token t read along its path, the oldest first, in fp32.

    Args:
        sources: pointers to the row's first token, the stride of tokens, pointers to the row's
            window, and the pointer to the row's parents.
        newest: the token's own input.
    """
    x_ptrs, x_token, window_ptrs, parents_ptr = sources
    inputs = (newest,)
    at = tl.zeros([], tl.int64) + t
    for _ in tl.static_range(WIDTH - 1):
        parent = tl.load(parents_ptr + at, mask=at >= 0, other=0)
        # Before token 0 the path goes on in the window, one input further back at a time.
        at = tl.where(at >= 0, parent, at - 1)
        new = tl.load(x_ptrs + at * x_token, mask=only_if(inside, at >= 0), other=0.0).to(
            tl.float32
        )
        past = only_if(inside, at < 0)
        old = tl.load(window_ptrs + (at + (WIDTH - 1)) * CHANNELS, mask=past, other=0.0).to(
            tl.float32
        )
        inputs = (tl.where(at >= 0, new, old),) + inputs  # noqa: RUF005
    return inputs


@Early
@triton.jit
def _update_kernel(
    x_rows,
    state_ptr,
    weight_ptr,
    bias_ptr,
    slots_ptr,
    committed_ptr,
    parents_ptr,
    y_ptr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute BLOCK channels of one row per program."""
    wait_for_previous(EARLY)
    x_ptr, x_row, x_token = x_rows
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    y_ptrs = y_ptr + row * (TOKENS * CHANNELS) + channel
    slot = tl.load(slots_ptr + row)
    # y is not initialised: without zeros, a null row could hand NaN to the layers after it.
    if slot < 0:
        for t in tl.static_range(TOKENS):
            tl.store(y_ptrs + t * CHANNELS, tl.zeros([BLOCK], y_ptr.dtype.element_ty), mask=inside)
        return
    state_ptrs = state_ptr + slot * (COLUMNS * CHANNELS) + channel
    window_ptrs = state_ptrs + tl.load(committed_ptr + row) * CHANNELS
    x_ptrs = x_ptr + row * x_row + channel
    inputs = ()  # the window, then the new tokens
    for i in tl.static_range(WIDTH - 1):
        value = tl.load(window_ptrs + i * CHANNELS, mask=inside, other=0.0).to(tl.float32)
        inputs = inputs + (value,)  # noqa: RUF005
    for t in tl.static_range(TOKENS):
        value = tl.load(x_ptrs + t * x_token, mask=inside, other=0.0).to(tl.float32)
        inputs = inputs + (value,)  # noqa: RUF005
    taps, bias = _load_taps(weight_ptr, bias_ptr, channel, inside, WIDTH, PACKED)
    for t in tl.static_range(TOKENS):
        if parents_ptr is None:
            y = _convolve(inputs, taps, bias, t, WIDTH)
        else:
            sources = x_ptrs, x_token, window_ptrs, parents_ptr + row * TOKENS
            y = _convolve(
                _path(sources, inputs[WIDTH - 1 + t], t, inside, CHANNELS, WIDTH),
                taps,
                bias,
                0,
                WIDTH,
            )
        tl.store(y_ptrs + t * CHANNELS, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # a thread may write columns that another thread still reads
    for i in tl.static_range(1, WIDTH - 1 + TOKENS):
        tl.store(
            state_ptrs + (i - 1) * CHANNELS, inputs[i].to(state_ptr.dtype.element_ty), mask=inside
        )


def causal_conv1d_update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    committed: Tensor,
    parents: Tensor | None = None,
) -> Tensor:
    """See the reference."""
    rows, tokens, channels = x.shape
    width = weight.shape[-1]
    assert state.is_contiguous() and weight.is_contiguous()
    taps, packed = _taps(weight)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = 1024  # channels per program
    while block > 128 and rows * triton.cdiv(channels, block) < 2 * busy_programs():
        block //= 2
    _update_kernel[(triton.cdiv(channels, block), rows)](
        strided(x),
        state,
        taps,
        bias,
        slots.contiguous(),
        committed.contiguous(),
        None if parents is None else parents.contiguous(),
        y,
        CHANNELS=channels,
        COLUMNS=state.shape[1],
        WIDTH=width,
        TOKENS=tokens,
        PACKED=packed,
        BLOCK=block,
        # With 256 channels per warp, a thread loads 16 bytes of bf16 at a time.
        num_warps=max(1, block // 256),
    )
    return y


@triton.jit
def _load_input(x_ptrs, window, place, inside, continued, x_token, WIDTH):
    """Load the input at `place` of a row, in the dtype of the window if there is one. Places -1,
    -2, .. lie in the window, which counts as zero if the row is not `continued`.

    Args:
        x_ptrs: pointers to the row's first token.
        window: pointers to the window's first input, and the stride of its inputs; or None.
    """
    value = tl.load(x_ptrs + place * x_token, mask=only_if(inside, place >= 0), other=0.0)
    if window is not None:
        old_ptrs = window[0] + (place + (WIDTH - 1)) * window[1]
        old = tl.load(old_ptrs, mask=only_if(inside & continued, place < 0), other=0.0)
        value = tl.where(place >= 0, value.to(old.dtype), old)
    return value


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["starts_ptr", "slots_ptr", "contexts_ptr"],
)
def _varlen_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    starts_ptr,
    windows,
    slots_ptr,
    contexts_ptr,
    y_ptr,
    x_token,
    rows,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK channels of one tile of up to TILE tokens per program, see `row_of_tile`.

    The programs of a row run in any order, so only the program of its first tile reads and writes
    the window.
    """
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    row, begin, count, first = row_of_tile(starts_ptr, rows, tl.program_id(1), 1, TILE, 1)
    # times the stride of a token they may exceed int32
    first = first.to(tl.int64)
    count = count.to(tl.int64)
    # An empty row has a first tile, too: its program sets the window of a new request to zero.
    if first >= tl.maximum(count, 1):
        return
    x_ptrs = x_ptr + begin * x_token + channel
    y_ptrs = y_ptr + (begin + first) * CHANNELS + channel
    window = None
    continued = False
    if windows is not None:
        slot = tl.load(slots_ptr + row)
        if slot < 0:
            for t in range(tl.minimum(TILE, count - first)):
                tl.store(
                    y_ptrs + t * CHANNELS, tl.zeros([BLOCK], y_ptr.dtype.element_ty), mask=inside
                )
            return
        continued = tl.load(contexts_ptr + row) > 0
        window = windows[0] + slot * windows[1] + channel, windows[2]
    inputs = ()  # the inputs before the tile, then the tile's tokens
    for i in tl.static_range(WIDTH - 1):
        before = _load_input(
            x_ptrs, window, first + (i - WIDTH + 1), inside, continued, x_token, WIDTH
        )
        inputs = inputs + (before,)  # noqa: RUF005
    for t in tl.static_range(TILE):
        value = tl.load(
            x_ptrs + (first + t) * x_token, mask=only_if(inside, first + t < count), other=0.0
        )
        inputs = inputs + (value,)  # noqa: RUF005
    taps, bias = _load_taps(weight_ptr, bias_ptr, channel, inside, WIDTH, PACKED)
    for t in tl.static_range(TILE):
        y = _convolve(inputs, taps, bias, t, WIDTH)
        tl.store(
            y_ptrs + t * CHANNELS,
            y.to(y_ptr.dtype.element_ty),
            mask=only_if(inside, first + t < count),
        )
    if windows is not None and first == 0:
        _slide(x_ptrs, window, count, inside, continued, x_token, WIDTH)


@triton.jit
def _slide(x_ptrs, window, count, inside, continued, x_token, WIDTH):
    """Store the last WIDTH - 1 inputs of a row of `count` tokens as its window."""
    inputs = ()
    for i in tl.static_range(WIDTH - 1):
        value = _load_input(
            x_ptrs, window, count + (i - WIDTH + 1), inside, continued, x_token, WIDTH
        )
        inputs = inputs + (value,)  # noqa: RUF005
    tl.debug_barrier()  # a thread may write columns that another thread still reads
    window_ptrs, stride = window
    # An empty chunk of a request that has begun leaves its window as it is.
    keep = only_if(inside, (count > 0) | (not continued))
    for i in tl.static_range(WIDTH - 1):
        tl.store(window_ptrs + i * stride, inputs[i].to(window_ptrs.dtype.element_ty), mask=keep)


def causal_conv1d_varlen(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor,
    windows: Tensor | None = None,
    slots: Tensor | None = None,
    context_lens: Tensor | None = None,
) -> Tensor:
    """See the reference."""
    (tokens, channels), width, rows = x.shape, weight.shape[-1], len(starts) - 1
    assert x.stride(1) == 1 and weight.is_contiguous()
    # so that only a row's first tile needs the window
    tile = max(_TILE, triton.next_power_of_2(width - 1))
    taps, packed = _taps(weight)
    y = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    _varlen_kernel[(triton.cdiv(channels, _BLOCK), tokens // tile + rows)](
        x,
        taps,
        bias,
        starts,
        None if windows is None else strided(windows),
        slots,
        context_lens,
        y,
        x.stride(0),
        rows,
        CHANNELS=channels,
        WIDTH=width,
        PACKED=packed,
        TILE=tile,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return y
