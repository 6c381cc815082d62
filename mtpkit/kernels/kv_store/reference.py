"""Write new keys and values into a paged cache."""

import math

from torch import Tensor


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
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
    """
    written = slots >= 0
    places = slots[written]
    broken = ~value.isfinite().all(-1, keepdim=True)
    key = key.masked_fill(broken, math.nan)
    value = value.masked_fill(broken, 0.0)
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.flatten(0, 1)[places] = new[written].to(cache.dtype)
