"""Find where top-k, top-p and min-p cut a row, without a sort: one program per row.

The weight of a logit x is w(x) = 2^((x - m) * scale), its probability up to a factor, with m the
row's largest logit and scale = log2(e) / temperature. A cut is (t, last): tokens with x > t are
kept, and tokens with x == t if their index is <= last. t is the largest number such that the tokens
>= t reach a target: k tokens for top-k, the share p of the weight for top-p.

The pass over the logits that finds m also stores the largest logit of each group of 32 tokens.
These maxima bound t from below: if k groups reach a value, at least k tokens do; the same holds for
weight. Usually few groups reach the bound; then only their tokens are read, and bisection over the
bits of floats finds t among them (`_cut_groups`). In a flat distribution several passes over the
row find t (`_cut_row`).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.sampling.search import keep_ties, search, weight_from
from mtpkit.kernels.sampling.weights import (
    bisect,
    first_above,
    has_token,
    key_of,
    row_statistics,
    scale_of,
    value_of,
    weight_of,
)

GROUP = tl.constexpr(32)
"""Neighbouring tokens in a group."""
# resolution of the bound in keys, a relative 2^-11; it need not be exact
_COARSE = tl.constexpr(4096)


class Tuning(NamedTuple):
    """Sizes of `cut_kernel`."""

    room: int = 4096
    """Tokens that a program holds in registers, and the length of its buffer."""
    tile: int = 4096
    """Tokens that a pass over a row reads at a time."""
    pivot_tile: int = 2048
    """Tokens that a pass with pivots reads at a time; it keeps eight sums per token in
    registers."""
    stages: int = 4
    """Pipeline stages of a pass: tiles in flight, the current one included."""
    num_warps: int = 16
    max_registers: int = 128


class Cut(NamedTuple):
    """The cut of N rows, and the weight of the tokens that it keeps."""

    t: Tensor
    """[N] float32."""
    last: Tensor
    """[N] int32."""
    weight: Tensor
    """[N] float32."""


FEW = Tuning()
MANY = Tuning(tile=2048, pivot_tile=1024, num_warps=8)
"""Sizes for at most one row per multiprocessor, and for more rows, where two programs share a
multiprocessor."""


@triton.jit
def _bound(row, heads, inside, k, p, floor, total, num_groups):
    """Lower bound of the cut's t, from the largest logits of the groups, heads [HEADS]."""
    vocab_size = row[1]
    m = row[2]
    scale = row[3]
    low = key_of(floor)
    high = key_of(m) + 1
    one = tl.where(inside, 1.0, 0.0)
    if k < vocab_size:
        if k <= num_groups:
            low = bisect(heads, one, 0.0, k.to(tl.float32), low, high, _COARSE)
    elif floor == float("-inf"):
        w = one * weight_of(heads, m, scale)
        if tl.sum(w, 0) >= p * total:
            low = bisect(heads, w, 0.0, p * total, low, high, _COARSE)
        else:
            # All tokens lighter than this weigh less than the share 1 - p together.
            # 0.99 leaves room for rounding, since the bound must not exceed t.
            lightest = tl.maximum(0.99 * (1 - p) * total / vocab_size, 1e-37)
            low = key_of(m + tl.log2(lightest) / scale)
    return value_of(low)


@triton.jit
def _filters(top_k, top_p, min_p, place, vocab_size, m, scale, TOP_K, TOP_P, MIN_P):
    """(k, p, floor) of a row, where floor is the smallest logit that min-p keeps; V, 1 and -inf if
    a filter is off."""
    floor = tl.full([], float("-inf"), tl.float32)
    k = tl.zeros([], tl.int32) + vocab_size
    p = tl.full([], 1.0, tl.float32)
    if TOP_K:
        k = tl.load(top_k + place).to(tl.int32)
    if TOP_P:
        p = tl.load(top_p + place).to(tl.float32)
    if MIN_P:
        floor = m + tl.log2(tl.load(min_p + place).to(tl.float32)) / scale
    return k, p, floor


