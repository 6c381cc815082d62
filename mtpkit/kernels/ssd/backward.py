# mypy: disable-error-code="assignment"
"""Backward of the scan in Triton: everything except the inputs is recomputed, chunk by chunk.

With S the state before a chunk, G the gradient of the state after it, c sums of log decays, w the
last of them, d step sizes and M = tril(exp(c_i - c_j)) d_j, the forward is Y = exp(c) C S + (C B^T
* M) X + D X, and the next state is exp(w) S + B^T (exp(w - c) d X). A first kernel walks over each
row's chunks, from the first one to the last for S, and from the last one to the first for G, whose
recurrence is the same with C and dY in the places of B and X. The other gradients are then computed
for all chunks at once: those of x and of the rates head by head, and those of B and C in a kernel
whose programs compute the heads of a group in turn and sum in registers.

Sizes: L tokens of a chunk, P channels of a head at a time, N state width.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import (
    NARROW,
    SMALLEST_DOT,
    busy_programs,
    multiprocessors,
    padded,
    row_of_tile,
    strided,
)
from mtpkit.kernels.ssd.scan import decays, dot, is_narrow
from mtpkit.kernels.ssm_update.replay import step_size

_FADED = tl.constexpr(-40.0)
"""Decays whose base-2 logarithm is at most this get no gradient: it would be a small difference of
large sums, and thus nothing but rounding errors."""


@dataclass(frozen=True)
class BackTiles:
    """Sizes of the programs of the backward, all powers of two."""

    chunk: int
    """Tokens at a time."""
    walk: int
    """Channels of a head per program that walks over chunks."""
    width: int
    """Channels of a head at a time in the other kernels."""


def back_tiles(rows: int, heads: int, width: int, state_dim: int, narrow: bool) -> BackTiles:
    """Choose tiles for `rows` rows of `heads` heads with states of `width` times `state_dim`: heads
    are split so that the programs that walk over chunks fill the GPU."""
    if not narrow:
        return BackTiles(SMALLEST_DOT, SMALLEST_DOT, SMALLEST_DOT)
    most = 64 if state_dim <= 128 else 32 if state_dim <= 256 else SMALLEST_DOT
    walk = block = min(most, padded(width))
    while walk > SMALLEST_DOT and rows * heads * triton.cdiv(width, walk) < multiprocessors():
        walk //= 2
    return BackTiles(64 if state_dim <= 256 else SMALLEST_DOT, walk, block)


@triton.jit
def _walk(
    key_in,
    value_in,
    decay_ptr,
    state,
    row,
    begin,
    count,
    group,
    head,
    p,
    kept_ptr,
    HEADS,
    WIDTH,
    STATE,
    SIZE: tl.constexpr,
    NARROW,
    BACK: tl.constexpr,
):
    """Walk from `state` [N, P] over a row's chunks: store the state before each chunk, return that
    after the last one.

    BACK: go from the last chunk to the first; a token is then weighed by its decay since the
    chunk's start instead of its step size and its decay until the chunk's end.
    """
    key_ptr, key_token, key_group = key_in
    value_ptr, value_token, value_head = value_in
    t = tl.arange(0, SIZE)
    n = tl.arange(0, state.shape[0])
    in_n = (n < STATE)[None, :]
    in_p = (p < WIDTH)[None, :]
    pair = tl.arange(0, 2)[None, :]
    chunks = (count + SIZE - 1) // SIZE
    for step in range(chunks):
        chunk = chunks - 1 - step if BACK else step
        token = begin + chunk * SIZE
        left = tl.minimum(count - chunk * SIZE, SIZE)
        live = t < left
        key_ptrs = (
            key_ptr + token * key_token + group * key_group + (t[:, None] * key_token + n[None, :])
        )
        key = tl.load(key_ptrs, mask=live[:, None] & in_n, other=0.0)
        value_ptrs = (
            value_ptr
            + token * value_token
            + head * value_head
            + (t[:, None] * value_token + p[None, :])
        )
        value = tl.load(value_ptrs, mask=live[:, None] & in_p, other=0.0).to(tl.float32)
        whole = tl.load(decay_ptr + (token + left - 1) * 2)
        both = tl.load(
            decay_ptr + token * 2 + (t[:, None] * 2 + pair), mask=live[:, None], other=float("-inf")
        )
        since, gain = tl.split(both)
        tile = begin // SIZE + row * 2 + chunk
        kept_ptrs = (
            kept_ptr + (tile * HEADS + head) * (WIDTH * STATE) + (p[None, :] * STATE + n[:, None])
        )
        tl.store(kept_ptrs, state.to(kept_ptr.dtype.element_ty), mask=(n < STATE)[:, None] & in_p)
        weighed = value * tl.exp2((since if BACK else whole + gain).to(tl.float32))[:, None]
        state = dot(tl.trans(key), weighed, state * tl.exp2(whole.to(tl.float32)), NARROW)
    return state


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["starts_ptr"])
def _states_kernel(
    x_in,
    B_in,
    C_ptr,
    dy_ptr,
    decay_ptr,
    tokens,
    starts_ptr,
    ends,
    made,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Compute the states before all chunks, or the gradients of those after them, of BLOCK_P
    channels of a row's head.

    Args:
        ends: [R, h, p, n] each, the states before the rows, and their gradients, which are written;
            None: zeros.
        made: [tiles, h, p, n] each, the states before chunks and the gradients of those after them,
            which are written. Chunk i of row r is tile starts[r] // L + 2 r + i.
    """
    PARTS: tl.constexpr = (WIDTH + BLOCK_P - 1) // BLOCK_P
    row = tl.program_id(1)
    head = tl.program_id(0) // PARTS
    group = head // (HEADS // GROUPS)
    p = tl.program_id(0) % PARTS * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    begin = tl.load(starts_ptr + row) - tl.load(starts_ptr)
    count = (tl.load(starts_ptr + row + 1) - tl.load(starts_ptr) - begin).to(tl.int32)
    decay_ptr += head.to(tl.int64) * tokens * 2
    place = (row.to(tl.int64) * HEADS + head) * (WIDTH * STATE) + (p[None, :] * STATE + n[:, None])
    inside = (n < STATE)[:, None] & (p < WIDTH)[None, :]
    state = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    # Neither walk needs the other's result, so both run at once.
    if tl.program_id(2) == 0:
        if ends is not None:
            state = tl.load(ends[0] + place, mask=inside, other=0.0)
        at = (row, begin, count, group, head, p)
        _walk(B_in, x_in, decay_ptr, state, *at, made[0], HEADS, WIDTH, STATE, SIZE, NARROW, False)
    else:
        at = (row, begin, count, group, head, p)
        C_in = (C_ptr, B_in[1], B_in[2])
        dy_in = (dy_ptr, HEADS * WIDTH, WIDTH)
        state = _walk(
            C_in, dy_in, decay_ptr, state, *at, made[1], HEADS, WIDTH, STATE, SIZE, NARROW, True
        )
        if ends is not None:
            tl.store(ends[1] + place, state, mask=inside)


