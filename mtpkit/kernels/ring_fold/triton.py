"""`fold_ring` in Triton: each program streams BLOCK_P rows of one head's state once."""

import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import at_least, padded
from mtpkit.kernels.ring import ring_capacity
from mtpkit.kernels.rounding.reference import Noise
from mtpkit.kernels.rounding.tile import narrowed, packed

_FORGOTTEN = -100.0
"""Log decay at which nothing is left in fp32."""
_BLOCK_P = 16


@triton.jit
def _fold_kernel(
    state_ptr,
    values_ptr,
    keys_ptr,
    rates_ptr,
    slots_ptr,
    contexts_ptr,
    lens_ptr,
    A_log_ptr,
    noise,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    LENGTH: tl.constexpr,
    CAPACITY: tl.constexpr,
    STEPS: tl.constexpr,
    FORGOTTEN: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Advance BLOCK_P rows of the state of one head of one row per program. STEPS: the rates are
    step sizes."""
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    context = tl.load(contexts_ptr + row)
    count = tl.load(lens_ptr + row)
    p = part * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_E)
    in_p = p < WIDTH
    in_n = n < STATE
    first = context - count + LENGTH
    is_old = (e < count) & (e < CAPACITY)
    rates = tl.load(
        rates_ptr + (slot * LENGTH + (first + e) % LENGTH) * HEADS + head, mask=is_old, other=0.0
    )
    logs = rates.to(tl.float32)
    if STEPS:
        logs = logs * -tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    logs = at_least(logs, FORGOTTEN)
    # An entry decays by the entries after it, not by its own log decay.
    to_end = tl.cumsum(logs, 0, reverse=True) - logs
    weights = tl.exp(to_end)
    if STEPS:
        weights = weights * rates.to(tl.float32)
    mask = in_p[:, None] & in_n[None, :]
    state_ptrs = (
        state_ptr + (slot * HEADS + head) * (WIDTH * STATE) + p[:, None] * STATE + n[None, :]
    )
    state = tl.load(state_ptrs, mask=mask, other=0.0).to(tl.float32) * tl.exp(tl.sum(logs, 0))
    group = head // (HEADS // GROUPS)
    for entry in range(CAPACITY):
        if entry < count:
            place = slot * LENGTH + (first + entry) % LENGTH
            weight = tl.sum(tl.where(e == entry, weights, 0.0), 0)
            value = tl.load(
                values_ptr + (place * HEADS + head) * WIDTH + p, mask=in_p, other=0.0
            ).to(tl.float32)
            key = tl.load(keys_ptr + (place * GROUPS + group) * STATE + n, mask=in_n, other=0.0).to(
                tl.float32
            )
            state += (value * weight)[:, None] * key[None, :]
    kind: tl.constexpr = state_ptr.dtype.element_ty
    stored = narrowed(state, kind, noise, row, context - 1, head, p, 0, WIDTH, STATE)
    tl.store(state_ptrs, stored, mask=mask)


def fold_ring(
    state: Tensor,
    ring_values: Tensor,
    ring_keys: Tensor,
    ring_rates: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    ring_lens: Tensor,
    A_log: Tensor | None = None,
    noise: Noise | None = None,
) -> None:
    """See the reference."""
    (_, heads, width, state_dim), (length, groups) = state.shape, ring_keys.shape[1:3]
    assert all(buffer.is_contiguous() for buffer in (state, ring_values, ring_keys, ring_rates))
    block_p = min(_BLOCK_P, triton.next_power_of_2(width))
    capacity = ring_capacity(length)
    _fold_kernel[(triton.cdiv(width, block_p), heads, len(slots))](
        state,
        ring_values,
        ring_keys,
        ring_rates,
        slots.contiguous(),
        context_lens.contiguous(),
        ring_lens.contiguous(),
        ring_rates if A_log is None else A_log,
        packed(noise),
        HEADS=heads,
        WIDTH=width,
        GROUPS=groups,
        STATE=state_dim,
        LENGTH=length,
        CAPACITY=capacity,
        STEPS=A_log is not None,
        FORGOTTEN=_FORGOTTEN,
        BLOCK_P=block_p,
        BLOCK_N=padded(state_dim),
        BLOCK_E=max(2, triton.next_power_of_2(capacity)),
        num_warps=4,
    )
