# mypy: disable-error-code="no-untyped-def"
"""The first kernel of `ssm_replay_update`, see `replay.py`: step sizes, B and C as the weights of inputs in outputs."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from mtpkit.kernels.ssm_update.tile import dot, largest_divisor, places, step_size

_FORGOTTEN = -100.0
"""A log decay beyond which nothing in fp32 is left."""
_HEADS = 16
"""Heads a program takes, where a group has so many."""


@triton.jit
def _store_new_weights(
    weights,
    dt_ptr,
    dt_token,
    head,
    now: tl.constexpr,
    step,
    scores,
    A,
    D,
    bias,
    low,
    high,
    TOKENS: tl.constexpr,
):
    """The weights [heads, T] of the input of new token `now` in all outputs, where `weights` [heads] points.

    step [heads] is its step size, scores [T, T] are B of one token times C of another.
    """
    t = tl.arange(0, scores.shape[0])
    to_later = tl.sum(tl.where(t[:, None] == now, scores, 0.0), 0)  # [T]
    between = tl.zeros(step.shape, tl.float32)  # its own decay is done
    for later in tl.static_range(TOKENS):
        new = tl.zeros(step.shape, tl.float32)
        if later >= now:
            if later > now:
                between += step_size(tl.load(dt_ptr + later * dt_token + head), bias, low, high) * A
            new = tl.sum(tl.where(t == later, to_later, 0.0), 0) * tl.exp(between) * step
            new += D if later == now else 0.0
        tl.store(weights + later, new)


@triton.jit
def _weights_kernel(
    ring_B_ptr,
    ring_dt_ptr,
    slots_ptr,
    contexts_ptr,
    lens_ptr,
    dt_ptr,
    A_log_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    bias_ptr,
    weights_ptr,
    folds_ptr,
    low,
    high,
    dt_row,
    dt_token,
    B_row,
    B_token,
    B_group,
    C_row,
    C_token,
    C_group,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    LENGTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NARROW: tl.constexpr,
    FORGOTTEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The weights of BLOCK_H heads of one row and group, and the new entries of the rings of B and dt."""
    if EARLY:
        gdc_launch_dependents()
    first, row = tl.program_id(0) * BLOCK_H, tl.program_id(1).to(tl.int64)
    group = first // (HEADS // GROUPS)
    head = first + tl.arange(0, BLOCK_H)
    n, e, t = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_T)
    in_n, is_new = n < STATE, t < TOKENS
    slot, count, old_place, new_place = places(slots_ptr, contexts_ptr, lens_ptr, row, e, t, LENGTH)
    if slot < 0:
        return
    is_old = e < count

    old_step_ptrs = ring_dt_ptr + old_place[:, None] * HEADS + head[None, :]
    old_step = tl.load(old_step_ptrs, mask=is_old[:, None], other=0.0)  # [E, H]
    B_mask = is_new[:, None] & in_n[None, :]
    B = tl.load(B_ptr + row * B_row + t[:, None] * B_token + group * B_group + n[None, :], mask=B_mask, other=0.0)
    C_ptrs = C_ptr + row * C_row + t[None, :] * C_token + group * C_group + n[:, None]
    C = tl.load(C_ptrs, mask=in_n[:, None] & is_new[None, :], other=0.0)  # [N, T]
    old_B_ptrs = ring_B_ptr + old_place[:, None] * (GROUPS * STATE) + group * STATE + n[None, :]
    old_B = tl.load(old_B_ptrs, mask=is_old[:, None] & in_n[None, :], other=0.0)  # [E, N]
    if first % (HEADS // GROUPS) == 0:
        new_B_ptrs = ring_B_ptr + new_place[:, None] * (GROUPS * STATE) + group * STATE + n[None, :]
        tl.store(new_B_ptrs, B.to(ring_B_ptr.dtype.element_ty), mask=B_mask)
    scores, old_scores = dot(B, C, NARROW), dot(old_B, C, NARROW)  # [T, T], [E, T]

    # Log decays are sums of terms of one sign, not differences of sums: those lose the small decays that follow a token
    # which forgets nearly everything. The one difference takes away a single term, which is bounded for it.
    A = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    bias, D = tl.load(bias_ptr + head).to(tl.float32), tl.load(D_ptr + head).to(tl.float32)
    old_log = tl.maximum(old_step * A[None, :], FORGOTTEN)
    to_last = tl.cumsum(old_log, 0, reverse=True) - old_log  # [E, H]
    whole = tl.sum(old_log, 0)
    folds = folds_ptr + (row * HEADS + head) * (BLOCK_E + 1)
    tl.store(folds[None, :] + e[:, None], tl.exp(to_last) * old_step)
    tl.store(folds + BLOCK_E, tl.exp(whole))

    weights = weights_ptr + (row * HEADS + head) * ((BLOCK_E + TOKENS + 1) * TOKENS)
    dt_ptr += row * dt_row
    since = tl.zeros([BLOCK_H], tl.float32)
    for now in tl.static_range(TOKENS):
        step = step_size(tl.load(dt_ptr + now * dt_token + head), bias, low, high)
        tl.store(ring_dt_ptr + tl.sum(tl.where(t == now, new_place, 0), 0) * HEADS + head, step)
        since += step * A
        column = tl.sum(tl.where(t[None, :] == now, old_scores, 0.0), 1)  # [E]
        old = column[:, None] * tl.exp(to_last + since[None, :]) * old_step
        tl.store(weights[None, :] + e[:, None] * TOKENS + now, old)
        tl.store(weights + (BLOCK_E + TOKENS) * TOKENS + now, tl.exp(whole + since))
        new_weights = weights + (BLOCK_E + now) * TOKENS
        _store_new_weights(new_weights, dt_ptr, dt_token, head, now, step, scores, A, D, bias, low, high, TOKENS)


def input_weights(
    ring_B: Tensor,
    ring_dt: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    early: bool,
    **sizes: Any,
) -> tuple[Tensor, Tensor]:
    """Fills the rings of B and dt, and reckons how inputs count in outputs and in a folded state.

    Args:
        where: slots, context_lens and ring_lens; these and the others as for `ssm_replay_update`.
        early: the next kernel may start before this one has ended.
        sizes: of the problem and its blocks, for the kernel.

    Returns:
        weights [R, h, E + T + 1, T]: of old entries, of new ones, and the decay of the state up to each token.
        folds [R, h, E + 1]: of old entries in the folded state, and its own decay. Both fp32.
    """
    (rows, tokens, heads), block_e = dt.shape, sizes["BLOCK_E"]
    weights = torch.empty(rows, heads, block_e + tokens + 1, tokens, dtype=torch.float32, device=dt.device)
    folds = torch.empty(rows, heads, block_e + 1, dtype=torch.float32, device=dt.device)
    block_h = largest_divisor(heads // B.shape[2], _HEADS)
    _weights_kernel[(heads // block_h, rows)](
        ring_B,
        ring_dt,
        *where,
        dt,
        A_log,
        B,
        C,
        D,
        dt_bias,
        weights,
        folds,
        *dt_limit,
        *dt.stride()[:2],
        *B.stride()[:3],
        *C.stride()[:3],
        BLOCK_H=block_h,
        FORGOTTEN=_FORGOTTEN,
        EARLY=early,
        **sizes,
        num_warps=1,  # it is all waiting for small sums, which one warp need not share
    )
    return weights, folds