@triton.jit
def _finish_rates(dt_in, parameters, rates_ptr, rates, head, tokens, token, live, HEADS):
    """Store what a chunk's tokens [L] add to the gradients of a head's dt, A_log and D, in [3, h,
    T].

    Args:
        rates: gradients of the log decays; gradients of the step sizes, except those through log
            decays, times the step sizes; and gradients of D.
    """
    dlog, dgain, skipped = rates
    dt_ptr, dt_token = dt_in
    _, A_log_ptr, bias_ptr, low, high = parameters
    raw = tl.load(dt_ptr + token * dt_token + head, mask=live, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + head).to(tl.float32)
    step = step_size(raw, bias, 0.0, float("inf"))
    log = tl.minimum(tl.maximum(step, low), high) * -tl.exp(
        tl.load(A_log_ptr + head).to(tl.float32)
    )
    dlog = tl.where(log * 1.4426950408889634 > _FADED, dlog, 0.0).to(tl.float32) * log
    # Derivative of log(softplus(v)): sigmoid(v) / softplus(v), two numbers that are nearly equal
    # where both are small.
    slope = 1.0 / ((1.0 + tl.exp(-(raw + bias))) * tl.maximum(step, 1e-37))
    draw = tl.where((step >= low) & (step <= high), (dgain + dlog) * slope, 0.0)
    rates_ptr += head.to(tl.int64) * tokens + token
    tl.store(rates_ptr, draw, mask=live)
    tl.store(rates_ptr + tokens * HEADS, dlog, mask=live)
    tl.store(rates_ptr + tokens * (2 * HEADS), skipped, mask=live)


