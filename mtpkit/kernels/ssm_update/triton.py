# mypy: disable-error-code="no-untyped-def"
"""Mamba2's recurrence over the few tokens of a decode step: the Triton twins.

Both kernels are bound by the bytes of the state. A program takes BLOCK_P of the p channels of one head of one row (or
of a few heads, one after another), reads their state once, and does all else in registers and on tensor cores, which
multiply the fp32 state by bf16 inputs as the sum of two bf16 numbers.

Although the state is written in place, threads need no barrier: what is written to an element is computed from what was
read there. The ring's old entries and its new ones never share a place, so that programs of a row need no order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.ssm_update.ring import ring_capacity

_PROGRAMS = 2 * 132
"""Programs that keep an H200's 132 multiprocessors busy with loads."""
_SMALLEST_DOT = 16
_FOUR_A_MULTIPROCESSOR = 128
"""Registers of a thread that let four programs of four warps run side by side and hide each other's waits."""
_NARROW = tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16
"""What tensor cores multiply. The interpreter would multiply the bits of bf16 numbers."""


@triton.jit
def _step_size(raw, bias, low, high):
    """clamp(softplus(raw + bias)) in fp32. The logarithm is the series of 2 artanh(s), s = u / (2 + u) <= 1/3: the
    device's approximate one loses the small step sizes."""
    v = raw.to(tl.float32) + bias
    u = tl.exp(-tl.abs(v))
    s = u / (2.0 + u)
    q = s * s
    series = 1 / 11 + q * (1 / 13 + q * (1 / 15))
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * series))))
    return tl.minimum(tl.maximum(tl.maximum(v, 0.0) + 2.0 * s * series, low), high)


@triton.jit
def _halves(a, NARROW: tl.constexpr):
    """fp32 numbers as the sum of two bf16 ones, to 2^-16. The first is cut off, not rounded: two instructions."""
    high = (a.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16).to(NARROW), (a - high).to(tl.bfloat16).to(NARROW)


@triton.jit
def _dot(a, b, NARROW: tl.constexpr):
    """a @ b in fp32. With NARROW one of them is bf16 or comes from it; the other may be fp32."""
    if NARROW is None:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif a.dtype == tl.float32:
        high, rest = _halves(a, NARROW)
        return tl.dot(rest, b.to(NARROW), tl.dot(high, b.to(NARROW)))
    elif b.dtype == tl.float32:
        high, rest = _halves(b, NARROW)
        return tl.dot(a.to(NARROW), rest, tl.dot(a.to(NARROW), high))
    else:
        return tl.dot(a.to(NARROW), b.to(NARROW))


