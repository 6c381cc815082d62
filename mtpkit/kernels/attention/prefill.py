# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Attention of prefill chunks: flash attention over a paged cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.attention.decode import paged_attention
from mtpkit.kernels.attention.tile import (
    UNALIGNED,
    UNSPECIALIZED,
    Tiles,
    attend,
    empty_state,
    grouped,
    load_queries,
    score_scale,
    sizes,
)
from mtpkit.kernels.device import PROGRAMS


def prefill_tiles(queries: int, width: int, dtype: torch.dtype) -> Tiles:
    """Tiles for up to `queries` queries per row and group, of `width` channels each."""
    if dtype.itemsize > 2 or width > 256:
        return Tiles(32, 16, num_warps=8, num_stages=2)
    n = 64 if width <= 128 else 32
    if queries <= 16:
        return Tiles(16, n, num_warps=4, num_stages=3)
    if queries <= 64:
        return Tiles(64, n, num_warps=4, num_stages=3)
    return Tiles(128, n, num_warps=8, num_stages=3)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def _prefill_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    lens_ptr,
    start_ptr,
    out_ptr,
    scale,
    rows,
    width,
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
    """Compute M queries of one row and kv group per program.

    The tiles of row r are numbered from start[r] * REP // M + r on, which leaves a number for each row's partial tile;
    programs whose number belongs to no tile return at once. A row's tiles with the longest context run first.
    """
    tile, group = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    zero = tl.load(start_ptr)
    row = -1
    for start in range(0, rows, 128):
        index = start + tl.arange(0, 128)
        begin = tl.load(start_ptr + index, mask=index < rows, other=0) - zero
        row += tl.sum(((index < rows) & (begin * REP // M + index <= tile)).to(tl.int32), 0)
    begin = tl.load(start_ptr + row) - zero
    count = ((tl.load(start_ptr + row + 1) - zero - begin) * REP).to(tl.int32)
    first = ((tile - row - begin * REP // M) * M).to(tl.int32)
    if first >= count:
        return
    context = tl.load(lens_ptr + row).to(tl.int32)
    m = first + tl.arange(0, M)
    q = load_queries(q_ptr + begin * q_token + group * q_group, m, count, q_token, q_head, REP, WIDTH, D)
    newest = context + m // REP
    key_ptr += group * WIDTH
    value_ptr += group * WIDTH
    table_ptr += row.to(tl.int64) * width
    slot: tl.constexpr = GROUPS * WIDTH
    seen_by_all = (context + first // REP + 1) // N * N
    end = context + (tl.minimum(first + M, count) - 1) // REP + 1
    state = empty_state(M, D)
    state = attend(
        q, newest, state, 0, seen_by_all, key_ptr, value_ptr, table_ptr, scale, BLOCK_SIZE, slot, WIDTH, N, False
    )
    acc, _, total = attend(
        q, newest, state, seen_by_all, end, key_ptr, value_ptr, table_ptr, scale, BLOCK_SIZE, slot, WIDTH, N, True
    )
    channel = tl.arange(0, D)[None, :]
    place = ((begin + m // REP) * (GROUPS * REP) + group * REP + m % REP) * WIDTH
    mask = (m < count)[:, None] & (channel < WIDTH)
    tl.store(out_ptr + place[:, None] + channel, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def prefill_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    lens: tuple[int, ...],
    *,
    tiles: Tiles | None = None,
) -> Tensor:
    """See the reference. A few short chunks of equal length run as decode rows, whose contexts are split."""
    q = grouped(q, 4, key_cache, value_cache)
    count, groups, rep, width = q.shape
    chosen = tiles or prefill_tiles(max(lens) * rep, width, q.dtype)
    blocks = count * rep // chosen.m + len(lens)
    if tiles is None and len(set(lens)) == 1 and 2 * blocks * groups <= PROGRAMS:
        rows = q.unflatten(0, (len(lens), lens[0]))
        return paged_attention(rows, key_cache, value_cache, block_tables, context_lens).flatten(0, 1)
    out = q.new_empty(count, groups * rep, width)
    _prefill_kernel[(blocks, groups)](
        q,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        query_start,
        out,
        score_scale(width),
        len(lens),
        block_tables.stride(0),
        *q.stride()[:3],
        **sizes(q, key_cache, chosen),
    )
    return out