@triton.jit
def _decays(decay_ptr, tokens, head, at, left, t):
    """Load a head's base-2 logarithms, see `decays`, for the chunk of `left` tokens that starts at
    token `at`: `since` and `gain` [L], -inf where there is no token, and `since` of the last
    token."""
    decay_ptrs = decay_ptr + (head.to(tl.int64) * tokens + at) * 2
    places = t[:, None] * 2 + tl.arange(0, 2)[None, :]
    live = (t < left)[:, None]
    since, gain = tl.split(tl.load(decay_ptrs + places, mask=live, other=float("-inf")))
    return since, gain, tl.load(decay_ptrs + (left - 1) * 2)


@triton.jit
def _weights(since, gain, t):
    """Weights [L, L] of token j in the output of token i."""
    # Pairs with j after i are masked before the exponential is taken, since theirs could overflow.
    logs = tl.where(
        t[:, None] >= t[None, :], (since[:, None] + gain[None, :]).to(tl.float32), float("-inf")
    )
    return tl.exp2(logs)


@triton.jit
def _channels(x_in, dy_ptr, made, tile, head, at, left, t, p, n, HEADS, WIDTH, STATE):
    """Load x and dY [L, P] of channels p of a head, and the state before a chunk and the gradient
    of the state after it [P, N]."""
    x_ptr, x_token, x_head = x_in
    mask = (t < left)[:, None] & (p < WIDTH)[None, :]
    x_ptrs = x_ptr + at * x_token + head * x_head + (t[:, None] * x_token + p[None, :])
    dy_ptrs = dy_ptr + (at * HEADS + head) * WIDTH + (t[:, None] * (HEADS * WIDTH) + p[None, :])
    x = tl.load(x_ptrs, mask=mask, other=0.0)
    dy = tl.load(dy_ptrs, mask=mask, other=0.0)
    of_state = (tile * HEADS + head) * (WIDTH * STATE) + (p[:, None] * STATE + n[None, :])
    inside = (p < WIDTH)[:, None] & (n < STATE)[None, :]
    state = tl.load(made[0] + of_state, mask=inside, other=0.0)
    return x, dy, state, tl.load(made[1] + of_state, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["tokens", "rows"], do_not_specialize_on_alignment=["starts_ptr"])
