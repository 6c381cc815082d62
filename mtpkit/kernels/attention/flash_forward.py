# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Forward of flash attention over depth 1's sequence and the later depths of a position itself."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.attention.flash_tile import Bounds, load_numbers, load_rows, row_dot, rows_of, store_rows
from mtpkit.kernels.attention.tile import Tiles, empty_state, padded, score_scale


def forward_tiles(width: int, dtype: torch.dtype) -> Tiles:
    """Tiles of M queries of one head against N keys at a time."""
    if dtype.itemsize > 2:
        return Tiles(32, 16, num_warps=8, num_stages=2)
    if width > 128:
        return Tiles(64, 32, num_warps=8, num_stages=2)
    return Tiles(128, 64, num_warps=8 if width > 64 else 4, num_stages=3)


@triton.jit
def _attend(
    queries,
    token,
    oldest,
    state,
    k,
    v,
    batch,
    group,
    first,
    last,
    length,
    scale,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold the keys first .. last - 1 into a running softmax; first is a multiple of N.

    If MASKED, query m sees the keys oldest[m] .. token[m]. If not, it sees all keys, and last is a multiple of N.
    """
    acc, best, total = state
    D: tl.constexpr = queries.shape[1]
    for start in range(first, last, N):
        keys = load_rows(k, batch, group, start, length, WIDTH, N, D)
        values = load_rows(v, batch, group, start, length, WIDTH, N, D)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if MASKED:
            place = (start + tl.arange(0, N))[None, :]
            scores = tl.where((place <= token[:, None]) & (place >= oldest[:, None]), scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1) * scale)
        shift = higher
        if MASKED:
            # For a query that has seen no key yet, -inf - -inf would be NaN.
            shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * scale - shift[:, None])
        fade = tl.exp2(best - shift)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None], input_precision="ieee")
        best = higher
    return acc, best, total


@triton.jit(do_not_specialize=["length"])
def _forward_kernel(
    q,
    k,
    v,
    later_k,
    later_v,
    start_ptr,
    out,
    lse_ptr,
    scale,
    length,
    REP: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """Compute M queries of one head per program; queries with the most keys run first."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    head, batch = tl.program_id(1), tl.program_id(2)
    group = head // REP
    token = first + tl.arange(0, M)
    end = tl.minimum(first + M, length)
    queries = load_rows(q, batch, head, first, length, WIDTH, M, D)
    acc, best, total = empty_state(M, D)
    for depth in tl.static_range(len(later_k)):
        scores = row_dot(queries, load_rows(later_k[depth], batch, group, first, length, WIDTH, M, D)) * scale
        values = load_rows(later_v[depth], batch, group, first, length, WIDTH, M, D).to(tl.float32)
        higher = tl.maximum(best, scores)
        weights, fade = tl.exp2(scores - higher), tl.exp2(best - higher)
        total = total * fade + weights
        acc = acc * fade[:, None] + values * weights[:, None]
        best = higher
    # Some query sees each of the keys low .. end - 1; all queries see the keys full_low .. full_end - 1.
    full_end = (first + 1) // N * N
    if start_ptr is None:
        oldest = tl.zeros([M], tl.int32)
        low, full_low = 0, 0
    else:
        oldest = load_numbers(start_ptr, batch, token, length)
        low = tl.load(start_ptr + batch.to(tl.int64) * length + first) // N * N
        full_low = tl.load(start_ptr + batch.to(tl.int64) * length + end - 1)
        full_low = tl.minimum(tl.cdiv(full_low, N) * N, full_end)
    state = acc, best, total
    state = _attend(
        queries, token, oldest, state, k, v, batch, group, low, full_low, length, scale, WIDTH, N, MASKED=True
    )
    state = _attend(
        queries, token, oldest, state, k, v, batch, group, full_low, full_end, length, scale, WIDTH, N, MASKED=False
    )
    acc, best, total = _attend(
        queries, token, oldest, state, k, v, batch, group, full_end, end, length, scale, WIDTH, N, MASKED=True
    )
    store_rows(out, acc / total[:, None], batch, head, first, length, WIDTH, M, D)
    line = (batch * tl.num_programs(1) + head).to(tl.int64)
    tl.store(lse_ptr + line * length + token, best + tl.log2(total), mask=token < length)


def attend_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    later_k: Sequence[Tensor],
    later_v: Sequence[Tensor],
    bounds: Bounds | None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """The output in the dtype and strides of q, and log2 of the sum of exponentials, [b, heads, s] fp32.

    The arguments are those of `depth_attention`, each with contiguous channels.
    """
    batch, length, heads, width = q.shape
    tiles = tiles or forward_tiles(width, q.dtype)
    out = torch.empty_like(q)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    _forward_kernel[(triton.cdiv(length, tiles.m), heads, batch)](
        rows_of(q),
        rows_of(k),
        rows_of(v),
        tuple(rows_of(t) for t in later_k),
        tuple(rows_of(t) for t in later_v),
        None if bounds is None else bounds.start,
        rows_of(out),
        lse,
        score_scale(width),
        length,
        REP=heads // k.shape[2],
        WIDTH=width,
        D=padded(width),
        **tiles.launch(),
    )
    return out, lse
