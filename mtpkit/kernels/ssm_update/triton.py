"""Mamba2's recurrence over the few tokens of a decode step, in Triton; `ssm_replay_update` is in
`replay.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import SMALLEST_DOT, busy_programs, padded, strided
from mtpkit.kernels.rounding.reference import GROUP, Noise
from mtpkit.kernels.rounding.tile import narrowed, packed
from mtpkit.kernels.ssm_update.replay import ssm_replay_update, step_size

__all__ = ["ssm_replay_update", "ssm_snapshot_update"]


@triton.jit
def _snapshot_kernel(
    state_ptr,
    slots_ptr,
    committed_ptr,
    x_in,
    dt_in,
    B_in,
    C_in,
    parameters,
    parents_ptr,
    noise,
    y_ptr,
    tokens,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute BLOCK_P channels of one head of one row per program, token by token."""
    x_ptr, x_row, x_token, x_head = x_in
    dt_ptr, dt_row, dt_token = dt_in
    B_ptr, B_row, B_token, B_group = B_in
    C_ptr, C_row, C_token, C_group = C_in
    A_log_ptr, D_ptr, bias_ptr, low, high = parameters
    part = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    group = head // (HEADS // GROUPS)
    p = part * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    in_p = p < WIDTH
    in_n = n < STATE
    y_ptrs = y_ptr + row * tokens * (HEADS * WIDTH) + head * WIDTH + p
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        for t in range(tokens):
            tl.store(
                y_ptrs + t * (HEADS * WIDTH), tl.zeros([BLOCK_P], y_ptr.dtype.element_ty), mask=in_p
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
    A = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    D = tl.load(D_ptr + head).to(tl.float32)
    bias = tl.load(bias_ptr + head).to(tl.float32)
    for t in range(tokens):
        if parents_ptr is not None:
            parent = tl.load(parents_ptr + row * tokens + t)
            if parent != t - 1:
                tl.debug_barrier()  # another thread may have written what this one reads
                state = tl.load(state_ptrs + parent * entry, mask=state_mask, other=0.0).to(
                    tl.float32
                )
        step = step_size(tl.load(dt_ptr + row * dt_row + t * dt_token + head), bias, low, high)
        x = tl.load(x_ptr + row * x_row + t * x_token + head * x_head + p, mask=in_p, other=0.0).to(
            tl.float32
        )
        B = tl.load(
            B_ptr + row * B_row + t * B_token + group * B_group + n, mask=in_n, other=0.0
        ).to(tl.float32)
        C = tl.load(
            C_ptr + row * C_row + t * C_token + group * C_group + n, mask=in_n, other=0.0
        ).to(tl.float32)
        state = state * tl.exp(step * A) + (step * x)[:, None] * B[None, :]
        position = 0
        if noise is not None:
            position = tl.load(noise[3] + row * tokens + t)
        kind: tl.constexpr = state_ptr.dtype.element_ty
        stored = narrowed(state, kind, noise, row, position, head, p, 0, WIDTH, STATE)
        tl.store(state_ptrs + t * entry, stored, mask=state_mask)
        y = tl.sum(state * C[None, :], 1) + D * x
        tl.store(y_ptrs + t * (HEADS * WIDTH), y.to(y_ptr.dtype.element_ty), mask=in_p)
        if noise is not None:
            state = stored.to(tl.float32)


def ssm_snapshot_update(
    state: Tensor,
    slots: Tensor,
    committed: Tensor,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    parents: Tensor | None = None,
    noise: Noise | None = None,
) -> Tensor:
    """See the reference."""
    rows, tokens, heads, width = x.shape
    groups, state_dim = B.shape[2:]
    assert state.is_contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_p = _block_p(rows * heads, width)
    _snapshot_kernel[(triton.cdiv(width, block_p), heads, rows)](
        state,
        slots.contiguous(),
        committed.contiguous(),
        *map(strided, (x, dt, B, C)),
        (A_log, D, dt_bias, *dt_limit),
        None if parents is None else parents.contiguous(),
        packed(noise),
        y,
        tokens,
        HEADS=heads,
        WIDTH=width,
        GROUPS=groups,
        STATE=state_dim,
        ENTRIES=state.shape[1],
        BLOCK_P=block_p,
        BLOCK_N=max(1 if noise is None else GROUP, triton.next_power_of_2(state_dim)),
        num_warps=4,
    )
    return y


def _block_p(programs: int, width: int) -> int:
    """Channels per program, few enough to fill the GPU, where `programs` is the number of heads of
    all rows."""
    block = min(32, padded(width))
    while block > SMALLEST_DOT and programs * triton.cdiv(width, block) < busy_programs():
        block //= 2
    return block
