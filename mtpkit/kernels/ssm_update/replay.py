# mypy: disable-error-code="no-untyped-def"
"""`ssm_replay_update` in Triton: two kernels.

The first turns step sizes, B and C into a few weights: y is then the state times C, plus old and new inputs times a
matrix each. It runs once a group of heads. The second streams the state, and is bound by its bytes: it keeps several
heads' states on their way, and all that it computes are three small products on tensor cores, which multiply the fp32
state by bf16 inputs as the sum of two bf16 numbers.

The second kernel may start while the first runs (programmatic dependent launch): until it has the weights it asks for
its states to be brought into the L2 cache.

Although the state is written in place, threads need no barrier: what is written to an element is computed from what was
read there. The rings' old entries and new ones never share a place, so that programs of a row need no order.

Sizes: E old entries of the ring, T new tokens, P channels of a head, N state; entries and tokens that do not exist have
a weight of zero.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mtpkit.kernels.ssm_update.ring import ring_capacity
from mtpkit.kernels.ssm_update.tile import NARROW, SMALLEST_DOT, dot, load, step_size

_MANY_ROWS = 64
"""From here on there are programs enough that each may take more heads."""
_FORGOTTEN = -100.0
"""A log decay beyond which nothing in fp32 is left."""


@triton.jit
def _places(slots_ptr, contexts_ptr, lens_ptr, row, e, t, LENGTH: tl.constexpr):
    """Slot of a row, its committed entries, and where in the rings its old entries and new tokens are."""
    slot = tl.load(slots_ptr + row)
    context, count = tl.load(contexts_ptr + row), tl.load(lens_ptr + row)
    # Null rows may have fewer positions than entries: a place is never negative.
    old = slot * LENGTH + (((context - count) % LENGTH).to(tl.int32) + LENGTH + e) % LENGTH
    new = slot * LENGTH + ((context % LENGTH).to(tl.int32) + t) % LENGTH
    return slot, count, old, new


@triton.jit
def _prefetch(start, COUNT: tl.constexpr):
    """Ask for COUNT numbers, a power of two, to be brought into the L2 cache."""
    line: tl.constexpr = 128 * 8 // start.dtype.element_ty.primitive_bitwidth
    address = (start + tl.arange(0, COUNT // line) * line).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


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
    """The weights of BLOCK_H heads of one row and group, and the new entries of the rings of B and dt.

    weights [R, heads, E + T + 1, T]: of old entries, of new ones, and the decay of the state up to each token.
    folds [R, heads, E + 1]: of old entries in the folded state, and its own decay.
    """
    if EARLY:
        gdc_launch_dependents()
    first, row = tl.program_id(0) * BLOCK_H, tl.program_id(1).to(tl.int64)
    group = first // (HEADS // GROUPS)
    head = first + tl.arange(0, BLOCK_H)
    in_group = head < (group + 1) * (HEADS // GROUPS)
    n, e, t = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_T)
    in_n, is_new = n < STATE, t < TOKENS
    slot, count, old_place, new_place = _places(slots_ptr, contexts_ptr, lens_ptr, row, e, t, LENGTH)
    if slot < 0:
        return
    is_old = e < count

    old_mask = is_old[:, None] & in_group[None, :]
    old_step = tl.load(ring_dt_ptr + old_place[:, None] * HEADS + head[None, :], mask=old_mask, other=0.0)  # [E, H]
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
    A = -tl.exp(tl.load(A_log_ptr + head, mask=in_group, other=0.0).to(tl.float32))
    bias = tl.load(bias_ptr + head, mask=in_group, other=0.0).to(tl.float32)
    D = tl.load(D_ptr + head, mask=in_group, other=0.0).to(tl.float32)
    old_log = tl.maximum(old_step * A[None, :], FORGOTTEN)
    to_last = tl.cumsum(old_log, 0, reverse=True) - old_log  # [E, H]
    whole = tl.sum(old_log, 0)
    folds = folds_ptr + (row * HEADS + head) * (BLOCK_E + 1)
    tl.store(folds[None, :] + e[:, None], tl.exp(to_last) * old_step, mask=in_group[None, :])
    tl.store(folds + BLOCK_E, tl.exp(whole), mask=in_group)

    weights = weights_ptr + (row * HEADS + head) * ((BLOCK_E + TOKENS + 1) * TOKENS)
    since = tl.zeros([BLOCK_H], tl.float32)
    for now in tl.static_range(TOKENS):
        raw = tl.load(dt_ptr + row * dt_row + now * dt_token + head, mask=in_group, other=0.0)
        step = step_size(raw, bias, low, high)
        tl.store(ring_dt_ptr + tl.sum(tl.where(t == now, new_place, 0), 0) * HEADS + head, step, mask=in_group)
        since += step * A
        column = tl.sum(tl.where(t[None, :] == now, old_scores, 0.0), 1)  # [E]
        old = column[:, None] * tl.exp(to_last + since[None, :]) * old_step
        tl.store(weights[None, :] + e[:, None] * TOKENS + now, old, mask=in_group[None, :])
        tl.store(weights + (BLOCK_E + TOKENS) * TOKENS + now, tl.exp(whole + since), mask=in_group)
        # From this token to each later one: its own decay is done.
        to_later = tl.sum(tl.where(t[:, None] == now, scores, 0.0), 0)  # [T]
        between = tl.zeros([BLOCK_H], tl.float32)
        for later in tl.static_range(TOKENS):
            new = tl.zeros([BLOCK_H], tl.float32)
            if later >= now:
                if later > now:
                    ahead = tl.load(dt_ptr + row * dt_row + later * dt_token + head, mask=in_group, other=0.0)
                    between += step_size(ahead, bias, low, high) * A
                new = tl.sum(tl.where(t == later, to_later, 0.0), 0) * tl.exp(between) * step
                new += D if later == now else 0.0
            tl.store(weights + (BLOCK_E + now) * TOKENS + later, new, mask=in_group)


@triton.jit
def _stream_kernel(
    state_ptr,
    ring_x_ptr,
    ring_B_ptr,
    slots_ptr,
    contexts_ptr,
    lens_ptr,
    x_ptr,
    C_ptr,
    weights_ptr,
    folds_ptr,
    y_ptr,
    x_row,
    x_token,
    x_head,
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
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_P channels of each of BLOCK_H heads of one row and group, the states of STAGES heads on their way.

    WHOLE: blocks are never cut short.
    """
    part, first, row = tl.program_id(0), tl.program_id(1) * BLOCK_H, tl.program_id(2).to(tl.int64)
    group = first // (HEADS // GROUPS)
    p, n = part * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    e, t = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_T)
    in_p, in_n, is_new = p < WIDTH, n < STATE, t < TOKENS
    x_mask, state_mask = in_p[:, None] & is_new[None, :], in_p[:, None] & in_n[None, :]
    y_ptrs = y_ptr + (row * TOKENS + t[None, :]) * (HEADS * WIDTH) + p[:, None]
    slot, count, old_place, new_place = _places(slots_ptr, contexts_ptr, lens_ptr, row, e, t, LENGTH)
    if slot < 0:
        for head in range(first, first + BLOCK_H):
            tl.store(y_ptrs + head * WIDTH, tl.zeros([BLOCK_P, BLOCK_T], y_ptr.dtype.element_ty), mask=x_mask)
        return
    if EARLY:
        for head in range(first, first + BLOCK_H):
            _prefetch(state_ptr + (slot * HEADS + head) * (WIDTH * STATE) + part * (BLOCK_P * STATE), BLOCK_P * STATE)
        gdc_wait()
    is_old = e < count
    C_ptrs = C_ptr + row * C_row + t[None, :] * C_token + group * C_group + n[:, None]
    C = tl.load(C_ptrs, mask=in_n[:, None] & is_new[None, :], other=0.0)  # [N, T]
    old_x_ptrs = ring_x_ptr + old_place[None, :] * (HEADS * WIDTH) + p[:, None]
    old_x_mask = in_p[:, None] & is_old[None, :]
    state_ptrs = state_ptr + slot * (HEADS * WIDTH * STATE) + p[:, None] * STATE + n[None, :]
    for head in tl.range(first, first + BLOCK_H, num_stages=STAGES):
        state = load(state_ptrs + head * (WIDTH * STATE), state_mask, WHOLE)
        x_ptrs = x_ptr + row * x_row + t[None, :] * x_token + head * x_head + p[:, None]
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)  # [P, T]
        old_x = tl.load(old_x_ptrs + head * WIDTH, mask=old_x_mask, other=0.0)  # [P, E]
        weights = weights_ptr + (row * HEADS + head) * ((BLOCK_E + TOKENS + 1) * TOKENS)
        old_weights = tl.load(weights + e[:, None] * TOKENS + t[None, :], mask=is_new[None, :], other=0.0)
        new_ptrs = weights + (BLOCK_E + t[:, None]) * TOKENS + t[None, :]
        new_weights = tl.load(new_ptrs, mask=is_new[:, None] & is_new[None, :], other=0.0)
        decay = tl.load(weights + (BLOCK_E + TOKENS) * TOKENS + t, mask=is_new, other=0.0)
        y = dot(state, C, NARROW) * decay[None, :]
        y += dot(old_x, old_weights, NARROW)
        y += dot(x, new_weights, NARROW)
        tl.store(y_ptrs + head * WIDTH, y.to(y_ptr.dtype.element_ty), mask=x_mask)
        new_x_ptrs = ring_x_ptr + new_place[None, :] * (HEADS * WIDTH) + head * WIDTH + p[:, None]
        tl.store(new_x_ptrs, x.to(ring_x_ptr.dtype.element_ty), mask=x_mask)
    if count + TOKENS > CAPACITY:
        old_B_ptrs = ring_B_ptr + old_place[:, None] * (GROUPS * STATE) + group * STATE + n[None, :]
        old_B = tl.load(old_B_ptrs, mask=is_old[:, None] & in_n[None, :], other=0.0)  # [E, N]
        for head in tl.range(first, first + BLOCK_H):
            folds = folds_ptr + (row * HEADS + head) * (BLOCK_E + 1)
            old_x = tl.load(old_x_ptrs + head * WIDTH, mask=old_x_mask, other=0.0)
            added = dot(old_x.to(tl.float32) * tl.load(folds + e)[None, :], old_B, NARROW)  # [P, N]
            # Once more from the cache, rather than kept in registers all the while.
            state = load(state_ptrs + head * (WIDTH * STATE), state_mask, WHOLE)
            folded = state.to(tl.float32) * tl.load(folds + BLOCK_E) + added
            tl.store(state_ptrs + head * (WIDTH * STATE), folded.to(state_ptr.dtype.element_ty), mask=state_mask)


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
    block_p: int = 32,
    block_h: int | None = None,
    num_warps: int = 2,
    num_stages: int = 2,
    early: bool | None = None,
) -> Tensor:
    """See the reference. A program takes `block_p` channels of `block_h` heads, `num_stages` of them on their way.

    `early`: the second kernel may start before the first has ended. None: on a GPU.
    """
    rows, tokens, heads, width = x.shape
    groups, state_dim = B.shape[2:]
    per_group = heads // groups
    length = ring_x.shape[1]
    capacity = ring_capacity(length)
    assert tokens <= length - capacity, f"{tokens} new tokens in a ring of {length}"
    assert all(buffer.is_contiguous() for buffer in (state, ring_x, ring_B, ring_dt))
    assert x.stride(3) == dt.stride(2) == B.stride(3) == C.stride(3) == 1
    slots, context_lens, ring_lens = slots.contiguous(), context_lens.contiguous(), ring_lens.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_e = max(SMALLEST_DOT, triton.next_power_of_2(capacity))
    common = dict(
        HEADS=heads,
        GROUPS=groups,
        STATE=state_dim,
        LENGTH=length,
        TOKENS=tokens,
        BLOCK_N=max(SMALLEST_DOT, triton.next_power_of_2(state_dim)),
        BLOCK_E=block_e,
        BLOCK_T=max(SMALLEST_DOT, triton.next_power_of_2(tokens)),
        NARROW=NARROW if x.dtype == B.dtype == C.dtype == torch.bfloat16 else None,
    )
    weights = torch.empty(rows, heads, block_e + tokens + 1, tokens, dtype=torch.float32, device=x.device)
    folds = torch.empty(rows, heads, block_e + 1, dtype=torch.float32, device=x.device)
    block_p = min(block_p, max(SMALLEST_DOT, triton.next_power_of_2(width)))
    whole = width % block_p == 0 and state_dim == common["BLOCK_N"]
    # Past the end of a state there may be nothing to ask for.
    early = whole and state.is_cuda if early is None else early
    weight_heads = _largest_divisor(per_group, 16)
    _weights_kernel[(heads // weight_heads, rows)](
        ring_B,
        ring_dt,
        slots,
        context_lens,
        ring_lens,
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
        BLOCK_H=weight_heads,
        FORGOTTEN=_FORGOTTEN,
        EARLY=early,
        **common,
        num_warps=1,  # it is all waiting for small sums, which one warp need not share
    )
    block_h = _largest_divisor(per_group, block_h or (4 if rows >= _MANY_ROWS else 2))
    _stream_kernel[(triton.cdiv(width, block_p), heads // block_h, rows)](
        state,
        ring_x,
        ring_B,
        slots,
        context_lens,
        ring_lens,
        x,
        C,
        weights,
        folds,
        y,
        *x.stride()[:3],
        *C.stride()[:3],
        WIDTH=width,
        CAPACITY=capacity,
        BLOCK_H=block_h,
        BLOCK_P=block_p,
        WHOLE=whole,
        STAGES=num_stages if block_h > 1 else 1,
        EARLY=early,
        **common,
        num_warps=num_warps,
        launch_pdl=early,
    )
    return y


def _largest_divisor(number: int, limit: int) -> int:
    """The largest power of two that divides `number` and is at most `limit`."""
    return min(number & -number, limit)
