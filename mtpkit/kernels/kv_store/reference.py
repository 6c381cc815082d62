"""Write new keys and values into a paged cache."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mtpkit.kernels.linear.reference import FP8, FP8_MAX


class KVScales(NamedTuple):
    """What the numbers of a cache in fp8 stand for: a key is its number times `key`, a value its
    number times `value`. A cache in another dtype has no scales: both are 1."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KVScales()


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    scales: KVScales = UNSCALED,
) -> None:
    """Write token t to slot slots[t] = block * block_size + offset; skip it if the slot is -1.

    A value that is not finite is written as zeros under a key of NaN, in each head that has such a
    value. In attention, all queries that see the token then get NaN, and no others: their weight of
    zero times an infinite value or NaN would be NaN, but a masked score is dropped whatever its key
    is.

    Args:
        key: [T, kv_heads, d], value: [T, kv_heads, e], of any strides, for example views of a fused
            projection.
        key_cache: [num_blocks, block_size, kv_heads, d], value_cache: [num_blocks, block_size,
            kv_heads, e], updated in place. Both are dense; with one kv head, they may instead lie
            side by side in the rows of one tensor.
        slots: [T] int64, the slot mapping; distinct except for -1.
        scales: of caches in fp8, see `as_stored`.
    """
    written = slots >= 0
    places = slots[written]
    broken = ~value.isfinite().all(-1, keepdim=True)
    key = key.masked_fill(broken, math.nan)
    value = value.masked_fill(broken, 0.0)
    for cache, new, scale in ((key_cache, key, scales.key), (value_cache, value, scales.value)):
        cache.flatten(0, 1)[places] = as_stored(new[written], cache.dtype, scale)


def as_stored(x: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """`x` in the dtype of a cache. In fp8, it is divided by the scale and clamped to the numbers
    that fp8 has; infinity and NaN become NaN."""
    if dtype != FP8:
        return x.to(dtype)
    wide = x.float()
    # Clamping alone would make a number of infinity, and a broken request would go on unnoticed.
    return ((wide * (1 / scale)).clamp(-FP8_MAX, FP8_MAX) + wide * 0.0).to(FP8)


def through_fp8(x: Tensor, scale: float = 1.0) -> Tensor:
    """What a cache in fp8 gives back for `x`, in the dtype of `x`."""
    return as_stored(x, FP8, scale).to(x.dtype) * scale
