"""Write new keys and values into a paged cache, in Triton."""

import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import Early, at_least, at_most, strided, wait_for_previous
from mtpkit.kernels.kv_store.reference import UNSCALED, KVScales
from mtpkit.kernels.linear.reference import FP8, FP8_MAX

_LARGEST = tl.constexpr(FP8_MAX)


@triton.jit
def broken(values):
    """NaN for each row of values [.., N] in which a value is not finite, else 0: [..] fp32."""
    return tl.sum(values.to(tl.float32) * 0.0, len(values.shape) - 1)


@triton.jit
def whole(values, spoilt):
    """`values`, with zeros in the rows that `spoilt` marks by NaN; its shape must broadcast."""
    return tl.where(spoilt == spoilt, values, 0.0)


@triton.jit
def as_stored(x, dtype, inverse):
    """`x` in the dtype of a cache; `inverse`: 1 / scale of a cache in fp8, None for others."""
    if inverse is None:
        return x.to(dtype)
    else:
        wide = x.to(tl.float32)
        # Infinity times 0 is NaN; clamping alone would make a number of infinity.
        scaled = at_most(at_least(wide * inverse, -_LARGEST), _LARGEST) + wide * 0.0
        return scaled.to(dtype)


def inverses(scales: KVScales, cache: Tensor) -> tuple[float | None, float | None]:
    """1 / scale of keys and of values as kernels take them; None if the cache is not in fp8, which
    leaves the scaling out of the kernel."""
    if cache.dtype != FP8:
        return None, None
    return 1 / scales.key, 1 / scales.value


@Early
@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _store_kernel(
    key_rows,
    value_rows,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    inverses,
    KV_HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_SLOT: tl.constexpr,
    VALUE_SLOT: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Copy HEADS_BLOCK heads of one token per program; slots are KEY_SLOT elements apart for keys
    and VALUE_SLOT for values. `inverses`: see the function of that name."""
    wait_for_previous(EARLY)
    key_ptr, key_token, key_head = key_rows
    value_ptr, value_token, value_head = value_rows
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
    channel = tl.arange(0, WIDTH_BLOCK)[None, :]
    in_key = (head < KV_HEADS) & (channel < KEY_WIDTH)
    in_value = (head < KV_HEADS) & (channel < VALUE_WIDTH)
    key = tl.load(key_ptr + token * key_token + head * key_head + channel, mask=in_key)
    value = tl.load(
        value_ptr + token * value_token + head * value_head + channel, mask=in_value, other=0.0
    )
    # A weight of 0 times NaN is NaN, so a value of NaN would reach queries that do not see it. A
    # key of NaN does not, since masked scores are replaced; it spoils only the queries that see it.
    spoilt = broken(value)[:, None]
    key = (key + spoilt).to(key.dtype)
    value = whole(value, spoilt)
    place = slot * KEY_SLOT + head * KEY_WIDTH + channel
    key = as_stored(key, key_cache_ptr.dtype.element_ty, inverses[0])
    tl.store(key_cache_ptr + place, key, mask=in_key)
    place = slot * VALUE_SLOT + head * VALUE_WIDTH + channel
    value = as_stored(value, value_cache_ptr.dtype.element_ty, inverses[1])
    tl.store(value_cache_ptr + place, value, mask=in_value)


def slot_stride(cache: Tensor) -> int:
    """Elements from one slot of a cache [num_blocks, block_size, kv_heads, d] to the next, within a
    block and across blocks."""
    blocks, size, heads, width = cache.shape
    stride = cache.stride(1) if size > 1 else cache.stride(0)
    assert cache.stride(-1) == 1 and (heads == 1 or cache.stride(2) == width)
    assert blocks == 1 or cache.stride(0) == size * stride
    return stride


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    scales: KVScales = UNSCALED,
    *,
    program_elements: int = 1024,
) -> None:
    """See the reference. A program copies about `program_elements` elements of keys and the same
    number of values."""
    tokens, kv_heads, width = key.shape
    if tokens == 0:
        return
    width_block = triton.next_power_of_2(max(width, value.shape[-1]))
    heads_block = min(triton.next_power_of_2(kv_heads), max(1, program_elements // width_block))
    _store_kernel[(tokens, triton.cdiv(kv_heads, heads_block))](
        strided(key),
        strided(value),
        key_cache,
        value_cache,
        slots,
        inverses(scales, key_cache),
        KV_HEADS=kv_heads,
        KEY_WIDTH=width,
        VALUE_WIDTH=value.shape[-1],
        KEY_SLOT=slot_stride(key_cache),
        VALUE_SLOT=slot_stride(value_cache),
        HEADS_BLOCK=heads_block,
        WIDTH_BLOCK=width_block,
        num_warps=4,
    )
