"""Rotary position embedding in Triton: one launch in place of a dozen."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import Early, strided, wait_for_previous, with_rows

_PROGRAM_ELEMENTS = 1024
"""Approximate number of elements of x that a program rotates."""


@Early
@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["positions_ptr"])
def _rotate_kernel(
    x_in,
    positions_ptr,
    positions_batch,
    positions_token,
    frequencies_ptr,
    out_ptr,
    batch,
    factor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rotate BLOCK_H heads of one token of one sequence per program."""
    wait_for_previous(EARLY)
    x_ptr, x_token, x_batch, x_head = x_in
    line = tl.program_id(0).to(tl.int64)
    token = line // batch
    sequence = line % batch
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    w = tl.arange(0, BLOCK_W)
    x_ptrs = x_ptr + token * x_token + sequence * x_batch + head * x_head
    out_ptrs = out_ptr + (line * HEADS + head) * WIDTH
    position = tl.load(positions_ptr + sequence * positions_batch + token * positions_token)
    angle = position.to(tl.float32) * tl.load(frequencies_ptr + w, mask=w < HALF, other=0.0)
    cos = (tl.cos(angle) * factor)[None, :]
    sin = (tl.sin(angle) * factor)[None, :]
    w, mask = w[None, :], (head < HEADS) & (w < HALF)[None, :]
    first = tl.load(x_ptrs + (2 * w if PAIRED else w), mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptrs + (2 * w + 1 if PAIRED else HALF + w), mask=mask, other=0.0).to(
        tl.float32
    )
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptrs + w, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(out_ptrs + HALF + w, (second * cos + first * sin).to(dtype), mask=mask)
    if WIDTH > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        mask = (head < HEADS) & (rest < WIDTH)
        tl.store(out_ptrs + rest, tl.load(x_ptrs + rest, mask=mask, other=0.0), mask=mask)


def rotate(
    x: Tensor, positions: Tensor, frequencies: Tensor, factor: float = 1.0, paired: bool = False
) -> Tensor:
    """See the reference."""
    length, batch, heads, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    half = len(frequencies)
    x = with_rows(x)
    block_h = min(
        triton.next_power_of_2(heads), max(1, _PROGRAM_ELEMENTS // triton.next_power_of_2(width))
    )
    _rotate_kernel[(length * batch, triton.cdiv(heads, block_h))](
        strided(x),
        positions,
        # A single row of positions serves all sequences.
        positions.stride(0) if len(positions) > 1 else 0,
        positions.stride(1),
        frequencies,
        out,
        batch,
        float(factor),
        HEADS=heads,
        WIDTH=width,
        HALF=half,
        PAIRED=paired,
        BLOCK_H=block_h,
        BLOCK_W=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(max(1, width - 2 * half)),
        num_warps=1 if block_h * width <= 256 else 4,
    )
    return out
