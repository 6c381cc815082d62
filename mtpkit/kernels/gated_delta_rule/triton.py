"""The gated delta rule in Triton: inputs of the recurrence and the snapshot update.

`delta_replay_update` is in `replay.py`, concatenated rows are in `scan.py`, their gradients in
`backward.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import SMALLEST_DOT, busy_programs, padded, strided, with_rows
from mtpkit.kernels.gated_delta_rule.backward import delta_rule
from mtpkit.kernels.gated_delta_rule.reference import EPSILON
from mtpkit.kernels.gated_delta_rule.replay import delta_replay_update, log_decay
from mtpkit.kernels.gated_delta_rule.scan import delta_varlen
from mtpkit.kernels.rounding.reference import GROUP, Noise
from mtpkit.kernels.rounding.tile import narrowed, packed

__all__ = [
    "delta_inputs",
    "delta_replay_update",
    "delta_rule",
    "delta_snapshot_update",
    "delta_varlen",
]

_NEVER = float("-inf")
"""Lower bound of log decays that are not summed: they need none."""


@triton.jit
def _unit_scale(x, axis: tl.constexpr, EPSILON):
    """The factor that scales the fp32 vectors along an axis to unit length; the axis is kept, with
    size 1."""
    return tl.rsqrt(tl.sum(x * x, axis, keep_dims=True) + EPSILON)


@triton.jit
def _inputs_kernel(
    q_in,
    k_in,
    a_in,
    b_in,
    parameters,
    out,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EPSILON: tl.constexpr,
    NEVER: tl.constexpr,
):
    """Compute queries and keys of one token and key head per program; the first head's program also
    computes g and beta."""
    q_ptr, q_token, q_head = q_in
    k_ptr, k_token, k_head = k_in
    a_ptr, a_token = a_in
    b_ptr, b_token = b_in
    A_log_ptr, bias_ptr = parameters
    q_out, k_out, g_out, beta_out = out
    group = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    h = tl.arange(0, BLOCK_H)
    in_n = n < STATE
    in_h = h < HEADS
    place = (token * GROUPS + group) * STATE + n
    q = tl.load(q_ptr + token * q_token + group * q_head + n, mask=in_n, other=0.0).to(tl.float32)
    q *= _unit_scale(q, 0, EPSILON) * (1.0 / tl.sqrt(STATE + 0.0))
    tl.store(q_out + place, q.to(q_out.dtype.element_ty), mask=in_n)
    k = tl.load(k_ptr + token * k_token + group * k_head + n, mask=in_n, other=0.0).to(tl.float32)
    tl.store(k_out + place, (k * _unit_scale(k, 0, EPSILON)).to(k_out.dtype.element_ty), mask=in_n)
    if group == 0:
        A_log = tl.load(A_log_ptr + h, mask=in_h, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + h, mask=in_h, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + token * a_token + h, mask=in_h, other=0.0)
        tl.store(g_out + token * HEADS + h, log_decay(a, A_log, bias, NEVER), mask=in_h)
        b = tl.load(b_ptr + token * b_token + h, mask=in_h, other=0.0).to(tl.float32)
        tl.store(beta_out + token * HEADS + h, tl.sigmoid(b), mask=in_h)


def delta_inputs(
    q: Tensor, k: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the reference. One launch."""
    shape = q.shape
    rates = a.shape
    q, k, a, b = (
        q.reshape(-1, *q.shape[-2:]),
        k.reshape(-1, *k.shape[-2:]),
        *(t.reshape(-1, rates[-1]) for t in (a, b)),
    )
    out = (
        *(torch.empty(q.shape, dtype=t.dtype, device=t.device) for t in (q, k)),
        *(torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2)),
    )
    tokens, groups, state_dim = q.shape
    _inputs_kernel[(tokens, groups)](
        *(strided(with_rows(t)) for t in (q, k, a, b)),
        (A_log, dt_bias),
        out,
        HEADS=rates[-1],
        GROUPS=groups,
        STATE=state_dim,
        BLOCK_H=triton.next_power_of_2(rates[-1]),
        BLOCK_N=triton.next_power_of_2(state_dim),
        EPSILON=EPSILON,
        NEVER=_NEVER,
        num_warps=1,
    )
    return out[0].view(shape), out[1].view(shape), out[2].view(rates), out[3].view(rates)