@triton.jit
def _cut_groups(row, buffer, found, num_found, bound, floor, k, p, total, uniform, DRAW, ROOM):
    """Return (t, last, weight of the kept tokens, token drawn) for a row whose tokens >= bound are
    all in the groups `found` [HEADS]."""
    line, vocab_size, m, scale = row
    groups = found.to(tl.int32)
    tl.store(
        buffer + tl.cumsum(groups, 0) - 1, tl.arange(0, groups.shape[0]).to(tl.int64), mask=found
    )
    # Threads read entries of the buffer that other threads have written.
    tl.debug_barrier()
    slot = tl.arange(0, ROOM)
    inside = slot < num_found * GROUP
    index = (
        tl.load(buffer + slot // GROUP, mask=inside, other=0).to(tl.int32) * GROUP + slot % GROUP
    )
    inside = inside & (index < vocab_size)
    x = tl.load(line + index, mask=inside, other=float("-inf")).to(tl.float32)
    one = tl.where(inside, 1.0, 0.0)
    w = one * weight_of(x, m, scale)

    low = key_of(bound)
    high = key_of(m) + 1
    t = floor
    kept = total
    last = tl.zeros([], tl.int32) + vocab_size
    if k < vocab_size:
        low = bisect(x, one, 0.0, k.to(tl.float32), low, high, 1)
        t = value_of(low)
    if t > float("-inf"):
        kept = tl.sum(tl.where(x >= t, w, 0.0), 0)
    if p < 1:
        target = p * kept
        t = value_of(bisect(x, w, 0.0, target, low, high, 1))
        equal = ((x == t) & inside).to(tl.int32)
        num_equal = tl.sum(equal, 0)
        stay, kept = keep_ties(t, m, scale, target, tl.sum(tl.where(x > t, w, 0.0), 0), num_equal)
        if stay < num_equal:
            last = tl.max(tl.where((equal > 0) & (tl.cumsum(equal, 0) == stay), index, 0), 0)
    token = tl.full([], -1, tl.int32)
    if DRAW:
        drawn = tl.where((x > t) | ((x == t) & (index <= last)), w, 0.0).to(tl.float64)
        chosen = first_above(drawn, uniform * tl.sum(drawn, 0), ROOM)
        token = tl.sum(tl.where(slot == chosen, index, 0), 0)
    return t, last, kept, token


@triton.jit
def _cut_row(
    row, buffer, bound, floor, k, p, total, TOP_K, TOP_P, MIN_P, ROOM, TILE, PIVOT_TILE, STAGES
):
    """Return (t, last, weight of the kept tokens) for any row, however many tokens are >= bound."""
    vocab_size = row[1]
    t = floor
    kept = total
    last = tl.zeros([], tl.int32) + vocab_size
    if MIN_P and floor > float("-inf"):
        kept = weight_from(row, floor, TILE, STAGES)
    if TOP_K and k < vocab_size:
        nothing = tl.full([], float("-inf"), tl.float32)
        target = k.to(tl.float32)
        most = last.to(tl.float32)
        t, last, kept = search(
            row, buffer, bound, nothing, target, most, False, ROOM, TILE, PIVOT_TILE, STAGES
        )
    if TOP_P and p < 1:
        bound = tl.maximum(bound, t)
        t, last, kept = search(
            row, buffer, bound, t, p * kept, kept, True, ROOM, TILE, PIVOT_TILE, STAGES
        )
    return t, last, kept


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p", "uniforms"])
def cut_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    heads,
    num_groups,
    buffers,
    cut,
    uniforms,
    uniform_stride,
    tokens,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    DRAW: tl.constexpr,
    CHUNKS: tl.constexpr,
    HEADS: tl.constexpr,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
    PIVOT_TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Store the cut of each row.

    With DRAW, also store the drawn token of each row that `_cut_groups` cuts, and -1 for other
    rows. Rows of temperature 0 and invalid rows have no cut.
    """
    place = tl.program_id(0).to(tl.int64)
    if DRAW:
        tl.store(tokens + place, -1)
    heat = tl.load(temperature + place).to(tl.float32)
    if heat == 0:
        return
    scale = scale_of(heat)
    vocab_size = logits.vocab_size
    m, parts = row_statistics(logits, place, scale, CHUNKS)
    if not has_token(m):
        return
    kept = tl.sum(parts, 0)
    last = tl.zeros([], tl.int32) + vocab_size
    k, p, t = _filters(top_k, top_p, min_p, place, vocab_size, m, scale, TOP_K, TOP_P, MIN_P)
    if (k < vocab_size) | (p < 1) | (t > float("-inf")):
        row = (logits.data + place * logits.stride, vocab_size, m, scale)
        buffer = buffers + place * ROOM
        group = tl.arange(0, HEADS)
        inside = group < num_groups
        head = tl.load(heads + place * num_groups + group, mask=inside, other=float("-inf"))
        bound = _bound(row, head, inside, k, p, t, kept, num_groups)
        found = inside & (head >= bound)
        num_found = tl.sum(found.to(tl.int32), 0)
        if num_found * GROUP <= ROOM:
            uniform = tl.load(uniforms + place * uniform_stride) if DRAW else 0.0
            t, last, kept, token = _cut_groups(
                row, buffer, found, num_found, bound, t, k, p, kept, uniform, DRAW, ROOM
            )
            if DRAW:
                tl.store(tokens + place, token.to(tl.int64))
        else:
            t, last, kept = _cut_row(
                row,
                buffer,
                bound,
                t,
                k,
                p,
                kept,
                TOP_K,
                TOP_P,
                MIN_P,
                ROOM,
                TILE,
                PIVOT_TILE,
                STAGES,
            )
    tl.store(cut.t + place, t)
    tl.store(cut.last + place, last)
    tl.store(cut.weight + place, kept)
