"""Norms, rotation and writes to the caches in Triton: one launch in place of five."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import Early, strided, wait_for_previous, with_rows
from mtpkit.kernels.kv_store.reference import UNSCALED, KVScales
from mtpkit.kernels.kv_store.triton import (
    as_stored,
    broken,
    inverses,
    slot_stride,
    store_kv,
    whole,
)


@triton.jit
def _turn(
    x_ptrs,
    norm_ptr,
    turns,
    out_ptrs,
    inverse,
    heads,
    eps,
    WIDTH,
    HALF,
    BLOCK_W,
    BLOCK_REST,
    ZERO_CENTERED,
):
    """Normalise and rotate heads.

    Args:
        x_ptrs, out_ptrs: [H, 1], pointers to the first channels of the heads that are read and
            written.
        inverse: see `as_stored`.
        heads: [H, 1], which heads exist.
        turns: cos, sin [1, BLOCK_W] of the angles, times the factor of rotated channels; then 0, or
            NaN to write heads of NaN, or None for 0.
    """
    cos, sin, spoilt = turns
    dtype = x_ptrs.dtype.element_ty
    w = tl.arange(0, BLOCK_W)[None, :]
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    turned = heads & (w < HALF)
    left = heads & (rest < WIDTH)
    first = tl.load(x_ptrs + w, mask=turned, other=0.0).to(tl.float32)
    second = tl.load(x_ptrs + HALF + w, mask=turned, other=0.0).to(tl.float32)
    third = tl.load(x_ptrs + rest, mask=left, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        squares = tl.sum(first * first, 1, keep_dims=True) + tl.sum(
            second * second, 1, keep_dims=True
        )
        scale = tl.rsqrt((squares + tl.sum(third * third, 1, keep_dims=True)) / WIDTH + eps)
        shift = 1.0 if ZERO_CENTERED else 0.0
        first *= scale * (tl.load(norm_ptr + w, mask=w < HALF, other=0.0).to(tl.float32) + shift)
        second *= scale * (
            tl.load(norm_ptr + HALF + w, mask=w < HALF, other=0.0).to(tl.float32) + shift
        )
        third *= scale * (
            tl.load(norm_ptr + rest, mask=rest < WIDTH, other=0.0).to(tl.float32) + shift
        )
        # Rounded between norm and rotation, as separate kernels would; `third` is not rotated.
        first = first.to(dtype).to(tl.float32)
        second = second.to(dtype).to(tl.float32)
    if spoilt is not None:
        cos = cos + spoilt
        third = third + spoilt
    into = out_ptrs.dtype.element_ty
    tl.store(
        out_ptrs + w, as_stored((first * cos - second * sin).to(dtype), into, inverse), mask=turned
    )
    tl.store(
        out_ptrs + HALF + w,
        as_stored((second * cos + first * sin).to(dtype), into, inverse),
        mask=turned,
    )
    tl.store(out_ptrs + rest, as_stored(third.to(dtype), into, inverse), mask=left)


@triton.jit
def _angles(positions_ptr, frequencies_ptr, token, factor, HALF, BLOCK_W):
    """cos and sin [1, BLOCK_W] of a token's angles, times the factor."""
    w = tl.arange(0, BLOCK_W)
    turns = tl.zeros([BLOCK_W], tl.float32)
    if frequencies_ptr is not None:
        turns = tl.load(frequencies_ptr + w, mask=w < HALF, other=0.0)
    angle = tl.load(positions_ptr + token).to(tl.float32) * turns
    return (tl.cos(angle) * factor)[None, :], (tl.sin(angle) * factor)[None, :]


