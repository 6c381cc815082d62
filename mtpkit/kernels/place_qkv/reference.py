"""Ops between the input projection of attention and its scores: norms, rotation, and writes to the
caches."""

from torch import Tensor

from mtpkit.kernels.kv_store.reference import UNSCALED, KVScales, store_kv
from mtpkit.kernels.norm.reference import rms_norm
from mtpkit.kernels.rotary.reference import rotate


def place_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    frequencies: Tensor | None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-5,
    zero_centered: bool = False,
    keep: Tensor | None = None,
    factor: float = 1.0,
    scales: KVScales = UNSCALED,
) -> Tensor:
    """Normalise each head's queries and keys, rotate them, and write keys and values into a paged
    cache.

    Args:
        q: [T, groups, heads, d], heads of each group; k, v: [T, groups, d]; all of any strides.
        key_cache, value_cache, slots, scales: as for `store_kv`.
        positions: [T] int64.
        frequencies: [w] fp32, as for `rotate`; None: positions are not embedded.
        q_norm, k_norm: [d], weights of RMS norms over the channels of a head; None: no norm.
        eps, zero_centered: as for `rms_norm`.
        keep: [N] int64, the tokens whose queries are wanted; None: all.
        factor: of the rotated channels, as for `rotate`.

    Returns:
        q [N, groups, heads, d], rounded after the norm and after the rotation.
    """
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps, zero_centered)
    if frequencies is not None:
        k = rotate(k[:, None], positions[None], frequencies, factor)[:, 0]
    store_kv(k, v, key_cache, value_cache, slots, scales)
    if keep is not None:
        q = q[keep]
        positions = positions[keep]
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps, zero_centered)
    return q if frequencies is None else rotate(q, positions[None], frequencies, factor)
