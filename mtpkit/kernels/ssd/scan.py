# mypy: disable-error-code="assignment"
"""The chunked scan over concatenated rows in Triton.

A first kernel computes step sizes and decays, which the second one would otherwise compute on its
way from one chunk to the next, once for every part of a head. In the second one, a program owns
some channels of one or a few heads of a group of one row, whose state stays in registers while it
walks over the row's chunks in order. Per chunk it computes the products of C and B, which its heads
share, and per head three products on tensor cores: C times the state before the chunk, the effect
of the chunk's tokens on its outputs, and what the tokens add to the state. Every input is read once
per program, and y is written once.

Sizes: L tokens of a chunk, P channels of a head per program, N state width.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import (
    NARROW,
    SMALLEST_DOT,
    at_least,
    multiprocessors,
    only_if,
    padded,
    row_of_tile,
    strided,
)
from mtpkit.kernels.rounding.reference import Noise
from mtpkit.kernels.rounding.tile import narrowed, packed
from mtpkit.kernels.ssd.reference import KeptStates
from mtpkit.kernels.ssm_update.replay import step_size

FORGOTTEN = -144.0
"""Logarithm to base 2 of a decay after which nothing is left in fp32."""

_KNOWN_MULTIPLE = 16
"""Triton knows when it compiles which strides (in elements) and addresses (in bytes) are multiples
of this number."""


@dataclass(frozen=True)
class ScanTiles:
    """Sizes of a program of `ssd_varlen`."""

    chunk: int
    """Most tokens at a time; a power of two."""
    heads: int
    """Heads per program; a power of two that divides the heads of a group."""
    width: int
    """Channels of each head per program; a power of two."""
    num_warps: int
    num_stages: int


def scan_tiles(rows: int, heads: int, width: int, state_dim: int, dtype: torch.dtype) -> ScanTiles:
    """Choose tiles for `rows` rows of `heads` heads with states of `width` times `state_dim`.

    The rows' lengths are not known here. With few rows, heads are split so that programs still fill
    the GPU. Null rows count as rows, since only the device knows how many rows of a captured step
    are real in a replay.
    """
    if dtype != torch.bfloat16:
        return ScanTiles(16, 1, SMALLEST_DOT, num_warps=8, num_stages=1)
    most = 64 if state_dim <= 128 else 32 if state_dim <= 256 else SMALLEST_DOT
    block = min(most, padded(width))
    while block > SMALLEST_DOT and rows * heads * triton.cdiv(width, block) < multiprocessors():
        block //= 2
    return ScanTiles(64 if state_dim <= 256 else SMALLEST_DOT, 1, block, num_warps=4, num_stages=2)


@triton.jit
def dot(a, b, total, NARROW):
    """Compute a @ b + total in fp32, from operands rounded to NARROW if it is not None."""
    if NARROW is None:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a.to(NARROW), b.to(NARROW), total)


@triton.jit(
    do_not_specialize=["tokens", "rows"],
    do_not_specialize_on_alignment=["starts_ptr", "contexts_ptr"],
)
def _decay_kernel(
    dt_in,
    parameters,
    starts_ptr,
    contexts_ptr,
    decay_ptr,
    tokens,
    rows,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FORGOTTEN: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """Compute decay [h, T, 2] for one chunk of BLOCK_H heads per program: `since`, the logarithm to
    base 2 of the decay since the start of a token's chunk, and `gain`, chosen so that token j of a
    chunk adds to token i with the weight 2 ** (since[i] + gain[j])."""
    dt_ptr, dt_token = dt_in
    A_log_ptr, bias_ptr, low, high = parameters
    row, begin, count, first = row_of_tile(starts_ptr, rows, tl.program_id(1), 1, CHUNK, 2)
    if contexts_ptr is not None:
        first -= (tl.maximum(tl.load(contexts_ptr + row), 0) % CHUNK).to(tl.int32)
    if first >= count:
        return
    t = first + tl.arange(0, BLOCK_L)
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_heads = head < HEADS
    A = (
        -tl.exp(tl.load(A_log_ptr + head, mask=in_heads, other=0.0).to(tl.float32))
        * 1.4426950408889634
    )
    bias = tl.load(bias_ptr + head, mask=in_heads, other=0.0).to(tl.float32)
    live = (t >= 0) & (t < tl.minimum(count, first + CHUNK))
    mask = live[:, None] & in_heads[None, :]
    raw = tl.load(dt_ptr + (begin + t)[:, None] * dt_token + head[None, :], mask=mask, other=0.0)
    step = step_size(raw, bias[None, :], low, high)
    # Terms are bounded, so that a token that forgets nearly everything does not swamp the small
    # decays of later tokens.
    logs = tl.where(mask, at_least(step * A[None, :], FORGOTTEN), 0.0)
    since = tl.cumsum(logs.to(decay_ptr.dtype.element_ty), 0)
    gain = tl.log2(at_least(step, SMALLEST).to(since.dtype)) - since
    decay_ptrs = decay_ptr + (head[None, :].to(tl.int64) * tokens + (begin + t)[:, None]) * 2
    tl.store(decay_ptrs, since, mask=mask)
    tl.store(decay_ptrs + 1, gain, mask=mask)


@triton.jit
def _scan_chunk(x, since, gain, whole, B, C, scores, state, D, later, NARROW):
    """Compute y [L, P] of one chunk of a head that follows `state` [N, P], and the state after the
    chunk.

    Args:
        x: [L, P]; since, gain: [L], see `_decay_kernel`, -inf where there is no token; whole:
            `since` of the last token; B, C: [L, N]; scores: [L, L], C @ B^T.
        later: [L, L], whether token i is token j or a later one.
    """
    # Pairs with j after i are masked before the exponential is taken, since theirs could overflow.
    weights = scores * tl.exp2(
        tl.where(later, (since[:, None] + gain[None, :]).to(tl.float32), float("-inf"))
    )
    y = (
        dot(C, state, tl.zeros(x.shape, tl.float32), NARROW)
        * tl.exp2(since.to(tl.float32))[:, None]
    )
    y = dot(weights, x, y, NARROW) + D * x.to(tl.float32)
    added = x.to(tl.float32) * tl.exp2((whole + gain).to(tl.float32))[:, None]
    return y, dot(tl.trans(B), added, state * tl.exp2(whole.to(tl.float32)), NARROW)


@triton.jit
def _store_zeros(y_ptr, count, p, t, HEADS, WIDTH, BLOCK_H):
    """Store zeros as y of the `count` tokens at `y_ptr`, channels p [P] of BLOCK_H heads."""
    for start in range(0, count, t.shape[0]):
        token = start + t
        mask = (token < count)[:, None] & (p < WIDTH)[None, :]
        y_ptrs = y_ptr + token.to(tl.int64)[:, None] * (HEADS * WIDTH) + p[None, :]
        for k in tl.static_range(BLOCK_H):
            tl.store(y_ptrs + k * WIDTH, tl.zeros(mask.shape, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _state_places(states_in, place, head, p, n, WIDTH, STATE):
    """Pointers [N, P] to a head's state at a place of a tensor [places, h, p, n], and a mask of
    those that exist.

    Since states are contiguous, most of the pointers are constant offsets, which need no registers.
    """
    states_ptr, stride = states_in
    state_ptrs = (
        states_ptr + place * stride + head * (WIDTH * STATE) + p[None, :] * STATE + n[:, None]
    )
    return state_ptrs, (n < STATE)[:, None] & (p < WIDTH)[None, :]


@triton.jit
def _store_states(
    states_in, place, states, first, p, n, noise, row, position, WIDTH, STATE, BLOCK_H
):
    """Store the states [N, P] of BLOCK_H heads at a place, rounded as `narrowed` does."""
    for k in tl.static_range(BLOCK_H):
        state_ptrs, mask = _state_places(states_in, place, first + k, p, n, WIDTH, STATE)
        stored = narrowed(
            states[k],
            state_ptrs.dtype.element_ty,
            noise,
            row,
            position,
            first + k,
            p,
            0,
            WIDTH,
            STATE,
            COLUMNS_FIRST=True,
        )
        tl.store(state_ptrs, stored, mask=mask)


@triton.jit(
    do_not_specialize=["every", "tokens"],
    do_not_specialize_on_alignment=["starts_ptr", "slots_ptr", "contexts_ptr", "kept_first_ptr"],
)
def _scan_kernel(
    x_in,
    B_in,
    C_ptr,
    D_ptr,
    decay_ptr,
    tokens,
    starts_ptr,
    slots_ptr,
    contexts_ptr,
    states_in,
    kept_first_ptr,
    kept_in,
    every,
    noise,
    y_ptr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Scan BLOCK_P channels of each of BLOCK_H heads of one row per program; programs of one group
    are neighbours, as they read the same B and C. Longer than 70 lines because its parts share
    nearly all tiles and pointers."""
    x_ptr, x_token, x_head = x_in
    B_ptr, BC_token, BC_group = B_in
    PARTS: tl.constexpr = (WIDTH + BLOCK_P - 1) // BLOCK_P
    row = tl.program_id(1)
    first = tl.program_id(0) // PARTS * BLOCK_H
    group = first // (HEADS // GROUPS)
    t = tl.arange(0, BLOCK_L)
    n = tl.arange(0, BLOCK_N)
    p = tl.program_id(0) % PARTS * BLOCK_P + tl.arange(0, BLOCK_P)
    begin = tl.load(starts_ptr + row) - tl.load(starts_ptr)
    count = (tl.load(starts_ptr + row + 1) - tl.load(starts_ptr) - begin).to(tl.int32)
    y_ptr += first * WIDTH
    context = begin * 0
    slot = 0
    state = ()
    if states_in is not None:
        slot = tl.load(slots_ptr + row)
        context = tl.load(contexts_ptr + row)
        if slot < 0:
            _store_zeros(y_ptr + begin * (HEADS * WIDTH), count, p, t, HEADS, WIDTH, BLOCK_H)
            return
        # An empty chunk leaves the state of a request that has begun as it is; that of a new
        # request becomes zero below.
        if (context > 0) & (count == 0):
            return
        for k in tl.static_range(BLOCK_H):
            state_ptrs, inside = _state_places(states_in, slot, first + k, p, n, WIDTH, STATE)
            # The slot of a new request still holds the state of the request before it.
            held = tl.load(state_ptrs, mask=only_if(inside, context > 0), other=0.0).to(tl.float32)
            state = state + (held,)  # noqa: RUF005
    else:
        for _ in tl.static_range(BLOCK_H):
            state = state + (tl.zeros([BLOCK_N, BLOCK_P], tl.float32),)  # noqa: RUF005
    x_ptr += first * x_head
    decay_ptr += first.to(tl.int64) * tokens * 2
    pair = tl.arange(0, 2)[None, :]
    later = t[:, None] >= t[None, :]
    # Chunks end at positions that are multiples of CHUNK; the first chunk lacks the tokens before
    # the row's first.
    for start in range(-(context % CHUNK).to(tl.int32), count, CHUNK):
        token = begin + start
        left = tl.minimum(count - start, CHUNK)
        live = (t >= -start) & (t < left)
        bc_mask = live[:, None] & (n < STATE)[None, :]
        x_mask = live[:, None] & (p < WIDTH)[None, :]
        bc = token * BC_token + group * BC_group + (t[:, None] * BC_token + n[None, :])
        B = tl.load(B_ptr + bc, mask=bc_mask, other=0.0)
        C = tl.load(C_ptr + bc, mask=bc_mask, other=0.0)
        scores = dot(C, tl.trans(B), tl.zeros([BLOCK_L, BLOCK_L], tl.float32), NARROW)
        after = ()
        for k in tl.static_range(BLOCK_H):
            x_ptrs = x_ptr + token * x_token + k * x_head + (t[:, None] * x_token + p[None, :])
            x = tl.load(x_ptrs, mask=x_mask, other=0.0)
            decay_ptrs = decay_ptr + (k * tokens + token) * 2
            whole = tl.load(decay_ptrs + (left - 1) * 2)
            # Loaded as pairs, since and gain are loaded once, not once for every layout that they
            # are used in.
            both = tl.load(
                decay_ptrs + (t[:, None] * 2 + pair), mask=live[:, None], other=float("-inf")
            )
            since, gain = tl.split(both)
            D = tl.load(D_ptr + first + k).to(tl.float32)
            y, one = _scan_chunk(x, since, gain, whole, B, C, scores, state[k], D, later, NARROW)
            y_ptrs = (
                y_ptr
                + token * (HEADS * WIDTH)
                + (t[:, None] * (HEADS * WIDTH) + (k * WIDTH + p)[None, :])
            )
            tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=x_mask)
            after = after + (one,)  # noqa: RUF005
        state = after
        if kept_in is not None:
            position = context + start + CHUNK
            place = tl.load(kept_first_ptr + row)
            if (place >= 0) & (position % every == 0) & (start + CHUNK <= count):
                place += position // every - context // every - 1
                _store_states(
                    kept_in, place, state, first, p, n, None, row, 0, WIDTH, STATE, BLOCK_H
                )
    if states_in is not None:
        # Loading the slot again keeps the compiler from holding all pointers in registers since the
        # first load.
        place = tl.load(slots_ptr + row)
        last = context + count - 1
        _store_states(states_in, place, state, first, p, n, noise, row, last, WIDTH, STATE, BLOCK_H)