@triton.jit
def _snapshot_kernel(
    state_ptr,
    slots_ptr,
    committed_ptr,
    q_in,
    k_in,
    v_in,
    a_in,
    b_in,
    parameters,
    parents_ptr,
    noise,
    out_ptr,
    tokens,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EPSILON: tl.constexpr,
    NEVER: tl.constexpr,
):
    """Compute BLOCK_P channels of one value head of one row per program, token by token."""
    q_ptr, q_row, q_token, q_head = q_in
    k_ptr, k_row, k_token, k_head = k_in
    v_ptr, v_row, v_token, v_head = v_in
    a_ptr, a_row, a_token = a_in
    b_ptr, b_row, b_token = b_in
    A_log_ptr, bias_ptr = parameters
    part = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    group = head // (HEADS // GROUPS)
    p = part * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    in_p = p < WIDTH
    in_n = n < STATE
    out_ptrs = out_ptr + row * tokens * (HEADS * WIDTH) + head * WIDTH + p
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        for t in range(tokens):
            tl.store(
                out_ptrs + t * (HEADS * WIDTH),
                tl.zeros([BLOCK_P], out_ptr.dtype.element_ty),
                mask=in_p,
            )
        return
    entry: tl.constexpr = HEADS * WIDTH * STATE
    state_ptrs = (
        state_ptr
        + slot * ENTRIES * entry
        + head * (WIDTH * STATE)
        + p[:, None] * STATE
        + n[None, :]
    )
    state_mask = in_p[:, None] & in_n[None, :]
    state = tl.load(
        state_ptrs + tl.load(committed_ptr + row) * entry, mask=state_mask, other=0.0
    ).to(tl.float32)
    A_log = tl.load(A_log_ptr + head).to(tl.float32)
    bias = tl.load(bias_ptr + head).to(tl.float32)
    for t in range(tokens):
        if parents_ptr is not None:
            parent = tl.load(parents_ptr + row * tokens + t)
            if parent != t - 1:
                tl.debug_barrier()  # another thread may have written what this thread reads
                state = tl.load(state_ptrs + parent * entry, mask=state_mask, other=0.0).to(
                    tl.float32
                )
        q = tl.load(
            q_ptr + row * q_row + t * q_token + group * q_head + n, mask=in_n, other=0.0
        ).to(tl.float32)
        k = tl.load(
            k_ptr + row * k_row + t * k_token + group * k_head + n, mask=in_n, other=0.0
        ).to(tl.float32)
        # Rounded as in the other ways to compute the layer.
        q *= _unit_scale(q, 0, EPSILON) * (1.0 / tl.sqrt(STATE + 0.0))
        q = q.to(q_ptr.dtype.element_ty).to(tl.float32)
        k = (k * _unit_scale(k, 0, EPSILON)).to(k_ptr.dtype.element_ty).to(tl.float32)
        v = tl.load(v_ptr + row * v_row + t * v_token + head * v_head + p, mask=in_p, other=0.0).to(
            tl.float32
        )
        g = log_decay(tl.load(a_ptr + row * a_row + t * a_token + head), A_log, bias, NEVER)
        beta = tl.sigmoid(tl.load(b_ptr + row * b_row + t * b_token + head).to(tl.float32))
        state *= tl.exp(g)
        state += (beta * (v - tl.sum(state * k[None, :], 1)))[:, None] * k[None, :]
        position = 0
        if noise is not None:
            position = tl.load(noise[3] + row * tokens + t)
        kind: tl.constexpr = state_ptr.dtype.element_ty
        stored = narrowed(state, kind, noise, row, position, head, p, 0, WIDTH, STATE)
        tl.store(state_ptrs + t * entry, stored, mask=state_mask)
        out = tl.sum(state * q[None, :], 1)
        tl.store(out_ptrs + t * (HEADS * WIDTH), out.to(out_ptr.dtype.element_ty), mask=in_p)
        if noise is not None:
            state = stored.to(tl.float32)


def delta_snapshot_update(
    state: Tensor,
    slots: Tensor,
    committed: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    parents: Tensor | None = None,
    noise: Noise | None = None,
) -> Tensor:
    """See the reference."""
    (rows, tokens, heads, width), (groups, state_dim) = v.shape, k.shape[2:]
    assert state.is_contiguous()
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    block_p = min(32, padded(width))
    while block_p > SMALLEST_DOT and rows * heads * triton.cdiv(width, block_p) < busy_programs():
        block_p //= 2
    _snapshot_kernel[(triton.cdiv(width, block_p), heads, rows)](
        state,
        slots.contiguous(),
        committed.contiguous(),
        *map(strided, (q, k, v, a, b)),
        (A_log, dt_bias),
        None if parents is None else parents.contiguous(),
        packed(noise),
        out,
        tokens,
        HEADS=heads,
        WIDTH=width,
        GROUPS=groups,
        STATE=state_dim,
        ENTRIES=state.shape[1],
        BLOCK_P=block_p,
        BLOCK_N=max(1 if noise is None else GROUP, triton.next_power_of_2(state_dim)),
        EPSILON=EPSILON,
        NEVER=_NEVER,
        num_warps=4,
    )
    return out
