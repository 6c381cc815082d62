"""`ssm_replay_update` in Triton: the state is streamed once, and everything else is small.

y is the state times C, plus old and new inputs, each times a matrix. These matrices are products of
B and C, which the heads of a group share, times decays. A program first computes the products and
the decays of several heads of one row and group, then loops over the heads with several states in
flight. Per state it computes three small products on tensor cores, which multiply an fp32 operand
as the sum of two bf16 numbers.

The state is written in place without a barrier, since each element is computed from its own old
value. Old and new ring entries never share a place, so that the programs of a row may run in any
order.

Sizes: E old entries of the ring, T new tokens, O outputs (one per token), H heads per program, P
channels per head, N state width. Entries and tokens that do not exist have a step size of zero.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import (
    NARROW,
    Early,
    at_least,
    at_most,
    load,
    multiprocessors,
    padded,
    strided,
    wait_for_previous,
)
from mtpkit.kernels.ring import ring_capacity
from mtpkit.kernels.rounding.reference import Noise
from mtpkit.kernels.rounding.tile import narrowed, packed

_FORGOTTEN = -100.0
"""Log decay at which nothing is left in fp32."""
_RESIDENT = 4
"""Programs per multiprocessor that run at once."""
_SMALLEST_OUTPUT = 8
"""Smallest number of columns of a product of tiles."""


@triton.jit
def step_size(raw, bias, low, high):
    """Compute clamp(softplus(raw + bias)) in fp32. The logarithm is the series of 2 artanh(s), s =
    u / (2 + u) <= 1/3, since the device's approximate logarithm loses small step sizes."""
    v = raw.to(tl.float32) + bias
    u = tl.exp(-tl.abs(v))
    s = u / (2.0 + u)
    q = s * s
    series = 1 / 11 + q * (1 / 13 + q * (1 / 15))
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * series))))
    return at_most(at_least(tl.maximum(v, 0.0) + 2.0 * s * series, low), high)


@triton.jit
def halves(a, NARROW):
    """Split fp32 numbers into sums of two bf16 numbers, exact to 2^-16. The first is truncated,
    which is cheaper than rounding."""
    high = (a.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16).to(NARROW), (a - high).to(tl.bfloat16).to(NARROW)


@triton.jit
def dot(a, b, NARROW):
    """Compute a @ b in fp32. With NARROW, one operand is bf16 or was converted from it; the other
    may be fp32 or fp16."""
    if NARROW is None:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif a.dtype == tl.float32 or a.dtype == tl.float16:
        high, rest = halves(a.to(tl.float32), NARROW)
        return tl.dot(rest, b.to(NARROW), tl.dot(high, b.to(NARROW)))
    elif b.dtype == tl.float32 or b.dtype == tl.float16:
        high, rest = halves(b.to(tl.float32), NARROW)
        return tl.dot(a.to(NARROW), rest, tl.dot(a.to(NARROW), high))
    else:
        return tl.dot(a.to(NARROW), b.to(NARROW))


@triton.jit
def places(rows, row, e, t, LENGTH):
    """Slot of a row, its number of committed entries, and the ring indices of its old entries and
    new tokens."""
    slots_ptr, contexts_ptr, lens_ptr = rows
    slot = tl.load(slots_ptr + row)
    context = tl.load(contexts_ptr + row)
    count = tl.load(lens_ptr + row)
    # Padding rows may have fewer positions than entries; the places must still not be negative.
    old = slot * LENGTH + (((context - count) % LENGTH).to(tl.int32) + LENGTH + e) % LENGTH
    new = slot * LENGTH + ((context % LENGTH).to(tl.int32) + t) % LENGTH
    return slot, count, old, new


@triton.jit
def load_masks(ancestors_ptr, row, t, o, TOKENS):
    """Load [T, O] bool, whether the tokens o [O] of a tree see the tokens t [T]; from TOKENS on,
    they see none."""
    masks = tl.load(ancestors_ptr + row * TOKENS + o, mask=o < TOKENS, other=0)
    return ((masks[None, :] >> t[:, None].to(tl.int64)) & 1) != 0


