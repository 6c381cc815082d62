"""Copies of recurrent states that are rounded to float16 stochastically, in Triton."""

import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import only_if, padded
from mtpkit.kernels.rounding.reference import Noise
from mtpkit.kernels.rounding.tile import narrowed, packed

_BLOCK_P = 16


@triton.jit
def _narrow_kernel(
    read_ptr,
    written_ptr,
    sources_ptr,
    targets_ptr,
    noise,
    READ_STRIDE,
    WRITTEN_STRIDE,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Copy BLOCK_P rows of the state of one head of one unit per program."""
    copy = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    source = tl.load(sources_ptr + copy)
    target = tl.load(targets_ptr + copy)
    inside = (p < WIDTH)[:, None] & (n < STATE)[None, :]
    mask = only_if(inside & (source >= 0), target >= 0)
    place = (head * WIDTH + p)[:, None] * STATE + n[None, :]
    values = tl.load(read_ptr + source * READ_STRIDE + place, mask=mask, other=0.0).to(tl.float32)
    position = tl.load(noise[3] + copy)
    half = narrowed(values, tl.float16, noise, copy, position, head, p, 0, WIDTH, STATE)
    tl.store(written_ptr + target * WRITTEN_STRIDE + place, half, mask=mask)


def narrow_units(
    sources: Tensor, targets: Tensor, read: Tensor, written: Tensor, noise: Noise
) -> None:
    """See the reference."""
    if not len(sources):
        return
    heads, width, state_dim = read.shape[1:]
    assert read[:1].is_contiguous() and written[:1].is_contiguous()
    assert noise.positions is not None
    block_p = min(_BLOCK_P, triton.next_power_of_2(width))
    _narrow_kernel[(triton.cdiv(width, block_p), heads, len(sources))](
        read,
        written,
        sources.contiguous(),
        targets.contiguous(),
        packed(noise),
        read.stride(0),
        written.stride(0),
        WIDTH=width,
        STATE=state_dim,
        BLOCK_P=block_p,
        BLOCK_N=padded(state_dim),
        num_warps=4,
    )