@triton.jit
def _load(ptrs, mask, WHOLE: tl.constexpr):
    """Zero where `mask` is not; WHOLE: it is everywhere."""
    if WHOLE:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _replay_kernel(
    state_ptr,
    ring_x_ptr,
    ring_B_ptr,
    ring_dt_ptr,
    slots_ptr,
    contexts_ptr,
    lens_ptr,
    x_ptr,
    dt_ptr,
    A_log_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    bias_ptr,
    y_ptr,
    low,
    high,
    x_row,
    x_token,
    x_head,
    dt_row,
    dt_token,
    B_row,
    B_token,
    B_group,
    C_row,
    C_token,
    C_group,
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
    NARROW: tl.constexpr,
    RELOAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_P channels of each of BLOCK_H heads of one row and group. Sizes: P = BLOCK_P channels, N state, E old
    entries, T new tokens; entries and tokens that do not exist have a step size of zero."""
    part, first, row = tl.program_id(0), tl.program_id(1) * BLOCK_H, tl.program_id(2).to(tl.int64)
    group = first // (HEADS // GROUPS)
    p, n = part * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    e, t = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_T)
    WHOLE: tl.constexpr = (WIDTH % BLOCK_P == 0) & (STATE == BLOCK_N)
    in_p, in_n, is_new = (p < WIDTH) | WHOLE, (n < STATE) | WHOLE, t < TOKENS
    x_mask, B_mask, state_mask = in_p[:, None] & is_new, is_new[:, None] & in_n, in_p[:, None] & in_n
    y_ptrs = y_ptr + row * (TOKENS * HEADS * WIDTH) + t[None, :] * (HEADS * WIDTH) + p[:, None]
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        for head in range(first, first + BLOCK_H):
            tl.store(y_ptrs + head * WIDTH, tl.zeros([BLOCK_P, BLOCK_T], y_ptr.dtype.element_ty), mask=x_mask)
        return
    state_ptr += slot * (HEADS * WIDTH * STATE)
    ring_x_ptr += slot * (LENGTH * HEADS * WIDTH)
    ring_B_ptr += slot * (LENGTH * GROUPS * STATE)
    ring_dt_ptr += slot * (LENGTH * HEADS)
    x_ptr += row * x_row
    dt_ptr += row * dt_row
    context, count = tl.load(contexts_ptr + row).to(tl.int32), tl.load(lens_ptr + row).to(tl.int32)
    is_old = e < count
    # Null rows may have fewer positions than entries: a place is never negative.
    place, new_place = (context - count + e + LENGTH) % LENGTH, (context + t) % LENGTH

    B_ptrs = B_ptr + row * B_row + group * B_group + t[:, None] * B_token + n[None, :]
    B = tl.load(B_ptrs, mask=B_mask, other=0.0)  # [T, N]
    C_ptrs = C_ptr + row * C_row + group * C_group + t[None, :] * C_token + n[:, None]
    C = tl.load(C_ptrs, mask=in_n[:, None] & is_new, other=0.0)  # [N, T]
    old_B_ptrs = ring_B_ptr + group * STATE + place[:, None] * (GROUPS * STATE) + n[None, :]
    old_B = tl.load(old_B_ptrs, mask=is_old[:, None] & in_n, other=0.0)  # [E, N]
    if (part == 0) & (first % (HEADS // GROUPS) == 0):
        new_B_ptrs = ring_B_ptr + group * STATE + new_place[:, None] * (GROUPS * STATE) + n[None, :]
        tl.store(new_B_ptrs, B.to(ring_B_ptr.dtype.element_ty), mask=B_mask)
    scores, old_scores = _dot(B, C, NARROW), _dot(old_B, C, NARROW)  # [T, T], [E, T]

    for head in tl.range(first, first + BLOCK_H, num_stages=STAGES):
        state_ptrs = state_ptr + head * (WIDTH * STATE) + p[:, None] * STATE + n[None, :]
        state = _load(state_ptrs, state_mask, WHOLE)
        x_ptrs = x_ptr + head * x_head + t[None, :] * x_token + p[:, None]
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)  # [P, T]
        old_x_ptrs = ring_x_ptr + head * WIDTH + place[None, :] * (HEADS * WIDTH) + p[:, None]
        old_x = tl.load(old_x_ptrs, mask=in_p[:, None] & is_old, other=0.0)  # [P, E]
        raw = tl.load(dt_ptr + head + t * dt_token, mask=is_new, other=0.0)
        old_step = tl.load(ring_dt_ptr + head + place * HEADS, mask=is_old, other=0.0)
        step = tl.where(is_new, _step_size(raw, tl.load(bias_ptr + head).to(tl.float32), low, high), 0.0)

        # Log decays: of each old entry up to the last one, and of the last one up to each new token. Sums of terms of
        # one sign; but between two new tokens it is a difference, in fp64 because after a token that forgets nearly
        # everything it is small and its terms are large.
        A = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
        old_log, log = old_step * A, (step * A).to(tl.float64)
        to_last = tl.sum(tl.where(e[None, :] > e[:, None], old_log[None, :], 0.0), 1)  # [E]
        whole = tl.sum(old_log, 0)
        since = tl.sum(tl.where(t[:, None] <= t[None, :], log[:, None], 0.0), 0)  # [T]
        until = tl.sum(tl.where(t[None, :] <= t[:, None], log[None, :], 0.0), 1)  # the same along the other axis
        past = since.to(tl.float32)[None, :]
        between = tl.where(t[:, None] <= t[None, :], tl.exp((since[None, :] - until[:, None]).to(tl.float32)), 0.0)
        skip = tl.where(t[:, None] == t[None, :], tl.load(D_ptr + head).to(tl.float32), 0.0)

        y = _dot(state, C, NARROW) * tl.exp(whole + past)  # [P, T]
        y += _dot(old_x, old_scores * tl.exp(to_last[:, None] + past) * old_step[:, None], NARROW)
        y += _dot(x, scores * between * step[:, None] + skip, NARROW)
        tl.store(y_ptrs + head * WIDTH, y.to(y_ptr.dtype.element_ty), mask=x_mask)
        new_x_ptrs = ring_x_ptr + head * WIDTH + new_place[None, :] * (HEADS * WIDTH) + p[:, None]
        tl.store(new_x_ptrs, x.to(ring_x_ptr.dtype.element_ty), mask=x_mask)
        tl.store(ring_dt_ptr + head + new_place * HEADS, step, mask=is_new & (part == 0))

        if count + TOKENS > CAPACITY:
            added = _dot(old_x.to(tl.float32) * (tl.exp(to_last) * old_step)[None, :], old_B, NARROW)  # [P, N]
            if RELOAD:  # from the cache, rather than keep its registers all the while
                state = _load(state_ptrs, state_mask, WHOLE)
            folded = state.to(tl.float32) * tl.exp(whole) + added
            tl.store(state_ptrs, folded.to(state_ptr.dtype.element_ty), mask=state_mask)


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
    *,
    block_p: int | None = None,
    block_h: int | None = None,
    num_warps: int = 4,
    num_stages: int = 2,
    reload: bool = True,
    maxnreg: int | None = None,
) -> Tensor:
    """See the reference. A program takes `block_p` channels of `block_h` heads of a group; while it computes one head,
    the loads of the next `num_stages` - 1 are under way. With `reload` it reads the state again to fold it."""
    rows, tokens, heads, width = x.shape
    groups, state_dim = B.shape[2:]
    length = ring_x.shape[1]
    capacity = ring_capacity(length)
    assert tokens <= length - capacity, f"{tokens} new tokens in a ring of {length}"
    assert all(buffer.is_contiguous() for buffer in (state, ring_x, ring_B, ring_dt))
    assert x.stride(3) == dt.stride(2) == B.stride(3) == C.stride(3) == 1
    narrow = _NARROW if x.dtype == B.dtype == C.dtype == torch.bfloat16 else None
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if block_p is None:
        block_p = _block_p(rows * heads, width, largest=64 if narrow else 16)
    if block_h is None:
        block_h = _block_h(rows * heads * triton.cdiv(width, block_p), heads // groups) if narrow else 1
    if maxnreg is None and narrow and block_h == 1:
        maxnreg = _FOUR_A_MULTIPROCESSOR
    _replay_kernel[(triton.cdiv(width, block_p), heads // block_h, rows)](
        state,
        ring_x,
        ring_B,
        ring_dt,
        slots.contiguous(),
        context_lens.contiguous(),
        ring_lens.contiguous(),
        x,
        dt,
        A_log,
        B,
        C,
        D,
        dt_bias,
        y,
        *dt_limit,
        *x.stride()[:3],
        *dt.stride()[:2],
        *B.stride()[:3],
        *C.stride()[:3],
        HEADS=heads,
        WIDTH=width,
        GROUPS=groups,
        STATE=state_dim,
        LENGTH=length,
        CAPACITY=capacity,
        TOKENS=tokens,
        BLOCK_H=block_h,
        BLOCK_P=block_p,
        BLOCK_N=max(_SMALLEST_DOT, triton.next_power_of_2(state_dim)),
        BLOCK_E=max(_SMALLEST_DOT, triton.next_power_of_2(capacity)),
        BLOCK_T=max(_SMALLEST_DOT, triton.next_power_of_2(tokens)),
        NARROW=narrow,
        RELOAD=reload,
        STAGES=num_stages if block_h > 1 else 1,
        num_warps=num_warps,
        maxnreg=maxnreg,
    )
    return y


def _block_p(programs: int, width: int, largest: int) -> int:
    """Channels a program takes when one for all of them makes `programs`: few enough to fill the GPU."""
    block = min(largest, max(_SMALLEST_DOT, triton.next_power_of_2(width)))
    while block > _SMALLEST_DOT and programs * triton.cdiv(width, block) < _PROGRAMS:
        block //= 2
    return block


def _block_h(programs: int, heads: int) -> int:
    """Heads of the `heads` of a group that a program takes when one a program makes `programs`: as many as leave work
    for every multiprocessor to balance."""
    return next(h for h in (4, 2, 1) if heads % h == 0 and (h == 1 or programs >= 2 * h * _PROGRAMS))


@triton.jit
def _snapshot_kernel(
    state_ptr,
    slots_ptr,
    committed_ptr,
    x_ptr,
    dt_ptr,
    A_log_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    bias_ptr,
    y_ptr,
    low,
    high,
    x_row,
    x_token,
    x_head,
    dt_row,
    dt_token,
    B_row,
    B_token,
    B_group,
    C_row,
    C_token,
    C_group,
    tokens,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_P channels of one head of one row, one token after another."""
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = head // (HEADS // GROUPS)
    p, n = part * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    in_p, in_n = p < WIDTH, n < STATE
    y_ptrs = y_ptr + row * tokens * (HEADS * WIDTH) + head * WIDTH + p
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        for t in range(tokens):
            tl.store(y_ptrs + t * (HEADS * WIDTH), tl.zeros([BLOCK_P], y_ptr.dtype.element_ty), mask=in_p)
        return
    entry: tl.constexpr = HEADS * WIDTH * STATE
    state_ptrs = state_ptr + slot * ENTRIES * entry + head * (WIDTH * STATE) + p[:, None] * STATE + n[None, :]
    state_mask = in_p[:, None] & in_n[None, :]
    state = tl.load(state_ptrs + tl.load(committed_ptr + row) * entry, mask=state_mask, other=0.0).to(tl.float32)
    A = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    D, bias = tl.load(D_ptr + head).to(tl.float32), tl.load(bias_ptr + head).to(tl.float32)
    for t in range(tokens):
        step = _step_size(tl.load(dt_ptr + row * dt_row + t * dt_token + head), bias, low, high)
        x = tl.load(x_ptr + row * x_row + t * x_token + head * x_head + p, mask=in_p, other=0.0).to(tl.float32)
        B = tl.load(B_ptr + row * B_row + t * B_token + group * B_group + n, mask=in_n, other=0.0).to(tl.float32)
        C = tl.load(C_ptr + row * C_row + t * C_token + group * C_group + n, mask=in_n, other=0.0).to(tl.float32)
        state = state * tl.exp(step * A) + (step * x)[:, None] * B[None, :]
        tl.store(state_ptrs + t * entry, state.to(state_ptr.dtype.element_ty), mask=state_mask)
        y = tl.sum(state * C[None, :], 1) + D * x
        tl.store(y_ptrs + t * (HEADS * WIDTH), y.to(y_ptr.dtype.element_ty), mask=in_p)


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
    *,
    block_p: int | None = None,
    num_warps: int = 4,
) -> Tensor:
    """See the reference. A program takes `block_p` channels of a head."""
    rows, tokens, heads, width = x.shape
    groups, state_dim = B.shape[2:]
    assert state.is_contiguous() and x.stride(3) == dt.stride(2) == B.stride(3) == C.stride(3) == 1
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if block_p is None:
        block_p = _block_p(rows * heads, width, largest=32)
    _snapshot_kernel[(triton.cdiv(width, block_p), heads, rows)](
        state,
        slots.contiguous(),
        committed.contiguous(),
        x,
        dt,
        A_log,
        B,
        C,
        D,
        dt_bias,
        y,
        *dt_limit,
        *x.stride()[:3],
        *dt.stride()[:2],
        *B.stride()[:3],
        *C.stride()[:3],
        tokens,
        HEADS=heads,
        WIDTH=width,
        GROUPS=groups,
        STATE=state_dim,
        ENTRIES=state.shape[1],
        BLOCK_P=block_p,
        BLOCK_N=triton.next_power_of_2(state_dim),
        num_warps=num_warps,
    )
    return y
