# mypy: disable-error-code="no-untyped-def"
"""Attention of decode steps: flash-decoding over a paged cache.

The context of a row is split over programs, and a second kernel combines their results.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.attention.tile import (
    UNALIGNED,
    UNSPECIALIZED,
    Tiles,
    attend,
    empty_state,
    grouped,
    load_queries,
    padded,
    score_scale,
    sizes,
)
from mtpkit.kernels.device import PROGRAMS

_MAX_PROGRAMS = 1024
"""Limit on programs that are added to shorten the longest split: empty programs are not free."""
_LONG = 8192
"""Most positions that a program should read, within `_MAX_PROGRAMS`."""
_FEW_LINES = 2048
"""Up to this many lines of output, each is combined by a program of its own, so that a batch of one fills the GPU."""


def decode_tiles(queries: int, width: int, dtype: torch.dtype) -> Tiles:
    """Tiles for `queries` queries per row and group, of `width` channels each; loads of keys and values dominate."""
    if dtype.itemsize > 2 or width > 256:
        return Tiles(16, 32 if width <= 128 else 16, num_warps=8, num_stages=3)
    m = min(64, max(16, triton.next_power_of_2(queries)))
    return Tiles(m, 64 if width <= 128 else 32, num_warps=4, num_stages=3)


def split_plan(programs: int, span: int, n: int) -> tuple[int, int, int]:
    """Plan the splits of rows of up to `span` positions, where one split per row makes `programs` programs.

    Returns:
        (splits launched per row, splits that a row should use, positions of the longest split)
    """
    most = triton.cdiv(span, n)
    fill = min(most, triton.cdiv(PROGRAMS, programs))
    splits = max(fill, min(triton.cdiv(span, _LONG), triton.cdiv(_MAX_PROGRAMS, programs)))
    return splits, fill, triton.cdiv(triton.cdiv(span, splits), n) * n


@triton.jit
def _row_range(lens_ptr, row, tokens, span, fill, longest, N: tl.constexpr):
    """Context length of a row, its number of positions with the new tokens, and positions per split."""
    context = tl.load(lens_ptr + row).to(tl.int32)
    end = tl.minimum(context + tokens, span)
    length = ((end + fill - 1) // fill + N - 1) // N * N
    return context, end, tl.minimum(tl.maximum(length, N), longest)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def _decode_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    lens_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    scale,
    tokens,
    span,
    fill,
    longest,
    width,
    q_row,
    q_token,
    q_group,
    q_head,
    GROUPS: tl.constexpr,
    REP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """Compute one split of a row for M queries of one kv group per program.

    A row that needs only one split gets its output here. For other rows, split s stores its part of the output in part
    [R, splits, tokens * heads, WIDTH] and the log2 of its weight in lse [R, splits, tokens * heads].
    """
    row, split = tl.program_id(1), tl.program_id(2)
    group = tl.program_id(0) % GROUPS
    context, end, length = _row_range(lens_ptr, row, tokens, span, fill, longest, N)
    first = split * length
    if first >= end:
        return
    m = tl.program_id(0) // GROUPS * M + tl.arange(0, M)
    count = tokens * REP
    q_base = q_ptr + row.to(tl.int64) * q_row + group * q_group
    q = load_queries(q_base, m, count, q_token, q_head, REP, WIDTH, D)
    last = tl.minimum(first + length, end)
    key_ptr += group * WIDTH
    value_ptr += group * WIDTH
    table_ptr += row.to(tl.int64) * width
    slot: tl.constexpr = GROUPS * WIDTH
    state = empty_state(M, D)
    newest = context + m // REP
    acc, best, total = attend(
        q, newest, state, first, last, key_ptr, value_ptr, table_ptr, scale, BLOCK_SIZE, slot, WIDTH, N, True
    )
    # Queries that see no position of this split have best = -inf; lse becomes -inf too.
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None]
    heads = GROUPS * REP
    line = m // REP * heads + group * REP + m % REP
    channel = tl.arange(0, D)[None, :]
    mask = (m < count)[:, None] & (channel < WIDTH)
    if length >= end:
        place = (row.to(tl.int64) * tokens * heads + line) * WIDTH
        tl.store(out_ptr + place[:, None] + channel, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        place = (row.to(tl.int64) * tl.num_programs(2) + split) * tokens * heads + line
        tl.store(part_ptr + place[:, None] * WIDTH + channel, acc, mask=mask)
        tl.store(lse_ptr + place, best + tl.log2(total), mask=m < count)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "splits"], do_not_specialize_on_alignment=UNALIGNED)
def _combine_kernel(
    lens_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    tokens,
    span,
    fill,
    longest,
    splits,
    lines,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    L: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
):
    """Combine the splits of L of the row's `lines` = tokens * heads per program, S splits at a time."""
    row = tl.program_id(0)
    _, end, length = _row_range(lens_ptr, row, tokens, span, fill, longest, N)
    if length >= end:
        return
    used = (end + length - 1) // length
    line = tl.program_id(1) * L + tl.arange(0, L)
    channel = tl.arange(0, D)[None, None, :]
    acc = tl.full([L, D], 0.0, tl.float32)
    best = tl.full([L], float("-inf"), tl.float32)
    total = tl.full([L], 0.0, tl.float32)
    for start in range(0, used, S):
        split = start + tl.arange(0, S)
        place = (row.to(tl.int64) * splits + split[:, None]) * lines + line[None, :]
        inside = (split < used)[:, None] & (line < lines)[None, :]
        lse = tl.load(lse_ptr + place, mask=inside, other=float("-inf"))
        mask = inside[:, :, None] & (channel < WIDTH)
        part = tl.load(part_ptr + place[:, :, None] * WIDTH + channel, mask=mask, other=0.0)
        higher = tl.maximum(best, tl.max(lse, 0))
        # Finite from the first round on, since split 0 holds position 0; -inf only for lines past the last.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(lse - shift[None, :])
        fade = tl.exp2(best - shift)
        total = total * fade + tl.sum(weights, 0)
        acc = acc * fade[:, None] + tl.sum(part * weights[:, :, None], 0)
        best = higher
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    channel = tl.arange(0, D)[None, :]
    place = (row.to(tl.int64) * lines + line)[:, None] * WIDTH + channel
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=(line < lines)[:, None] & (channel < WIDTH))


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    tiles: Tiles | None = None,
    splits: int | None = None,
) -> Tensor:
    """See the reference. `splits` fixes the number of splits per row, whatever the batch."""
    q = grouped(q, 5, key_cache, value_cache)
    rows, tokens, groups, rep, width = q.shape
    tiles = tiles or decode_tiles(tokens * rep, width, q.dtype)
    across = groups * triton.cdiv(tokens * rep, tiles.m)
    span = block_tables.shape[1] * key_cache.shape[1]
    fill, longest = splits or 1, span + tiles.n
    if splits is None:
        splits, fill, longest = split_plan(rows * across, span, tiles.n)
    plan = tokens, span, fill, longest
    lines = tokens * groups * rep
    out = q.new_empty(rows, tokens, groups * rep, width)
    joined = rows * splits * lines if splits > 1 else 0
    part, lse = (q.new_empty(size, dtype=torch.float32) for size in (joined * width, joined))
    if out.numel() == 0:
        return out
    _decode_kernel[(across, rows, splits)](
        q,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        out,
        part,
        lse,
        score_scale(width),
        *plan,
        block_tables.stride(0),
        *q.stride()[:4],
        **sizes(q, key_cache, tiles),
    )
    if splits > 1:
        at_once = 1 if rows * lines <= _FEW_LINES else 8
        _combine_kernel[(rows, triton.cdiv(lines, at_once))](
            context_lens,
            out,
            part,
            lse,
            *plan,
            splits,
            lines,
            WIDTH=width,
            N=tiles.n,
            L=at_once,
            S=16 // at_once,
            D=padded(width),
            num_warps=4,
        )
    return out