def _tokens_kernel(
    x_in,
    B_in,
    C_ptr,
    dy_ptr,
    decay_ptr,
    tokens,
    rows,
    starts_ptr,
    made,
    dt_in,
    parameters,
    dx_ptr,
    rates_ptr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Compute the gradients of x and of the rates for one chunk of one head per program."""
    head = tl.program_id(0) % HEADS
    tile = (tl.program_id(0) // HEADS).to(tl.int64)
    _, begin, count, first = row_of_tile(starts_ptr, rows, tile, 1, SIZE, 2)
    if first >= count:
        return
    B_ptr, BC_token, BC_group = B_in
    t = tl.arange(0, SIZE)
    n = tl.arange(0, BLOCK_N)
    at = begin + first
    left = tl.minimum(count - first, SIZE)
    live = t < left
    in_n = live[:, None] & (n < STATE)[None, :]
    bc = at * BC_token + head // (HEADS // GROUPS) * BC_group + (t[:, None] * BC_token + n[None, :])
    B = tl.load(B_ptr + bc, mask=in_n, other=0.0)
    C = tl.load(C_ptr + bc, mask=in_n, other=0.0)
    since, gain, whole = _decays(decay_ptr, tokens, head, at, left, t)
    from_start = tl.exp2(since.to(tl.float32))[:, None]
    to_end = tl.exp2((whole + gain).to(tl.float32))[:, None]
    weighed = dot(C, tl.trans(B), tl.zeros([SIZE, SIZE], tl.float32), NARROW) * _weights(
        since, gain, t
    )
    D = tl.load(parameters[0] + head).to(tl.float32)
    pairs = tl.zeros([SIZE, SIZE], tl.float32)  # dY X^T
    read = tl.zeros([SIZE], tl.float32)
    written = tl.zeros([SIZE], tl.float32)
    skipped = tl.zeros([SIZE], tl.float32)
    dwhole = 0.0
    for channel in range(0, WIDTH, BLOCK_P):
        p = channel + tl.arange(0, BLOCK_P)
        x, dy, state, dstate = _channels(
            x_in, dy_ptr, made, tile, head, at, left, t, p, n, HEADS, WIDTH, STATE
        )
        dwhole += tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1), 0)
        zeros = tl.zeros([SIZE, BLOCK_P], tl.float32)
        wide_x = x.to(tl.float32)
        wide_dy = dy.to(tl.float32)
        # Gradients through the state before the chunk, through the state after it, and past both,
        # by D.
        read += tl.sum(dot(C, tl.trans(state), zeros, NARROW) * from_start * wide_dy, 1)
        dx = dot(B, tl.trans(dstate), zeros, NARROW) * to_end
        written += tl.sum(dx * wide_x, 1)
        skipped += tl.sum(wide_dy * wide_x, 1)
        dx = dot(tl.trans(weighed), dy, dx, NARROW) + D * wide_dy
        dx_ptrs = dx_ptr + (at * HEADS + head) * WIDTH + (t[:, None] * (HEADS * WIDTH) + p[None, :])
        tl.store(dx_ptrs, dx.to(dx_ptr.dtype.element_ty), mask=live[:, None] & (p < WIDTH)[None, :])
        pairs = dot(dy, tl.trans(x), pairs, NARROW)
    # The gradients are differences of sums of the same terms; these sums have the precision of the
    # log decays.
    terms = (pairs * weighed).to(since.dtype)
    written = written.to(since.dtype)
    dgain = tl.sum(terms, 0) + written
    dsince = tl.sum(terms, 1) + read - dgain
    dwhole = dwhole * tl.exp2(whole.to(tl.float32)) + tl.sum(written, 0)
    dlog = tl.cumsum(dsince + tl.where(t == left - 1, dwhole, 0.0), 0, reverse=True)
    rates = dlog, dgain.to(tl.float32), skipped
    _finish_rates(dt_in, parameters, rates_ptr, rates, head, tokens, at + t, live, HEADS)


@triton.jit(do_not_specialize=["tokens", "rows"], do_not_specialize_on_alignment=["starts_ptr"])
def _groups_kernel(
    x_in,
    B_in,
    C_ptr,
    dy_ptr,
    decay_ptr,
    tokens,
    rows,
    starts_ptr,
    made,
    dB_ptr,
    dC_ptr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Compute gradients of B and C [T, g, SPLITS, n] for one chunk, from 1 / SPLITS of a group's
    heads, per program."""
    part = tl.program_id(0) % (GROUPS * SPLITS)
    tile = (tl.program_id(0) // (GROUPS * SPLITS)).to(tl.int64)
    _, begin, count, first = row_of_tile(starts_ptr, rows, tile, 1, SIZE, 2)
    if first >= count:
        return
    PER: tl.constexpr = HEADS // GROUPS // SPLITS
    t = tl.arange(0, SIZE)
    n = tl.arange(0, BLOCK_N)
    at = begin + first
    left = tl.minimum(count - first, SIZE)
    live = t < left
    dB = tl.zeros([SIZE, BLOCK_N], tl.float32)
    dC = tl.zeros([SIZE, BLOCK_N], tl.float32)
    dscores = tl.zeros([SIZE, SIZE], tl.float32)
    for index in range(PER):
        head = part * PER + index
        since, gain, whole = _decays(decay_ptr, tokens, head, at, left, t)
        from_start = tl.exp2(since.to(tl.float32))[:, None]
        to_end = tl.exp2((whole + gain).to(tl.float32))[:, None]
        pairs = tl.zeros([SIZE, SIZE], tl.float32)  # dY X^T
        for channel in range(0, WIDTH, BLOCK_P):
            p = channel + tl.arange(0, BLOCK_P)
            x, dy, state, dstate = _channels(
                x_in, dy_ptr, made, tile, head, at, left, t, p, n, HEADS, WIDTH, STATE
            )
            pairs = dot(dy, tl.trans(x), pairs, NARROW)
            dC = dot(dy.to(tl.float32) * from_start, state, dC, NARROW)
            dB = dot(x.to(tl.float32) * to_end, dstate, dB, NARROW)
        dscores += pairs * _weights(since, gain, t)
    B_ptr, BC_token, BC_group = B_in
    in_n = live[:, None] & (n < STATE)[None, :]
    bc = at * BC_token + part // SPLITS * BC_group + (t[:, None] * BC_token + n[None, :])
    dC = dot(dscores, tl.load(B_ptr + bc, mask=in_n, other=0.0), dC, NARROW)
    dB = dot(tl.trans(dscores), tl.load(C_ptr + bc, mask=in_n, other=0.0), dB, NARROW)
    place = (at * (GROUPS * SPLITS) + part) * STATE + (
        t[:, None] * (GROUPS * SPLITS * STATE) + n[None, :]
    )
    tl.store(dB_ptr + place, dB.to(dB_ptr.dtype.element_ty), mask=in_n)
    tl.store(dC_ptr + place, dC.to(dC_ptr.dtype.element_ty), mask=in_n)


def gradients(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    starts: Tensor,
    states: Tensor | None,
    dt_limit: tuple[float, float],
    dy: Tensor,
    tiles: BackTiles | None = None,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of `ssd_scan` with respect to x, dt, A_log, B, C, D, dt_bias and
    `states`, given `dy`, the gradient of its result. B and C must have equal strides."""
    (tokens, heads, width), (groups, state_dim), rows = x.shape, B.shape[1:], len(starts) - 1
    narrow = is_narrow(x, B, C)
    dy = dy.contiguous()
    tiles = tiles or back_tiles(rows, heads, width, state_dim, narrow)
    count = tokens // tiles.chunk + 2 * rows
    decay = decays(dt, A_log, dt_bias, dt_limit, starts, None, tiles.chunk, narrow)
    made = tuple(torch.empty(2, count, heads, width, state_dim, dtype=x.dtype, device=x.device))
    ends = None if states is None else (states, torch.empty_like(states))
    sizes: dict[str, object] = dict(
        HEADS=heads, WIDTH=width, GROUPS=groups, STATE=state_dim, SIZE=tiles.chunk
    )
    sizes |= dict(BLOCK_N=padded(state_dim), NARROW=NARROW if narrow else None)
    stages = 2 if narrow else 1
    given = (strided(x), strided(B), C, dy)
    _states_kernel[(heads * triton.cdiv(width, tiles.walk), rows, 2)](
        *given,
        decay,
        tokens,
        starts,
        ends,
        made,
        **sizes,
        BLOCK_P=tiles.walk,
        num_warps=4,
        num_stages=stages + 1,
    )
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rates = torch.empty(3, heads, tokens, device=x.device)
    chunks = (decay, tokens, rows, starts, made)
    parameters = (D, A_log, dt_bias, *dt_limit)
    sizes |= dict(BLOCK_P=tiles.width)
    _tokens_kernel[(count * heads,)](
        *given,
        *chunks,
        strided(dt),
        parameters,
        dx,
        rates,
        **sizes,
        num_warps=4 if state_dim <= 128 else 8,
        num_stages=1,
    )
    # Groups are split into the fewest parts that fill the GPU.
    per = heads // groups
    splits = next(
        n
        for n in range(1, per + 1)
        if n == per or (per % n == 0 and count * groups * n >= 2 * busy_programs())
    )
    shape = (2, tokens, groups, splits, state_dim)
    dtype = B.dtype if splits == 1 else torch.float32
    dB, dC = torch.empty(shape, dtype=dtype, device=x.device)
    _groups_kernel[(count * groups * splits,)](
        *given, *chunks, dB, dC, **sizes, SPLITS=splits, num_warps=8, num_stages=stages
    )
    dB, dC = (t.sum(2).to(B.dtype) for t in (dB, dC))
    dbias, dA_log, dD = (
        total.to(t.dtype) for total, t in zip(rates.sum(-1), (dt_bias, A_log, D), strict=True)
    )
    return (
        dx,
        rates[0].t().to(dt.dtype),
        dA_log,
        dB,
        dC,
        dD,
        dbias,
        None if ends is None else ends[1],
    )
