# mypy: disable-error-code="assignment"
"""Depthwise causal convolution with silu in Triton, for decode steps and prefill chunks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import PROGRAMS, chunks, strided

_CHUNK, _BLOCK = 16, 512
"""Tokens and channels per program of `causal_conv1d_varlen`."""


@triton.jit
def _load_tap(weight_ptr, channel, inside, j, WIDTH, PACKED):
    """Tap j of each channel in fp32. PACKED: the four bf16 taps of a channel are read as one int64, in one load."""
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
    """The taps of each channel and its bias, in fp32."""
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
def _update_kernel(
    x_rows,
    state_ptr,
    weight_ptr,
    bias_ptr,
    slots_ptr,
    committed_ptr,
    y_ptr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK channels of one row per program."""
    x_ptr, x_row, x_token = x_rows
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    y_ptrs = y_ptr + row * (TOKENS * CHANNELS) + channel
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        for t in tl.static_range(TOKENS):
            tl.store(y_ptrs + t * CHANNELS, tl.zeros([BLOCK], y_ptr.dtype.element_ty), mask=inside)
        return
    state_ptrs = state_ptr + slot * (COLUMNS * CHANNELS) + channel
    window_ptrs = state_ptrs + tl.load(committed_ptr + row) * CHANNELS
    x_ptrs = x_ptr + row * x_row + channel
    inputs = ()  # the window, then the new tokens
    for i in tl.static_range(WIDTH - 1):
        inputs = inputs + (tl.load(window_ptrs + i * CHANNELS, mask=inside, other=0.0).to(tl.float32),)  # noqa: RUF005
    for t in tl.static_range(TOKENS):
        inputs = inputs + (tl.load(x_ptrs + t * x_token, mask=inside, other=0.0).to(tl.float32),)  # noqa: RUF005
    taps, bias = _load_taps(weight_ptr, bias_ptr, channel, inside, WIDTH, PACKED)
    for t in tl.static_range(TOKENS):
        y = _convolve(inputs, taps, bias, t, WIDTH)
        tl.store(y_ptrs + t * CHANNELS, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # a thread may write columns that another thread still reads
    for i in tl.static_range(1, WIDTH - 1 + TOKENS):
        tl.store(state_ptrs + (i - 1) * CHANNELS, inputs[i].to(state_ptr.dtype.element_ty), mask=inside)


def causal_conv1d_update(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, committed: Tensor
) -> Tensor:
    """See the reference."""
    rows, tokens, channels = x.shape
    width = weight.shape[-1]
    assert state.is_contiguous() and weight.is_contiguous()
    taps, packed = _taps(weight)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = 1024  # channels per program
    while block > 128 and rows * triton.cdiv(channels, block) < 2 * PROGRAMS:
        block //= 2
    _update_kernel[(triton.cdiv(channels, block), rows)](
        strided(x),
        state,
        taps,
        bias,
        slots.contiguous(),
        committed.contiguous(),
        y,
        CHANNELS=channels,
        COLUMNS=state.shape[1],
        WIDTH=width,
        TOKENS=tokens,
        PACKED=packed,
        BLOCK=block,
        num_warps=max(1, block // 256),
    )
    return y


@triton.jit
def _load_input(x_ptrs, initial_ptrs, at, i, row_start, inside, x_token, CHANNELS, WIDTH):
    """Load input i of the WIDTH - 1 inputs before token `at` of a row, from the row or from its initial window."""
    place = at + (i - WIDTH + 1)
    old_ptrs = initial_ptrs + (place - row_start + (WIDTH - 1)) * CHANNELS
    new = tl.load(x_ptrs + place * x_token, mask=inside & (place >= row_start), other=0.0)
    return new + tl.load(old_ptrs, mask=inside & (place < row_start), other=0.0).to(new.dtype)


@triton.jit
def _varlen_kernel(
    x_ptr,
    initial_ptr,
    weight_ptr,
    bias_ptr,
    starts_ptr,
    rows_ptr,
    row_starts_ptr,
    y_ptr,
    windows_ptr,
    x_token,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK channels of one chunk of up to BLOCK_T tokens per program. A row's last chunk stores its window."""
    chunk = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    start, end = tl.load(starts_ptr + chunk), tl.load(starts_ptr + chunk + 1)
    row = tl.load(rows_ptr + chunk)
    row_start, row_end = tl.load(row_starts_ptr + row), tl.load(row_starts_ptr + row + 1)
    x_ptrs, initial_ptrs = x_ptr + channel, initial_ptr + row * ((WIDTH - 1) * CHANNELS) + channel
    inputs = ()  # the inputs before the first token, then the chunk's tokens
    for i in tl.static_range(WIDTH - 1):
        inputs = inputs + (_load_input(x_ptrs, initial_ptrs, start, i, row_start, inside, x_token, CHANNELS, WIDTH),)  # noqa: RUF005
    for t in tl.static_range(BLOCK_T):
        inputs = inputs + (tl.load(x_ptrs + (start + t) * x_token, mask=inside & (start + t < end), other=0.0),)  # noqa: RUF005
    taps, bias = _load_taps(weight_ptr, bias_ptr, channel, inside, WIDTH, PACKED)
    y_ptrs = y_ptr + start * CHANNELS + channel
    for t in tl.static_range(BLOCK_T):
        y = _convolve(inputs, taps, bias, t, WIDTH)
        tl.store(y_ptrs + t * CHANNELS, y.to(y_ptr.dtype.element_ty), mask=inside & (start + t < end))
    if end == row_end:
        for i in tl.static_range(WIDTH - 1):
            value = _load_input(x_ptrs, initial_ptrs, end, i, row_start, inside, x_token, CHANNELS, WIDTH)
            tl.store(windows_ptr + (row * (WIDTH - 1) + i) * CHANNELS + channel, value, mask=inside)


def causal_conv1d_varlen(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor, lens: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    tokens, channels = x.shape
    width = weight.shape[-1]
    assert x.stride(1) == 1 and weight.is_contiguous()
    parts = chunks(lens, _CHUNK, x.device)
    taps, packed = _taps(weight)
    y = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    windows = torch.empty(len(lens), width - 1, channels, dtype=x.dtype, device=x.device)
    _varlen_kernel[(triton.cdiv(channels, _BLOCK), len(parts.row))](
        x,
        initial.contiguous(),
        taps,
        bias,
        parts.start,
        parts.row,
        parts.row_start,
        y,
        windows,
        x.stride(0),
        CHANNELS=channels,
        WIDTH=width,
        PACKED=packed,
        BLOCK_T=_CHUNK,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return y, windows