def is_narrow(*tensors: Tensor) -> bool:
    """Whether the operands of products are rounded to bf16: if all inputs are in bf16, and aligned
    so that they can be copied ahead of their use. On an H200, products of unaligned operands came
    out wrong in loops (Triton 3.6)."""

    def aligned(t: Tensor) -> bool:
        strides = [
            stride for stride, size in zip(t.stride()[:-1], t.shape, strict=False) if size > 1
        ]
        return all(place % _KNOWN_MULTIPLE == 0 for place in (t.data_ptr(), *strides))

    return all(t.dtype == torch.bfloat16 and aligned(t) for t in tensors)


def alike(B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """Return B and C with equal strides, as kernels need them; views of one projection have equal
    strides already."""
    return (
        (B, C)
        if B.stride() == C.stride() and B.stride(-1) == 1
        else (B.contiguous(), C.contiguous())
    )


def decays(
    dt: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    starts: Tensor,
    context_lens: Tensor | None,
    chunk: int,
    narrow: bool,
) -> Tensor:
    """Compute log decays [h, T, 2] in chunks of `chunk` tokens, see `_decay_kernel`; arguments as
    for `ssd_varlen`."""
    (tokens, heads), rows = dt.shape, len(starts) - 1
    # Without rounding to bf16, sums of logarithms are in fp64, since small decays are differences
    # of large sums.
    decay = torch.empty(
        heads, tokens, 2, dtype=torch.float32 if narrow else torch.float64, device=dt.device
    )
    # At least 2: on the GPU, a running sum down a single column is wrong.
    block = min(32, triton.next_power_of_2(max(2, heads)))
    _decay_kernel[(triton.cdiv(heads, block), tokens // chunk + 2 * rows)](
        strided(dt),
        (A_log, dt_bias, *dt_limit),
        starts,
        context_lens,
        decay,
        tokens,
        rows,
        HEADS=heads,
        CHUNK=chunk,
        BLOCK_L=triton.next_power_of_2(chunk),
        BLOCK_H=block,
        FORGOTTEN=FORGOTTEN,
        SMALLEST=torch.finfo(torch.float32).tiny,
        num_warps=4,
    )
    return decay


def _places(states: Tensor | None) -> tuple[Tensor, int] | None:
    """States [places, h, p, n] and the stride of their places, or None; each state must be
    contiguous."""
    if states is None:
        return None
    assert states[:1].is_contiguous()
    return states, states.stride(0)


def ssd_varlen(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    starts: Tensor,
    chunk_size: int,
    states: Tensor | None = None,
    slots: Tensor | None = None,
    context_lens: Tensor | None = None,
    kept: KeptStates | None = None,
    noise: Noise | None = None,
    *,
    tiles: ScanTiles | None = None,
    wide: bool = False,
) -> Tensor:
    """See the reference. With bf16 inputs, operands of products are rounded to bf16; other inputs
    run in fp32. With `wide`, y is fp32 whatever the dtype of x."""
    (tokens, heads, width), (groups, state_dim), rows = x.shape, B.shape[1:], len(starts) - 1
    assert states is not None or kept is None
    narrow = is_narrow(x, B, C)
    tiles = tiles or scan_tiles(rows, heads, width, state_dim, x.dtype if narrow else torch.float32)
    # The largest divisor of the chunk size that fits a tile, so that chunks end at every multiple
    # of the chunk size.
    chunk = next(
        size for size in range(min(tiles.chunk, chunk_size), 0, -1) if chunk_size % size == 0
    )
    B, C = alike(B, C)
    y = torch.empty(x.shape, dtype=torch.float32 if wide else x.dtype, device=x.device)
    decay = decays(dt, A_log, dt_bias, dt_limit, starts, context_lens, chunk, narrow)
    _scan_kernel[(heads // tiles.heads * triton.cdiv(width, tiles.width), rows)](
        strided(x),
        strided(B),
        C,
        D,
        decay,
        tokens,
        starts,
        slots,
        context_lens,
        _places(states),
        None if kept is None else kept.first,
        None if kept is None else _places(kept.states),
        0 if kept is None else kept.every,
        packed(noise),
        y,
        HEADS=heads,
        WIDTH=width,
        GROUPS=groups,
        STATE=state_dim,
        CHUNK=chunk,
        BLOCK_L=padded(chunk),
        BLOCK_H=tiles.heads,
        BLOCK_P=tiles.width,
        BLOCK_N=padded(state_dim),
        NARROW=NARROW if narrow else None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return y