@Early
@triton.jit(
    do_not_specialize=["tokens", "kept"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "keep_ptr"],
)
def _place_kernel(
    q_rows,
    k_rows,
    v_rows,
    caches,
    slots_ptr,
    positions_ptr,
    frequencies_ptr,
    inverses,
    norms,
    keep_ptr,
    out_ptr,
    tokens,
    kept,
    eps,
    factor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    KEY_SLOT: tl.constexpr,
    VALUE_SLOT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write one group's key and value of token i to the caches, and make its queries of kept token
    i, per program."""
    wait_for_previous(EARLY)
    q_ptr, q_token, q_group, q_head = q_rows
    k_ptr, k_token, k_group = k_rows
    v_ptr, v_token, v_group = v_rows
    key_cache_ptr, value_cache_ptr = caches
    q_norm_ptr, k_norm_ptr = norms
    index = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    one = tl.zeros([1, 1], tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    if index < tokens:
        slot = tl.load(slots_ptr + index)
        if slot >= 0:
            k_ptrs = k_ptr + index * k_token + group * k_group + one
            key_ptrs = key_cache_ptr + slot * KEY_SLOT + group * WIDTH + one
            channel = tl.arange(0, BLOCK_V)
            value_ptrs = value_cache_ptr + slot * VALUE_SLOT + group * VALUE_WIDTH + channel
            mask = channel < VALUE_WIDTH
            value = tl.load(
                v_ptr + index * v_token + group * v_group + channel, mask=mask, other=0.0
            )
            # As in `store_kv`, a value that is not finite becomes a key of NaN.
            spoilt = broken(value)
            cos, sin = _angles(positions_ptr, frequencies_ptr, index, factor, HALF, BLOCK_W)
            turns = cos, sin, spoilt
            _turn(
                k_ptrs,
                k_norm_ptr,
                turns,
                key_ptrs,
                inverses[0],
                one == 0,
                eps,
                WIDTH,
                HALF,
                BLOCK_W,
                BLOCK_REST,
                ZERO_CENTERED,
            )
            value = as_stored(whole(value, spoilt), value_cache_ptr.dtype.element_ty, inverses[1])
            tl.store(value_ptrs, value, mask=mask)
    if index < kept:
        token = index if keep_ptr is None else tl.load(keep_ptr + index)
        q_cos, q_sin = _angles(positions_ptr, frequencies_ptr, token, factor, HALF, BLOCK_W)
        q_turns = q_cos, q_sin, None
        q_ptrs = q_ptr + token * q_token + group * q_group + head * q_head
        out_ptrs = out_ptr + ((index * tl.num_programs(1) + group) * HEADS + head) * WIDTH
        real = head < HEADS
        _turn(
            q_ptrs,
            q_norm_ptr,
            q_turns,
            out_ptrs,
            None,
            real,
            eps,
            WIDTH,
            HALF,
            BLOCK_W,
            BLOCK_REST,
            ZERO_CENTERED,
        )


def warps(items: int) -> int:
    """Warps of a program with `items` query items: about 16 items per thread."""
    return min(8, triton.next_power_of_2(max(1, items // 512)))


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
    """See the reference. One program per token and group."""
    if frequencies is None and q_norm is None and k_norm is None:
        store_kv(k, v, key_cache, value_cache, slots, scales)
        return q if keep is None else q[keep]
    (tokens, groups, heads, width), kept = q.shape, len(q) if keep is None else len(keep)
    out = torch.empty(kept, groups, heads, width, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    half = 0 if frequencies is None else len(frequencies)
    _place_kernel[(max(tokens, kept), groups)](
        strided(with_rows(q)),
        strided(with_rows(k)),
        strided(with_rows(v)),
        (key_cache, value_cache),
        slots.contiguous(),
        positions.contiguous(),
        frequencies,
        inverses(scales, key_cache),
        (q_norm, k_norm),
        None if keep is None else keep.contiguous(),
        out,
        tokens,
        kept,
        eps,
        float(factor),
        HEADS=heads,
        WIDTH=width,
        VALUE_WIDTH=v.shape[-1],
        HALF=half,
        ZERO_CENTERED=zero_centered,
        KEY_SLOT=slot_stride(key_cache),
        VALUE_SLOT=slot_stride(value_cache),
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_W=triton.next_power_of_2(max(1, half)),
        BLOCK_REST=triton.next_power_of_2(max(1, width - 2 * half)),
        BLOCK_V=triton.next_power_of_2(v.shape[-1]),
        num_warps=warps(heads * width),
    )
    return out
