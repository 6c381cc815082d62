"""Write new keys and values into a paged cache, in Triton."""

import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import strided


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _store_kernel(
    key_rows,
    value_rows,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):
    """Copy HEADS_BLOCK heads of one token per program; both caches are contiguous."""
    key_ptr, key_token, key_head = key_rows
    value_ptr, value_token, value_head = value_rows
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
    channel = tl.arange(0, WIDTH_BLOCK)[None, :]
    inside = (head < KV_HEADS) & (channel < WIDTH)
    key = tl.load(key_ptr + token * key_token + head * key_head + channel, mask=inside)
    value = tl.load(value_ptr + token * value_token + head * value_head + channel, mask=inside)
    place = slot * (KV_HEADS * WIDTH) + head * WIDTH + channel
    tl.store(key_cache_ptr + place, key.to(key_cache_ptr.dtype.element_ty), mask=inside)
    tl.store(value_cache_ptr + place, value.to(value_cache_ptr.dtype.element_ty), mask=inside)


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, *, program_elements: int = 1024
) -> None:
    """See the reference. A program copies about `program_elements` elements of the keys and as many of the values."""
    tokens, kv_heads, width = key.shape
    if tokens == 0:
        return
    assert key_cache.is_contiguous() and value_cache.is_contiguous()
    width_block = triton.next_power_of_2(width)
    heads_block = min(triton.next_power_of_2(kv_heads), max(1, program_elements // width_block))
    _store_kernel[(tokens, triton.cdiv(kv_heads, heads_block))](
        strided(key),
        strided(value),
        key_cache,
        value_cache,
        slots,
        KV_HEADS=kv_heads,
        WIDTH=width,
        HEADS_BLOCK=heads_block,
        WIDTH_BLOCK=width_block,
        num_warps=4,
    )
