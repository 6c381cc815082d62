# mypy: disable-error-code="no-untyped-def"
"""`ssm_replay_update` in Triton: two kernels.

The first, in `weights.py`, turns step sizes, B and C into a few weights: y is then the state times C, plus old and new
inputs times a matrix each. It runs once a group of heads. The second streams the state, and is bound by its bytes: it
keeps several heads' states on their way, and all that it computes are three small products on tensor cores, which
multiply the fp32 state by bf16 inputs as the sum of two bf16 numbers.

The second kernel may start while the first runs (programmatic dependent launch): until it has the weights it asks for
its states to be brought into the L2 cache.

Although the state is written in place, threads need no barrier: what is written to an element is computed from what was
read there. The rings' old entries and new ones never share a place, so that programs of a row need no order.

Sizes: E old entries of the ring, T new tokens, P channels of a head, N state; entries and tokens that do not exist have
a weight of zero.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from mtpkit.kernels.device import NARROW, SMALLEST_DOT, overlaps_kernels
from mtpkit.kernels.ssm_update.ring import ring_capacity
from mtpkit.kernels.ssm_update.tile import dot, largest_divisor, load, places
from mtpkit.kernels.ssm_update.weights import input_weights

_MANY_ROWS = 64
"""From here on there are programs enough that each may take more heads."""


@triton.jit
def _prefetch(start, COUNT: tl.constexpr):
    """Ask for COUNT numbers, a power of two, to be brought into the L2 cache."""
    line: tl.constexpr = 128 * 8 // start.dtype.element_ty.primitive_bitwidth
    address = (start + tl.arange(0, COUNT // line) * line).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _outputs(state, old_x, x, C, weights, t, is_new, TOKENS: tl.constexpr, NARROW: tl.constexpr):
    """y [P, T] of one head from its state [P, N], old_x [P, E], x [P, T], C [N, T] and the `weights` it points to."""
    BLOCK_E: tl.constexpr = old_x.shape[1]
    e = tl.arange(0, BLOCK_E)
    old_weights = tl.load(weights + e[:, None] * TOKENS + t[None, :], mask=is_new[None, :], other=0.0)
    new_ptrs = weights + (BLOCK_E + t[:, None]) * TOKENS + t[None, :]
    new_weights = tl.load(new_ptrs, mask=is_new[:, None] & is_new[None, :], other=0.0)
    decay = tl.load(weights + (BLOCK_E + TOKENS) * TOKENS + t, mask=is_new, other=0.0)
    y = dot(state, C, NARROW) * decay[None, :]
    y += dot(old_x, old_weights, NARROW)
    y += dot(x, new_weights, NARROW)
    return y


@triton.jit
def _fold(state_ptrs, state_mask, old_x_ptrs, old_x_mask, old_B, folds, NARROW: tl.constexpr, WHOLE: tl.constexpr):
    """Replace one head's state [P, N] by what it is after its old entries, old_x [P, E] and old_B [E, N]."""
    BLOCK_E: tl.constexpr = old_B.shape[0]
    old_x = tl.load(old_x_ptrs, mask=old_x_mask, other=0.0)
    added = dot(old_x.to(tl.float32) * tl.load(folds + tl.arange(0, BLOCK_E))[None, :], old_B, NARROW)
    # Once more from the cache, rather than kept in registers all the while.
    state = load(state_ptrs, state_mask, WHOLE)
    folded = state.to(tl.float32) * tl.load(folds + BLOCK_E) + added
    tl.store(state_ptrs, folded.to(state_ptrs.dtype.element_ty), mask=state_mask)


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
    slot, count, old_place, new_place = places(slots_ptr, contexts_ptr, lens_ptr, row, e, t, LENGTH)
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
        y = _outputs(state, old_x, x, C, weights, t, is_new, TOKENS, NARROW)
        tl.store(y_ptrs + head * WIDTH, y.to(y_ptr.dtype.element_ty), mask=x_mask)
        new_x_ptrs = ring_x_ptr + new_place[None, :] * (HEADS * WIDTH) + head * WIDTH + p[:, None]
        tl.store(new_x_ptrs, x.to(ring_x_ptr.dtype.element_ty), mask=x_mask)
    if count + TOKENS > CAPACITY:
        old_B_ptrs = ring_B_ptr + old_place[:, None] * (GROUPS * STATE) + group * STATE + n[None, :]
        old_B = tl.load(old_B_ptrs, mask=is_old[:, None] & in_n[None, :], other=0.0)  # [E, N]
        for head in tl.range(first, first + BLOCK_H):
            folds = folds_ptr + (row * HEADS + head) * (BLOCK_E + 1)
            head_ptrs = state_ptrs + head * (WIDTH * STATE)
            _fold(head_ptrs, state_mask, old_x_ptrs + head * WIDTH, old_x_mask, old_B, folds, NARROW, WHOLE)


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
) -> Tensor:
    """See the reference. A program takes `block_p` channels of `block_h` heads, `num_stages` of them on their way."""
    (rows, tokens, heads, width), (groups, state_dim) = x.shape, B.shape[2:]
    length, capacity = ring_x.shape[1], ring_capacity(ring_x.shape[1])
    assert tokens <= length - capacity, f"{tokens} new tokens in a ring of {length}"
    assert all(buffer.is_contiguous() for buffer in (state, ring_x, ring_B, ring_dt))
    assert x.stride(3) == dt.stride(2) == B.stride(3) == C.stride(3) == 1
    sizes = _sizes(x, B, C, length)
    block_p = min(block_p, max(SMALLEST_DOT, triton.next_power_of_2(width)))
    whole = width % block_p == 0 and state_dim == sizes["BLOCK_N"]
    # Past the end of a state there may be nothing to ask for.
    early = whole and overlaps_kernels(state.device)
    where = slots.contiguous(), context_lens.contiguous(), ring_lens.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # here: a fill of it must not part the two kernels
    weights = input_weights(ring_B, ring_dt, where, dt, A_log, B, C, D, dt_bias, dt_limit, early, **sizes)
    block_h = largest_divisor(heads // groups, block_h or (4 if rows >= _MANY_ROWS else 2))
    _stream(
        (state, ring_x, ring_B),
        where,
        x,
        C,
        weights,
        y,
        early,
        **sizes,
        CAPACITY=capacity,
        BLOCK_H=block_h,
        BLOCK_P=block_p,
        WHOLE=whole,
        STAGES=num_stages if block_h > 1 else 1,
        num_warps=num_warps,
    )
    return y


def _sizes(x: Tensor, B: Tensor, C: Tensor, length: int) -> dict[str, Any]:
    """What both kernels are compiled for, with rings of `length` places."""
    (_, tokens, heads, _), (groups, state_dim) = x.shape, B.shape[2:]
    return dict(
        HEADS=heads,
        GROUPS=groups,
        STATE=state_dim,
        LENGTH=length,
        TOKENS=tokens,
        BLOCK_N=max(SMALLEST_DOT, triton.next_power_of_2(state_dim)),
        BLOCK_E=max(SMALLEST_DOT, triton.next_power_of_2(ring_capacity(length))),
        BLOCK_T=max(SMALLEST_DOT, triton.next_power_of_2(tokens)),
        NARROW=NARROW if x.dtype == B.dtype == C.dtype == torch.bfloat16 else None,
    )


def _stream(
    caches: tuple[Tensor, Tensor, Tensor],
    where: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    C: Tensor,
    weights: tuple[Tensor, Tensor],
    y: Tensor,
    early: bool,
    **settings: Any,
) -> None:
    """Fills y and the ring of x, and folds full rings, given state, ring_x, ring_B and what `input_weights` returns."""
    rows, _, heads, width = x.shape
    _stream_kernel[(triton.cdiv(width, settings["BLOCK_P"]), heads // settings["BLOCK_H"], rows)](
        *caches,
        *where,
        x,
        C,
        *weights,
        y,
        *x.stride()[:3],
        *C.stride()[:3],
        WIDTH=width,
        EARLY=early,
        **settings,
        launch_pdl=early,
    )
