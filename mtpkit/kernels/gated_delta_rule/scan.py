# mypy: disable-error-code="assignment"
"""The gated delta rule over concatenated rows in Triton, chunk by chunk (Yang et al. 2024,
arXiv:2412.06464).

The corrections of a chunk solve a unit triangular system, whose inverse does not depend on the
state. A first kernel computes the inverses of all chunks at once, and the sums of log decays. In
the second kernel, a program owns some channels of one value head of one row, and their state stays
in registers while the program walks over the row's chunks in order. Per chunk it computes six
products on tensor cores: keys times state, queries times state, the inverse times the right-hand
side of the system, queries times keys, the resulting scores times the corrections, and the chunk's
addition to the state.

Sizes: L tokens of a chunk, P channels of a head per program, N key width, M readouts per token.
"""

from typing import NamedTuple

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
    with_rows,
)
from mtpkit.kernels.gated_delta_rule.reference import CHUNK
from mtpkit.kernels.rounding.reference import Noise
from mtpkit.kernels.rounding.tile import narrowed, packed

_FORGOTTEN = -100.0
"""Log decay at which nothing is left of a state in fp32."""
BLOCK = tl.constexpr(16)
"""Number of rows of a diagonal block, which is inverted row by row."""


class Places(NamedTuple):
    """Location of the rows' states, see `delta_varlen`."""

    states: Tensor | None = None
    slots: Tensor | None = None
    context_lens: Tensor | None = None
    noise: Noise | None = None


NOWHERE = Places()
"""Rows begin at zero, and their states are not kept."""


class Chunks(NamedTuple):
    """Results of the first kernel: inverses [T, h, L] and sums of log decays [h, T] of tokens in
    chunks of `size` = L."""

    inverses: Tensor
    since: Tensor
    size: int


@triton.jit
def dot32(a, b, NARROW):
    """Compute a @ b of fp32 tiles, accumulated in fp32: with tf32 products if NARROW is given, else
    in full precision."""
    if NARROW is None:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="tf32")


@triton.jit
def dot_in(a, b, NARROW):
    """Compute a @ b in fp32, from operands rounded to NARROW if it is not None."""
    if NARROW is None:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a.to(NARROW), b.to(NARROW))


