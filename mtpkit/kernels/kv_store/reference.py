"""Write new keys and values into a paged cache."""

from torch import Tensor


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write token t to slot slots[t] = block * block_size + offset; skip it if the slot is -1.

    Args:
        key: [T, kv_heads, d], value: [T, kv_heads, e], of any strides; views of a fused projection, for example.
        key_cache: [num_blocks, block_size, kv_heads, d], value_cache: [num_blocks, block_size, kv_heads, e], updated in
            place; dense, or side by side in rows of one tensor with one kv head.
        slots: [T] int64, the slot mapping; distinct except for -1.
    """
    written = slots >= 0
    places = slots[written]
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.flatten(0, 1)[places] = new[written].to(cache.dtype)
