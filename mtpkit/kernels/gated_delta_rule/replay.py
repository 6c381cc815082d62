# mypy: disable-error-code="assignment,misc"
"""`delta_replay_update` in Triton: the state is streamed from memory once, and everything else is
small.

The step's keys and queries are the columns of one matrix C. One product of the state with C, and
one of the ring's corrections with the scores of C against the ring's keys, give what all columns
read from the past. Products with C run over CHUNK channels of the key at a time, so that a program
needs few registers and many programs fit on a multiprocessor; the columns are scaled to unit length
after that. (New keys are rounded when they enter the ring, after the step has used them.) Then the
new tokens are processed in order: each computes its correction from the column of its key and adds
it to the columns of later keys and of its own and later queries. In the end, a query's column is
its output.

The state is written in place without a barrier, since each element is computed from its own old
value. Old and new ring entries never share a place, so the programs of a row may run in any order.

Sizes: E old entries of the ring, T new tokens, O columns (the keys in the first half, the queries
in the second), P channels of a value head per program, N channels of the key. Entries and tokens
that do not exist are zero.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import (
    NARROW,
    SMALLEST_DOT,
    Early,
    at_least,
    busy_programs,
    load,
    padded,
    strided,
    wait_for_previous,
)
from mtpkit.kernels.gated_delta_rule.reference import EPSILON
from mtpkit.kernels.ring import ring_capacity
from mtpkit.kernels.rounding.reference import Noise
from mtpkit.kernels.rounding.tile import narrowed, packed
from mtpkit.kernels.ssm_update.replay import dot, load_masks, places, step_size

_FORGOTTEN = -100.0
"""Log decay at which nothing is left of a state in fp32."""
_CHANNELS = 32
"""Channels of a value head per program."""
_MANY = 7
"""If there would be fewer programs than this multiple of `busy_programs`, a program takes half as
many channels."""
_SMALLEST_HALF = 4
"""Half of the smallest number of columns of C, which is the smallest that a product of tiles can
have."""


@triton.jit
def log_decay(a, A_log, bias, FORGOTTEN):
    """Compute g = -exp(A_log) softplus(a + bias) in fp32, but at least FORGOTTEN: otherwise the log
    decay of a token that forgets nearly everything would swamp the small log decays of later tokens
    in sums."""
    return at_least(-tl.exp(A_log) * step_size(a, bias, 0.0, float("inf")), FORGOTTEN)


@triton.jit
def _columns(q_in, k_in, row, group, o, n, TOKENS, HALF, STATE):
    """Load the channels n [N] of keys and queries as columns [N, O], not yet scaled."""
    q_ptr, q_row, q_token, q_head = q_in
    k_ptr, k_row, k_token, k_head = k_in
    in_n = (n < STATE)[:, None]
    k_ptrs = k_ptr + row * k_row + group * k_head + o[None, :] * k_token + n[:, None]
    q_ptrs = q_ptr + row * q_row + group * q_head + (o - HALF)[None, :] * q_token + n[:, None]
    keys = tl.load(k_ptrs, mask=in_n & (o < TOKENS)[None, :], other=0.0)
    queries = tl.load(q_ptrs, mask=in_n & ((o >= HALF) & (o < HALF + TOKENS))[None, :], other=0.0)
    return tl.where((o < HALF)[None, :], keys, queries)


@triton.jit
def _keys(k_in, row, group, t, n, TOKENS, STATE):
    """Load the channels n [N] of the new keys as rows [T, N], not yet scaled."""
    k_ptr, k_row, k_token, k_head = k_in
    k_ptrs = k_ptr + row * k_row + group * k_head + t[:, None] * k_token + n[None, :]
    return tl.load(k_ptrs, mask=(t < TOKENS)[:, None] & (n < STATE)[None, :], other=0.0)


@Early
@triton.jit
def _replay_kernel(
    state_ptr,
    rings,
    rows,
    q_in,
    k_in,
    v_in,
    a_in,
    b_in,
    parameters,
    ancestors_ptr,
    noise,
    out_ptr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    LENGTH: tl.constexpr,
    CAPACITY: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HALF: tl.constexpr,
    NARROW: tl.constexpr,
    FORGOTTEN: tl.constexpr,
    LARGEST: tl.constexpr,
    EPSILON: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute BLOCK_P channels of one value head of one row per program, with STAGES parts of CHUNK
    key channels in flight. WHOLE: all blocks of the state are full. Longer than 70 lines because
    its parts share nearly all tiles."""
    wait_for_previous(EARLY)
    ring_k_ptr, ring_u_ptr, ring_g_ptr = rings
    v_ptr, v_row, v_token, v_head = v_in
    a_ptr, a_row, a_token = a_in
    b_ptr, b_row, b_token = b_in
    A_log_ptr, bias_ptr = parameters
    PER_GROUP: tl.constexpr = HEADS // GROUPS
    part = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    group = head // PER_GROUP
    p = part * BLOCK_P + tl.arange(0, BLOCK_P)
    e = tl.arange(0, BLOCK_E)
    t = tl.arange(0, BLOCK_T)
    o = tl.arange(0, 2 * HALF)
    in_p = p < WIDTH
    is_new = t < TOKENS
    token = o % HALF
    out_ptrs = (
        out_ptr + (row * TOKENS + (o - HALF)[None, :]) * (HEADS * WIDTH) + head * WIDTH + p[:, None]
    )
    out_mask = in_p[:, None] & ((o >= HALF) & (o < HALF + TOKENS))[None, :]
    slot, count, old_place, new_place = places(rows, row, e, t, LENGTH)
    if slot < 0:
        tl.store(out_ptrs, tl.zeros([BLOCK_P, 2 * HALF], out_ptr.dtype.element_ty), mask=out_mask)
        return
    state_ptr += (slot * HEADS + head) * (WIDTH * STATE)
    is_old = e < count

    # Loaded before the loop, so that the kernel waits for memory only once.
    old_u_ptrs = ring_u_ptr + old_place[None, :] * (HEADS * WIDTH) + head * WIDTH + p[:, None]
    old_u = tl.load(old_u_ptrs, mask=in_p[:, None] & is_old[None, :], other=0.0)  # [P, E]
    v_ptrs = v_ptr + row * v_row + t[None, :] * v_token + head * v_head + p[:, None]
    values = tl.load(v_ptrs, mask=in_p[:, None] & is_new[None, :], other=0.0)  # [P, T]
    old_g = tl.load(ring_g_ptr + old_place * HEADS + head, mask=is_old, other=0.0)
    a = tl.load(a_ptr + row * a_row + t * a_token + head, mask=is_new, other=0.0)
    A_log = tl.load(A_log_ptr + head).to(tl.float32)
    bias = tl.load(bias_ptr + head).to(tl.float32)
    b = tl.load(b_ptr + row * b_row + t * b_token + head, mask=is_new, other=0.0)

    # Products of the state, the ring's keys and the new keys with the columns, CHUNK channels of
    # the key at a time.
    state_ptrs = state_ptr + p[:, None] * STATE
    ring_k_ptrs = ring_k_ptr + old_place[:, None] * (GROUPS * STATE) + group * STATE
    held = tl.zeros([BLOCK_P, 2 * HALF], tl.float32)
    scores = tl.zeros([BLOCK_T, 2 * HALF], tl.float32)
    old_scores = tl.zeros([BLOCK_E, 2 * HALF], tl.float32)
    squares = tl.zeros([2 * HALF], tl.float32)
    for start in tl.range(0, BLOCK_N, CHUNK, num_stages=STAGES):
        n = start + tl.arange(0, CHUNK)
        in_n = (n < STATE)[None, :]
        state = load(state_ptrs + n[None, :], in_p[:, None] & in_n, WHOLE)
        old_k = tl.load(ring_k_ptrs + n[None, :], mask=is_old[:, None] & in_n, other=0.0)
        columns = _columns(q_in, k_in, row, group, o, n, TOKENS, HALF, STATE)
        held += dot(state, columns, NARROW)
        old_scores += dot(old_k, columns, NARROW)
        scores += dot(_keys(k_in, row, group, t, n, TOKENS, STATE), columns, NARROW)
        squares += tl.sum(columns.to(tl.float32) * columns.to(tl.float32), 0)
    length = tl.rsqrt(squares + EPSILON)
    of_token = token[None, :] == t[:, None]  # [T, O]
    key_length = tl.sum(tl.where(of_token & (o < HALF)[None, :], length[None, :], 0.0), 1)  # [T]
    scale = length * tl.where(o >= HALF, 1.0 / tl.sqrt(STATE + 0.0), 1.0)
    held = held * scale[None, :]
    old_scores = old_scores * scale[None, :]
    scores *= key_length[:, None] * scale[None, :]
    # All parts of the heads of a group have the same keys; one program stores them.
    if (part == 0) & (head % PER_GROUP == 0):
        for start in range(0, BLOCK_N, CHUNK):
            n = start + tl.arange(0, CHUNK)
            keys = _keys(k_in, row, group, t, n, TOKENS, STATE).to(tl.float32) * key_length[:, None]
            new_k_ptrs = (
                ring_k_ptr + new_place[:, None] * (GROUPS * STATE) + group * STATE + n[None, :]
            )
            tl.store(
                new_k_ptrs,
                keys.to(ring_k_ptr.dtype.element_ty),
                mask=is_new[:, None] & (n < STATE)[None, :],
            )

    # [T, O]: keys read only earlier tokens
    reads = tl.where(o < HALF, token - 1, token)[None, :] >= t[:, None]
    if ancestors_ptr is not None:
        seen = load_masks(ancestors_ptr, row, t, t, TOKENS)
        reads = load_masks(ancestors_ptr, row, t, token, TOKENS) & (
            (o >= HALF)[None, :] | ~of_token
        )
    g = tl.where(is_new, log_decay(a, A_log, bias, FORGOTTEN), 0.0)
    if part == 0:
        tl.store(ring_g_ptr + new_place * HEADS + head, g, mask=is_new)
    beta = tl.sigmoid(b.to(tl.float32))
    # [T]
    since = tl.cumsum(g, 0) if ancestors_ptr is None else tl.sum(tl.where(seen, g[:, None], 0.0), 0)
    # [E]
    to_last = tl.cumsum(old_g, 0, reverse=True) - old_g
    whole = tl.sum(old_g, 0)
    of_column = tl.sum(tl.where(of_token, since[:, None], 0.0), 0)  # [O]
    between = tl.exp(tl.minimum(of_column[None, :] - since[:, None], 0.0))
    # A token whose value or rate is not finite spoils what reads it: NaN weights for its
    # correction, which is cleared.
    spoilt = tl.sum(values.to(tl.float32) * 0.0, 0) + beta * 0.0  # [T]
    weights = tl.where(reads, scores * between + spoilt[:, None], 0.0)  # [T, O]
    held *= tl.exp(whole + of_column)[None, :]
    held += dot(old_u, old_scores * tl.exp(to_last[:, None] + of_column[None, :]), None)
    for i in range(TOKENS):
        is_i = t == i
        v = tl.sum(tl.where(is_i[None, :], values.to(tl.float32), 0.0), 1)
        rate = tl.sum(tl.where(is_i, beta, 0.0), 0)
        place = tl.sum(tl.where(is_i, new_place - slot * LENGTH, 0), 0)
        u = rate * (v - tl.sum(tl.where(o[None, :] == i, held, 0.0), 1))  # [P]
        # In the products below, NaN or an infinity would reach tokens that do not see this one, as
        # their weight of 0 times NaN is NaN.
        finite = tl.where(u != u, 0.0, tl.minimum(tl.maximum(u, -LARGEST), LARGEST))
        held += finite[:, None] * tl.sum(tl.where(is_i[:, None], weights, 0.0), 0)[None, :]
        new_u_ptrs = ring_u_ptr + (slot * LENGTH + place) * (HEADS * WIDTH) + head * WIDTH + p
        tl.store(new_u_ptrs, u.to(ring_u_ptr.dtype.element_ty), mask=in_p)
    tl.store(out_ptrs, held.to(out_ptr.dtype.element_ty), mask=out_mask)
    if count + TOKENS > CAPACITY:
        # Loading the state again from the cache is cheaper than keeping it in registers.
        decayed = old_u.to(tl.float32) * tl.exp(to_last)[None, :]
        for start in range(0, BLOCK_N, CHUNK):
            n = start + tl.arange(0, CHUNK)
            in_n = (n < STATE)[None, :]
            old_k = tl.load(ring_k_ptrs + n[None, :], mask=is_old[:, None] & in_n, other=0.0)
            old = load(state_ptrs + n[None, :], in_p[:, None] & in_n, WHOLE).to(tl.float32)
            folded = old * tl.exp(whole) + dot(decayed, old_k, NARROW)
            kind: tl.constexpr = state_ptr.dtype.element_ty
            last = tl.load(rows[1] + row) - 1
            stored = narrowed(folded, kind, noise, row, last, head, p, start, WIDTH, STATE)
            tl.store(state_ptrs + n[None, :], stored, mask=in_p[:, None] & in_n)