@triton.jit
def _inverse(A, BLOCK_L: tl.constexpr, NARROW):
    """Compute (I + A)^-1 for A [L, L], which is zero on and above the diagonal. The diagonal blocks
    are inverted by forward substitution, which stays exact where keys repeat. With X the inverses
    of these blocks and M = X (A outside these blocks), the result is (I + M)^-1 X; only few powers
    of M are not zero."""
    COUNT: tl.constexpr = BLOCK_L // BLOCK
    blocks = tl.arange(0, COUNT)
    inner = tl.arange(0, BLOCK)
    on_diagonal = blocks[:, None, None, None] == blocks[None, None, :, None]
    # [C, B, B]
    diagonal = tl.sum(tl.where(on_diagonal, tl.reshape(A, [COUNT, BLOCK, COUNT, BLOCK]), 0.0), 2)
    row = inner[None, :, None]
    column = inner[None, None, :]
    solved = tl.where(row == column, 1.0, 0.0) + tl.zeros([COUNT, BLOCK, BLOCK], tl.float32)
    for i in range(1, BLOCK):
        weights = tl.sum(tl.where(row == i, diagonal, 0.0), 1)  # [C, B]
        found = tl.sum(weights[:, :, None] * solved, 1)  # [C, B]
        solved = tl.where(row == i, solved - found[:, None, :], solved)
    X = tl.reshape(tl.where(on_diagonal, solved[:, :, None, :], 0.0), [BLOCK_L, BLOCK_L])
    if COUNT > 1:
        l = tl.arange(0, BLOCK_L)  # noqa: E741
        off = tl.where((l // BLOCK)[:, None] == (l // BLOCK)[None, :], 0.0, A)
        M = dot32(X, off, NARROW)
        rest = tl.where(l[:, None] == l[None, :], 1.0, 0.0)
        if COUNT > 2:
            rest += dot32(M, M, NARROW)  # (I + M)^-1 = (I - M) (I + M^2), as M^4 = 0
        X = dot32(rest - dot32(M, rest, NARROW), X, NARROW)
    return X


@triton.jit(
    do_not_specialize=["tokens", "rows"],
    do_not_specialize_on_alignment=["starts_ptr", "contexts_ptr"],
)
def _prepare_kernel(
    k_in,
    g_ptr,
    beta_ptr,
    starts_ptr,
    contexts_ptr,
    inverse_ptr,
    since_ptr,
    tokens,
    rows,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NARROW: tl.constexpr,
    FORGOTTEN: tl.constexpr,
):
    """Compute the inverse and the sums of log decays of one chunk of one value head per program."""
    k_ptr, k_token, k_head = k_in
    head = tl.program_id(0)
    row, begin, count, first = row_of_tile(starts_ptr, rows, tl.program_id(1), 1, SIZE, 2)
    if contexts_ptr is not None:
        # Chunks are those of `_walk_kernel`: they end at positions that are multiples of SIZE, so
        # that a prompt that is split there has the same chunks.
        first -= (tl.maximum(tl.load(contexts_ptr + row), 0) % SIZE).to(tl.int32)
    if first >= count:
        return
    l = tl.arange(0, BLOCK_L)  # noqa: E741
    n = tl.arange(0, BLOCK_N)
    t = first + l
    live = (t >= 0) & (t < tl.minimum(count, first + SIZE))
    token = (begin + t).to(tl.int64)
    g = tl.load(g_ptr + token * HEADS + head, mask=live, other=0.0)
    # Terms are bounded: one that forgets everything would swamp the small ones after it.
    since = tl.cumsum(at_least(g, FORGOTTEN).to(since_ptr.dtype.element_ty), 0)
    tl.store(since_ptr + head.to(tl.int64) * tokens + token, since, mask=live)
    beta = tl.load(beta_ptr + token * HEADS + head, mask=live, other=0.0)
    k_ptrs = k_ptr + token[:, None] * k_token + head // (HEADS // GROUPS) * k_head + n[None, :]
    k = tl.load(k_ptrs, mask=live[:, None] & (n < STATE)[None, :], other=0.0)
    decay = tl.exp(tl.minimum((since[:, None] - since[None, :]).to(tl.float32), 0.0))
    A = tl.where(
        l[:, None] > l[None, :], dot_in(k, tl.trans(k), NARROW) * decay * beta[:, None], 0.0
    )
    inverse = _inverse(A, BLOCK_L, NARROW)
    inverse_ptrs = inverse_ptr + (token[:, None] * HEADS + head) * SIZE + l[None, :]
    tl.store(
        inverse_ptrs,
        inverse.to(inverse_ptr.dtype.element_ty),
        mask=live[:, None] & (l < SIZE)[None, :],
    )


@triton.jit
def _store_zeros(out_ptr, count, p, t, STRIDE, WIDTH):
    """Store zeros as the channels p [P] of the outputs of `count` tokens."""
    for start in range(0, count, t.shape[0]):
        token = start + t
        ptrs = out_ptr + token.to(tl.int64)[:, None] * STRIDE + p[None, :]
        mask = (token < count)[:, None] & (p < WIDTH)[None, :]
        tl.store(ptrs, tl.zeros(mask.shape, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=["starts_ptr", "slots_ptr", "contexts_ptr"],
)
def _walk_kernel(
    q_in,
    k_in,
    v_in,
    beta_ptr,
    inverse_ptr,
    since_ptr,
    tokens,
    starts_ptr,
    slots_ptr,
    contexts_ptr,
    states_in,
    noise,
    kept_ptr,
    u_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    READS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Walk over the chunks of one row per program, for BLOCK_P channels of one value head. With
    `kept_ptr`, the corrections and the states at the starts of chunks are stored for the backward.
    Longer than 70 lines because its parts share tiles."""
    q_ptr, q_token, q_read, q_head = q_in
    k_ptr, k_token, k_head = k_in
    v_ptr, v_token, v_head = v_in
    PARTS: tl.constexpr = (WIDTH + BLOCK_P - 1) // BLOCK_P
    row = tl.program_id(1)
    head = tl.program_id(0) // PARTS
    group = head // (HEADS // GROUPS)
    l = tl.arange(0, BLOCK_L)  # noqa: E741
    n = tl.arange(0, BLOCK_N)
    p = tl.program_id(0) % PARTS * BLOCK_P + tl.arange(0, BLOCK_P)
    begin = tl.load(starts_ptr + row) - tl.load(starts_ptr)
    count = (tl.load(starts_ptr + row + 1) - tl.load(starts_ptr) - begin).to(tl.int32)
    in_n = (n < STATE)[None, :]
    in_p = (p < WIDTH)[None, :]
    place = p[None, :] * STATE + n[:, None]  # of a state, [N, P]
    inside = (n < STATE)[:, None] & in_p
    context = begin * 0
    state = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    if states_in is not None:
        states_ptr, stride = states_in
        slot = tl.load(slots_ptr + row)
        context = tl.load(contexts_ptr + row)
        if slot < 0:
            _store_zeros(
                out_ptr + (begin * HEADS + head) * WIDTH, count, p, l, HEADS * WIDTH, WIDTH
            )
            return
        # An empty chunk leaves the state of a request that has begun as it is; that of a new
        # request becomes zero below.
        if (context > 0) & (count == 0):
            return
        states_ptr += slot * stride + head * (WIDTH * STATE)
        # The slot of a new request still holds the state of the request before it.
        state = tl.load(states_ptr + place, mask=only_if(inside, context > 0), other=0.0).to(
            tl.float32
        )
    since_ptr += head.to(tl.int64) * tokens
    later = l[:, None] >= l[None, :]
    # Chunks end at positions that are multiples of SIZE: the first one is shorter if the context
    # ends within a chunk.
    for start in range(-(context % SIZE).to(tl.int32), count, SIZE):
        left = tl.minimum(count - start, SIZE)
        live = (l >= -start) & (l < left)
        token = begin + start + l
        k_ptrs = k_ptr + token[:, None] * k_token + group * k_head + n[None, :]
        k = tl.load(k_ptrs, mask=live[:, None] & in_n, other=0.0)
        v_ptrs = v_ptr + token[:, None] * v_token + head * v_head + p[None, :]
        v = tl.load(v_ptrs, mask=live[:, None] & in_p, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + token * HEADS + head, mask=live, other=0.0)
        since = tl.load(since_ptr + token, mask=live, other=0.0)
        whole = tl.load(since_ptr + begin + start + left - 1)
        inverse_ptrs = inverse_ptr + (token[:, None] * HEADS + head) * SIZE + l[None, :]
        inverse = tl.load(inverse_ptrs, mask=live[:, None] & (l < SIZE)[None, :], other=0.0)
        from_start = tl.exp(since.to(tl.float32))[:, None]
        wanted = (v - dot_in(k, state, NARROW) * from_start) * beta[:, None]
        u = dot_in(inverse, wanted, NARROW)
        out_ptrs = (token[:, None] * (READS * HEADS) + head) * WIDTH + p[None, :]
        if kept_ptr is not None:
            tile = begin // SIZE + row * 2 + start // SIZE
            kept = kept_ptr + (tile * HEADS + head) * (WIDTH * STATE) + place
            tl.store(kept, state.to(kept_ptr.dtype.element_ty), mask=inside)
            u_ptrs = u_ptr + (token[:, None] * HEADS + head) * WIDTH + p[None, :]
            tl.store(u_ptrs, u.to(u_ptr.dtype.element_ty), mask=live[:, None] & in_p)
        if out_ptr is not None:
            decay = tl.exp(tl.minimum((since[:, None] - since[None, :]).to(tl.float32), 0.0))
            for read in tl.static_range(READS):
                q_ptrs = (
                    q_ptr + token[:, None] * q_token + read * q_read + group * q_head + n[None, :]
                )
                q = tl.load(q_ptrs, mask=live[:, None] & in_n, other=0.0)
                scores = tl.where(later, dot_in(q, tl.trans(k), NARROW) * decay, 0.0)
                out = dot_in(q, state, NARROW) * from_start + dot_in(scores, u, NARROW)
                ptrs = out_ptr + out_ptrs + read * (HEADS * WIDTH)
                tl.store(ptrs, out.to(out_ptr.dtype.element_ty), mask=live[:, None] & in_p)
        to_end = tl.exp((whole - since).to(tl.float32))[:, None]
        state = state * tl.exp(whole.to(tl.float32)) + dot_in(tl.trans(k), u * to_end, NARROW)
    if states_in is not None:
        kind: tl.constexpr = states_ptr.dtype.element_ty
        last = context + count - 1
        stored = narrowed(
            state, kind, noise, row, last, head, p, 0, WIDTH, STATE, COLUMNS_FIRST=True
        )
        tl.store(states_ptr + place, stored, mask=inside)


def narrow(*tensors: Tensor) -> tl.dtype | None:
    """The dtype to which operands of products are rounded: bf16 with bf16 inputs, else None."""
    return NARROW if all(t.dtype == torch.bfloat16 for t in tensors) else None


def value_block(q: Tensor, v: Tensor) -> int:
    """Largest number of channels of a value head that a program computes at a time."""
    return min(
        64 if narrow(q, v) is not None and q.shape[-1] <= 128 else SMALLEST_DOT, padded(v.shape[-1])
    )


def walk_block(q: Tensor, v: Tensor, rows: int) -> int:
    """`value_block` for programs that walk over the chunks of `rows` rows: heads are split to fill
    the GPU."""
    block, (heads, width) = value_block(q, v), v.shape[1:]
    while block > SMALLEST_DOT and rows * heads * triton.cdiv(width, block) < multiprocessors():
        block //= 2
    return block


def prepare(
    k: Tensor, g: Tensor, beta: Tensor, starts: Tensor, context_lens: Tensor | None = None
) -> Chunks:
    """Launch the first kernel: k [T, j, k], g and beta [T, h] contiguous, starts [R + 1]."""
    (tokens, groups, state_dim), heads, rows = k.shape, g.shape[1], len(starts) - 1
    low = narrow(k)
    # Products of fp32 spill registers in chunks of the size that suits bf16.
    size = SMALLEST_DOT if low is None or state_dim > 256 else CHUNK
    # In full precision, the sums of log decays are fp64, since small log decays are differences of
    # large sums.
    since = torch.empty(
        heads, tokens, dtype=torch.float64 if low is None else torch.float32, device=k.device
    )
    inverses = torch.empty(tokens, heads, size, dtype=k.dtype, device=k.device)
    _prepare_kernel[(heads, tokens // size + 2 * rows)](
        strided(k),
        g,
        beta,
        starts,
        context_lens,
        inverses,
        since,
        tokens,
        rows,
        HEADS=heads,
        GROUPS=groups,
        STATE=state_dim,
        SIZE=size,
        BLOCK_L=size,
        BLOCK_N=padded(state_dim),
        NARROW=low,
        FORGOTTEN=_FORGOTTEN,
        num_warps=4,
    )
    return Chunks(inverses, since, size)


def walk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    starts: Tensor,
    chunks: Chunks,
    places: Places = NOWHERE,
    out: Tensor | None = None,
    kept: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Launch the second kernel for q [T, m, j, k] and v [T, h, v]. It writes contiguous `out` [T,
    m, h, v], if given; and `kept`, if given: the states [tiles, h, v, k] at the starts of chunks,
    where chunk c of row r is tile starts[r] // L + 2 r + c, and the corrections [T, h, v]."""
    (tokens, heads, width), (groups, state_dim), rows = v.shape, k.shape[1:], len(starts) - 1
    low = narrow(q, k, v)
    states = places.states
    block = walk_block(q, v, rows)
    assert states is None or states[:1].is_contiguous()
    _walk_kernel[(heads * triton.cdiv(width, block), rows)](
        strided(q),
        strided(k),
        strided(v),
        beta,
        chunks.inverses,
        chunks.since,
        tokens,
        starts,
        places.slots,
        places.context_lens,
        None if states is None else (states, states.stride(0)),
        packed(places.noise),
        None if kept is None else kept[0],
        None if kept is None else kept[1],
        out,
        HEADS=heads,
        WIDTH=width,
        GROUPS=groups,
        STATE=state_dim,
        READS=q.shape[1],
        SIZE=chunks.size,
        BLOCK_L=chunks.size,
        BLOCK_P=block,
        BLOCK_N=padded(state_dim),
        NARROW=low,
        num_warps=4,
        num_stages=2,
    )


def delta_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    starts: Tensor,
    states: Tensor | None = None,
    slots: Tensor | None = None,
    context_lens: Tensor | None = None,
    noise: Noise | None = None,
) -> Tensor:
    """See the reference. With bf16 inputs, operands of products are rounded to bf16; other inputs
    run in fp32."""
    q = with_rows(q)
    k = with_rows(k)
    v = with_rows(v)
    chunks = prepare(k, g.contiguous(), (beta := beta.contiguous()), starts, context_lens)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    walk(q[:, None], k, v, beta, starts, chunks, Places(states, slots, context_lens, noise), out)
    return out
