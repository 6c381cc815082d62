"""Write new keys and values into a paged cache."""

from torch import Tensor


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write token t to slot slots[t] = block * block_size + offset; skip it if the slot is -1.

    Args:
        key: [T, kv_heads, d], value: [T, kv_heads, e], of any strides, for example views of a fused projection.
        key_cache: [num_blocks, block_size, kv_heads, d], value_cache: [num_blocks, block_size, kv_heads, e], updated in
            place. Both are dense; with one kv head, they may instead lie side by side in the rows of one tensor.
        slots: [T] int64, the slot mapping; distinct except for -1.
    """
    written = slots >= 0
    places = slots[written]
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.flatten(0, 1)[places] = new[written].to(cache.dtype)
