"""Write new keys and values into a paged cache."""

from torch import Tensor


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Put token t at flat slot slots[t] = block * block_size + offset; a slot of -1 is written nowhere.

    Args:
        key, value: [T, kv_heads, d], of any strides, as views of a fused projection have them.
        key_cache, value_cache: [num_blocks, block_size, kv_heads, d], updated in place.
        slots: [T] int64, distinct where not -1.
    """
    written = slots >= 0
    places = slots[written]
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.view(-1, *cache.shape[2:])[places] = new[written].to(cache.dtype)