def delta_replay_update(
    state: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_g: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    ring_lens: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    ancestors: Tensor | None = None,
    noise: Noise | None = None,
    *,
    block_p: int | None = None,
    num_warps: int = 1,
    chunk: int = 32,
    num_stages: int = 3,
) -> Tensor:
    """See the reference. A program computes `block_p` channels of a value head. It loops over the
    key's channels in parts of `chunk` channels, of which `num_stages` are in flight. If `block_p`
    is None, it is halved where there are few states, to get more programs. A program has one warp
    by default, since several warps would wait for each other many times."""
    (rows, tokens, heads, width), (groups, state_dim) = v.shape, k.shape[2:]
    capacity = ring_capacity(length := ring_k.shape[1])
    assert tokens <= length - capacity, f"{tokens} new tokens in a ring of {length}"
    assert all(buffer.is_contiguous() for buffer in (state, ring_k, ring_u, ring_g))
    if block_p is None:
        block_p = (
            _CHANNELS
            if rows * heads * triton.cdiv(width, _CHANNELS) >= _MANY * busy_programs()
            else _CHANNELS // 2
        )
    block_n = padded(state_dim)
    block_p = min(block_p, padded(width))
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    _replay_kernel[(triton.cdiv(width, block_p), heads, rows)](
        state,
        (ring_k, ring_u, ring_g),
        (slots.contiguous(), context_lens.contiguous(), ring_lens.contiguous()),
        *map(strided, (q, k, v, a, b)),
        (A_log, dt_bias),
        None if ancestors is None else ancestors.contiguous(),
        packed(noise),
        out,
        HEADS=heads,
        WIDTH=width,
        GROUPS=groups,
        STATE=state_dim,
        LENGTH=length,
        CAPACITY=capacity,
        TOKENS=tokens,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        CHUNK=min(chunk, block_n),
        BLOCK_E=padded(capacity),
        BLOCK_T=max(SMALLEST_DOT, triton.next_power_of_2(tokens)),
        HALF=max(_SMALLEST_HALF, triton.next_power_of_2(tokens)),
        NARROW=NARROW if q.dtype == k.dtype == v.dtype == torch.bfloat16 else None,
        FORGOTTEN=_FORGOTTEN,
        LARGEST=torch.finfo(torch.float32).max,
        EPSILON=EPSILON,
        WHOLE=width % block_p == 0 and state_dim == block_n,
        STAGES=num_stages,
        num_warps=num_warps,
    )
    return out