@triton.jit
def _along_paths(values, seen):
    """Sum values [T, H] over the tokens that each of O tokens sees, as seen [T, O] tells: [O,
    H]."""
    return tl.sum(tl.where(seen[:, :, None], values[:, None, :], 0.0), 0)


@triton.jit
def _of_head(tile, h, head):
    """Column `head` of the tile [X, H], where h is arange(H)."""
    return tl.sum(tl.where(h[None, :] == head, tile, 0.0), 1)


@triton.jit
def _new_steps(dt_ptrs, t, A, bias, low, high, TOKENS, FORGOTTEN):
    """Step sizes of the tokens t [X] for the heads [H] at `dt_ptrs`, and cumulative log decays,
    both [X, H].

    The log decay between two tokens is a difference of two of these sums. Terms are bounded, so
    that a token that forgets nearly everything does not swamp the small decays of later tokens.
    """
    is_new = (t < TOKENS)[:, None]
    step = step_size(tl.load(dt_ptrs, mask=is_new, other=0.0), bias[None, :], low, high)
    step = tl.where(is_new, step, 0.0)
    return step, tl.cumsum(at_least(step * A[None, :], FORGOTTEN), 0)


@Early
@triton.jit
def _replay_kernel(
    state_ptr,
    rings,
    rows,
    x_in,
    dt_in,
    B_in,
    C_in,
    parameters,
    ancestors_ptr,
    noise,
    y_ptr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    LENGTH: tl.constexpr,
    CAPACITY: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    NARROW: tl.constexpr,
    FORGOTTEN: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute BLOCK_P channels of each of BLOCK_H heads of one row and group per program, with
    STAGES states in flight.

    WHOLE: every block is full. The kernel is longer than 70 lines because its parts share nearly
    all tiles, so that functions for them would need some thirty arguments each.
    """
    wait_for_previous(EARLY)
    ring_x_ptr, ring_B_ptr, ring_dt_ptr = rings
    x_ptr, x_row, x_token, x_head = x_in
    dt_ptr, dt_row, dt_token = dt_in
    B_ptr, B_row, B_token, B_group = B_in
    C_ptr, C_row, C_token, C_group = C_in
    A_log_ptr, D_ptr, bias_ptr, low, high = parameters
    part = tl.program_id(0)
    first = tl.program_id(1) * BLOCK_H
    row = tl.program_id(2).to(tl.int64)
    group = first // (HEADS // GROUPS)
    p = part * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_E)
    t = tl.arange(0, BLOCK_T)
    o = tl.arange(0, BLOCK_O)
    in_p = p < WIDTH
    in_n = n < STATE
    is_new = t < TOKENS
    is_out = o < TOKENS
    x_mask = in_p[:, None] & is_new[None, :]
    state_mask = in_p[:, None] & in_n[None, :]
    y_ptrs = y_ptr + (row * TOKENS + o[None, :]) * (HEADS * WIDTH) + first * WIDTH + p[:, None]
    y_mask = in_p[:, None] & is_out[None, :]
    slot, count, old_place, new_place = places(rows, row, e, t, LENGTH)
    if slot < 0:
        for head in range(BLOCK_H):
            tl.store(
                y_ptrs + head * WIDTH,
                tl.zeros([BLOCK_P, BLOCK_O], y_ptr.dtype.element_ty),
                mask=y_mask,
            )
        return
    state_ptr += (slot * HEADS + first) * (WIDTH * STATE)
    is_old = e < count

    # The decays of all heads.
    h = tl.arange(0, max(2, BLOCK_H))  # on the GPU, a running sum down a single column is wrong
    heads = first + h if BLOCK_H > 1 else first + h * 0
    A = -tl.exp(tl.load(A_log_ptr + heads).to(tl.float32))
    bias = tl.load(bias_ptr + heads).to(tl.float32)
    dt_ptrs = dt_ptr + row * dt_row + heads[None, :]
    step, since = _new_steps(
        dt_ptrs + t[:, None] * dt_token, t, A, bias, low, high, TOKENS, FORGOTTEN
    )
    if ancestors_ptr is None:
        _, out_since = _new_steps(
            dt_ptrs + o[:, None] * dt_token, o, A, bias, low, high, TOKENS, FORGOTTEN
        )
    else:
        logs = at_least(step * A[None, :], FORGOTTEN)
        since = _along_paths(logs, load_masks(ancestors_ptr, row, t, t, TOKENS))
        out_since = _along_paths(logs, load_masks(ancestors_ptr, row, t, o, TOKENS))
    old_step_ptrs = ring_dt_ptr + old_place[:, None] * HEADS + heads[None, :]
    old_step = tl.load(old_step_ptrs, mask=is_old[:, None], other=0.0)  # [E, H]
    if part == 0:
        tl.store(
            ring_dt_ptr + new_place[:, None] * HEADS + heads[None, :], step, mask=is_new[:, None]
        )
    old_log = at_least(old_step * A[None, :], FORGOTTEN)
    # [E, H], [H]
    to_last = tl.cumsum(old_log, 0, reverse=True) - old_log
    whole = tl.sum(old_log, 0)

    # The products that the heads share.
    B_mask = is_new[:, None] & in_n[None, :]
    B = tl.load(
        B_ptr + row * B_row + t[:, None] * B_token + group * B_group + n[None, :],
        mask=B_mask,
        other=0.0,
    )
    C_ptrs = C_ptr + row * C_row + o[None, :] * C_token + group * C_group + n[:, None]
    C = tl.load(C_ptrs, mask=in_n[:, None] & is_out[None, :], other=0.0)  # [N, O]
    old_B_ptrs = ring_B_ptr + old_place[:, None] * (GROUPS * STATE) + group * STATE + n[None, :]
    old_B = tl.load(old_B_ptrs, mask=is_old[:, None] & in_n[None, :], other=0.0)  # [E, N]
    # All parts of the heads of a group have the same B; one program stores it.
    if part == 0 and first % (HEADS // GROUPS) == 0:
        new_B_ptrs = ring_B_ptr + new_place[:, None] * (GROUPS * STATE) + group * STATE + n[None, :]
        tl.store(new_B_ptrs, B.to(ring_B_ptr.dtype.element_ty), mask=B_mask)
    # [T, T], [E, T]
    scores = dot(B, C, NARROW)
    old_scores = dot(old_B, C, NARROW)
    later = t[:, None] <= o[None, :]
    if ancestors_ptr is not None:
        later = load_masks(ancestors_ptr, row, t, o, TOKENS)

    state_ptrs = state_ptr + p[:, None] * STATE + n[None, :]
    x_ptrs = x_ptr + row * x_row + t[None, :] * x_token + first * x_head + p[:, None]
    old_x_ptrs = ring_x_ptr + old_place[None, :] * (HEADS * WIDTH) + first * WIDTH + p[:, None]
    new_x_ptrs = ring_x_ptr + new_place[None, :] * (HEADS * WIDTH) + first * WIDTH + p[:, None]
    old_x_mask = in_p[:, None] & is_old[None, :]
    for head in tl.range(BLOCK_H, num_stages=STAGES):
        state = load(state_ptrs + head * (WIDTH * STATE), state_mask, WHOLE)
        x = tl.load(x_ptrs + head * x_head, mask=x_mask, other=0.0)  # [P, T]
        old_x = tl.load(old_x_ptrs + head * WIDTH, mask=old_x_mask, other=0.0)  # [P, E]
        tl.store(new_x_ptrs + head * WIDTH, x.to(ring_x_ptr.dtype.element_ty), mask=x_mask)
        # The zero weights of tokens that do not see an x would not keep its NaN from them: it
        # spoils the other weights in its place.
        spoilt = tl.sum(x.to(tl.float32) * 0.0, 0)  # [T]
        x = tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)
        # [T]
        steps = _of_head(step, h, head)
        sums = _of_head(since, h, head)
        out_sums = _of_head(out_since, h, head)  # [O]
        # [E]
        old_steps = _of_head(old_step, h, head)
        to_lasts = _of_head(to_last, h, head)
        all_old = tl.sum(tl.where(h == head, whole, 0.0), 0)
        D = tl.load(D_ptr + first + head).to(tl.float32)
        old_weights = (
            old_scores * tl.exp(to_lasts[:, None] + out_sums[None, :]) * old_steps[:, None]
        )
        between = tl.exp(tl.minimum(out_sums[None, :] - sums[:, None], 0.0))
        new_weights = tl.where(later, scores * between * steps[:, None] + spoilt[:, None], 0.0)
        new_weights += tl.where(t[:, None] == o[None, :], D, 0.0)
        y = dot(state, C, NARROW) * tl.exp(all_old + out_sums)[None, :]
        y += dot(old_x, old_weights, NARROW)
        y += dot(x, new_weights, NARROW)
        tl.store(y_ptrs + head * WIDTH, y.to(y_ptr.dtype.element_ty), mask=y_mask)
        if count + TOKENS > CAPACITY:
            added = dot(
                old_x.to(tl.float32) * (tl.exp(to_lasts) * old_steps)[None, :], old_B, NARROW
            )
            # Loading the state again from the cache is cheaper than keeping it in registers.
            head_ptrs = state_ptrs + head * (WIDTH * STATE)
            folded = load(head_ptrs, state_mask, WHOLE).to(tl.float32) * tl.exp(all_old) + added
            kind: tl.constexpr = state_ptr.dtype.element_ty
            last = tl.load(rows[1] + row) - 1
            stored = narrowed(folded, kind, noise, row, last, first + head, p, 0, WIDTH, STATE)
            tl.store(head_ptrs, stored, mask=state_mask)


def ssm_replay_update(
    state: Tensor,
    ring_x: Tensor,
    ring_B: Tensor,
    ring_dt: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    ring_lens: Tensor,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    ancestors: Tensor | None = None,
    noise: Noise | None = None,
    *,
    block_p: int = 32,
    block_h: int | None = None,
    num_warps: int = 2,
    num_stages: int = 2,
    maxnreg: int | None = None,
) -> Tensor:
    """See the reference. A program computes `block_p` channels of `block_h` heads, with
    `num_stages` heads in flight.

    If `block_h` is None, `block_h` and `maxnreg` are set to the values that are fastest on an H200.
    """
    (rows, tokens, heads, width), (groups, state_dim) = x.shape, B.shape[2:]
    capacity = ring_capacity(length := ring_x.shape[1])
    assert tokens <= length - capacity, f"{tokens} new tokens in a ring of {length}"
    assert all(buffer.is_contiguous() for buffer in (state, ring_x, ring_B, ring_dt))
    block_n = padded(state_dim)
    block_p = min(block_p, padded(width))
    if block_h is None:
        block_h, maxnreg = _heads_and_registers(rows * heads * triton.cdiv(width, block_p))
    per_group = heads // groups
    # a power of two that divides the heads of a group
    block_h = min(per_group & -per_group, block_h)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _replay_kernel[(triton.cdiv(width, block_p), heads // block_h, rows)](
        state,
        (ring_x, ring_B, ring_dt),
        (slots.contiguous(), context_lens.contiguous(), ring_lens.contiguous()),
        *map(strided, (x, dt, B, C)),
        (A_log, D, dt_bias, *dt_limit),
        None if ancestors is None else ancestors.contiguous(),
        packed(noise),
        y,
        HEADS=heads,
        WIDTH=width,
        GROUPS=groups,
        STATE=state_dim,
        LENGTH=length,
        CAPACITY=capacity,
        TOKENS=tokens,
        BLOCK_H=block_h,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        BLOCK_E=padded(capacity),
        BLOCK_T=padded(tokens),
        BLOCK_O=max(_SMALLEST_OUTPUT, triton.next_power_of_2(tokens)),
        NARROW=NARROW if x.dtype == B.dtype == C.dtype == torch.bfloat16 else None,
        FORGOTTEN=_FORGOTTEN,
        WHOLE=width % block_p == 0 and state_dim == block_n,
        STAGES=num_stages if block_h > 1 else 1,
        num_warps=num_warps,
        maxnreg=maxnreg,
    )
    return y


def _heads_and_registers(tiles: int) -> tuple[int, int | None]:
    """Heads per program and the register limit per thread, for `tiles` states or parts of a state.

    If there are few tiles, they are spread over as many programs as run at once. With many tiles,
    more resident programs are worth more than registers.
    """
    wave = _RESIDENT * multiprocessors()
    if tiles > 16 * wave:
        return 4, 168
    return min(8, triton.next_power_of_2(triton.cdiv(tiles, wave))), None
