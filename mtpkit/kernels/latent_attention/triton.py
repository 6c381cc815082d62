# mypy: disable-error-code="attr-defined"
"""Multi-head latent attention over a paged cache in Triton, for decode steps and prefill chunks.

As in `kernels.attention.triton`, all queries of a row are stacked in one dimension: query m belongs
to token m // HEADS and head m % HEADS. All queries read the same cached rows, so the heads of a
single token already fill tensor core tiles. A cached row is both key and value: one load of its
latent serves the scores and the output. With 512 channels, a program's accumulator takes half of a
multiprocessor's registers, so one program runs on each multiprocessor.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.attention.flash import forward_tiles
from mtpkit.kernels.attention.tile import Tiles, empty_state, fold, score_scale
from mtpkit.kernels.attention.triton import (
    UNALIGNED,
    UNSPECIALIZED,
    combine,
    is_read,
    load_blocks,
    load_queries,
    row_range,
    sees,
    slots_of,
    split_plan,
    store_lines,
    tree_of,
)
from mtpkit.kernels.device import padded, row_of_tile, strided

_LN_2 = tl.constexpr(0.6931471805599453)
_RESIDENT = 1
"""Number of programs that run on a multiprocessor at once."""
_LONG = 8192
"""Most positions that one program should read, as far as the limit on programs allows. The limit is
high because the partial results that splits leave to be combined are wide."""


def latent_tiles(queries: int, width: int, dtype: torch.dtype) -> Tiles:
    """Tiles for `queries` queries per row and latents of `width` channels. The queries and two or
    three tiles of cached rows fit into the 227 KB of shared memory of an H200's multiprocessor."""
    if dtype.itemsize > 2:
        return Tiles(16, 16, num_warps=8, num_stages=2)
    if width > 512:
        return Tiles(16, 16, num_warps=4, num_stages=2)
    m = min(64, padded(queries))
    return Tiles(m, 32, num_warps=8 if m == 64 else 4, num_stages=3)


@triton.jit
def _attend(
    queries, newest, state, first, last, cache, scale, BLOCK_SIZE, WIDTHS, N, MASKED, tree=None
):
    """Fold the positions first .. last - 1 into a running softmax; first is a multiple of N.

    Args:
        queries: [M, C] and [M, P].
        newest: [M], the last position that each query sees, used only if MASKED. If not MASKED, all
            queries see all positions, and last is a multiple of N.
        tree: see `sees`.
        state: as from `empty_state`.
        cache: pointers to the cached rows and to the block table of the row (request).
        scale: factor of the scores times log2(e).
        WIDTHS: channels of the latent and of the rotary key.
    """
    q_latent, q_rotary = queries
    rows_ptr, table_ptr = cache
    channel = tl.arange(0, q_latent.shape[1])[None, :]
    turned = tl.arange(0, q_rotary.shape[1])[None, :]
    block = load_blocks(table_ptr, first + tl.arange(0, N), last, BLOCK_SIZE)
    for start in range(first, last, N):
        place = start + tl.arange(0, N)
        slot = slots_of(block, place, BLOCK_SIZE)
        row = rows_ptr + (slot * (WIDTHS[0] + WIDTHS[1]))[:, None]
        inside = is_read(place, last, tree)[:, None]
        latents = tl.load(row + channel, mask=inside & (channel < WIDTHS[0]), other=0.0).to(
            q_latent.dtype
        )
        keys = tl.load(row + WIDTHS[0] + turned, mask=inside & (turned < WIDTHS[1]), other=0.0).to(
            q_latent.dtype
        )
        block = load_blocks(table_ptr, place + N, last, BLOCK_SIZE)
        scores = tl.dot(q_latent, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(q_rotary, tl.trans(keys), scores, input_precision="ieee")
        if MASKED:
            scores = tl.where(sees(place, newest, tree), scores, float("-inf"))
        state = fold(state, scores, latents, scale, MASKED)
    return state


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def _decode_kernel(
    latent_rows,
    rotary_rows,
    cache_ptr,
    table_ptr,
    lens_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    ancestors_ptr,
    scale,
    tokens,
    span,
    fill,
    longest,
    width,
    HEADS: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    EARLIER: tl.constexpr,
):
    """Compute one split of a row for M queries per program; results are stored as by
    `kernels.attention.triton`."""
    q_ptr, q_row, q_token, q_head = latent_rows
    p_ptr, p_row, p_token, p_head = rotary_rows
    row = tl.program_id(1)
    split = tl.program_id(2)
    context, end, length = row_range(
        lens_ptr, row, (tokens + EARLIER, span, fill, longest), tl.num_programs(2), N
    )
    first = split * length
    m = tl.program_id(0) * M + tl.arange(0, M)
    count = tokens * HEADS
    token = row.to(tl.int64) * tokens
    if first >= end:
        if first == 0:
            store_lines(
                out_ptr, tl.zeros([M, C], tl.float32), token, 0, m, count, 1, HEADS, WIDTHS[0]
            )
        return
    row = row.to(tl.int64)
    q_latent = load_queries(q_ptr + row * q_row, m, count, q_token, q_head, HEADS, WIDTHS[0], C)
    q_rotary = load_queries(p_ptr + row * p_row, m, count, p_token, p_head, HEADS, WIDTHS[1], P)
    last = tl.minimum(first + length, end)
    queries = (q_latent, q_rotary)
    cache = (cache_ptr, table_ptr + row * width)
    newest = context + m // HEADS
    state = empty_state(M, C)
    tree = None
    if ancestors_ptr is not None:
        tree = tree_of(ancestors_ptr + row * tokens, context, m // HEADS, m < count)
    acc, best, total = _attend(
        queries, newest, state, first, last, cache, scale, BLOCK_SIZE, WIDTHS, N, True, tree
    )
    # Queries that see no position of this split have best = -inf; lse becomes -inf too.
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None]
    if length >= end:
        store_lines(out_ptr, acc, token, 0, m, count, 1, HEADS, WIDTHS[0])
    else:
        token = (row * tl.num_programs(2) + split) * tokens
        store_lines(part_ptr, acc, token, 0, m, count, 1, HEADS, WIDTHS[0])
        tl.store(lse_ptr + token * HEADS + m, best + tl.log2(total), mask=m < count)


def _sizes(q_latent: Tensor, q_rotary: Tensor, cache: Tensor, tiles: Tiles) -> dict[str, object]:
    """Compile-time arguments of a kernel."""
    heads = q_latent.shape[-2]
    latent = q_latent.shape[-1]
    rotary = q_rotary.shape[-1]
    assert cache.is_contiguous() and cache.shape[2] == latent + rotary
    widths: dict[str, object] = dict(WIDTHS=(latent, rotary), C=padded(latent), P=padded(rotary))
    return dict(HEADS=heads, BLOCK_SIZE=cache.shape[1], **widths, **tiles.launch())


def latent_attention(
    q_latent: Tensor,
    q_rotary: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    ancestors: Tensor | None = None,
    earlier: int = 0,
    *,
    tiles: Tiles | None = None,
    splits: int | None = None,
) -> Tensor:
    """See the reference. `splits` fixes the number of splits per row, whatever the batch."""
    rows, tokens, heads, width = q_latent.shape
    tiles = tiles or latent_tiles(tokens * heads, width, q_latent.dtype)
    across = triton.cdiv(tokens * heads, tiles.m)
    span = block_tables.shape[1] * cache.shape[1]
    fill = splits or 1
    longest = span
    if splits is None:
        splits, fill, longest = split_plan(rows * across, span, tiles.n, _RESIDENT, _LONG)
    plan = tokens, span, fill, longest
    out = q_latent.new_empty(rows, tokens, heads, width)
    joined = rows * splits * tokens * heads if splits > 1 else 0
    part, lse = (q_latent.new_empty(size, dtype=torch.float32) for size in (joined * width, joined))
    if out.numel() == 0:
        return out
    _decode_kernel[(across, rows, splits)](
        strided(q_latent),
        strided(q_rotary),
        cache,
        block_tables,
        context_lens,
        out,
        part,
        lse,
        None if ancestors is None else ancestors.contiguous(),
        score_scale(1, scale),
        *plan,
        block_tables.stride(0),
        EARLIER=earlier,
        **_sizes(q_latent, q_rotary, cache, tiles),
    )
    if splits > 1:
        combine(context_lens, out, part, lse, (tokens + earlier, *plan[1:]), splits, tiles.n)
    return out


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def _context_kernel(
    latent_rows,
    rotary_rows,
    cache_ptr,
    table_ptr,
    lens_ptr,
    start_ptr,
    out_ptr,
    lse_ptr,
    scale,
    rows,
    width,
    HEADS: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
):
    """Compute M queries of one row per program; `row_of_tile` maps programs to rows."""
    q_ptr, q_token, q_head = latent_rows
    p_ptr, p_token, p_head = rotary_rows
    row, begin, tokens, first = row_of_tile(start_ptr, rows, tl.program_id(0), HEADS, M, 1)
    count = tokens * HEADS
    if first >= count:
        return
    m = first + tl.arange(0, M)
    line = lse_ptr + begin.to(tl.int64) * HEADS + m
    context = tl.load(lens_ptr + row).to(tl.int32)
    if context <= 0:
        store_lines(out_ptr, tl.zeros([M, C], tl.float32), begin, 0, m, count, 1, HEADS, WIDTHS[0])
        # lse = -inf lets `_chunk_kernel` start with an empty softmax.
        tl.store(line, tl.full([M], float("-inf"), tl.float32), mask=m < count)
        return
    q_latent = load_queries(q_ptr + begin * q_token, m, count, q_token, q_head, HEADS, WIDTHS[0], C)
    q_rotary = load_queries(p_ptr + begin * p_token, m, count, p_token, p_head, HEADS, WIDTHS[1], P)
    # All queries come after the context and see all of it; only its last tile needs a mask.
    newest = tl.zeros([M], tl.int32) + (context - 1)
    queries = (q_latent, q_rotary)
    cache = (cache_ptr, table_ptr + row.to(tl.int64) * width)
    whole = context // N * N
    state = empty_state(M, C)
    state = _attend(queries, newest, state, 0, whole, cache, scale, BLOCK_SIZE, WIDTHS, N, False)
    acc, best, total = _attend(
        queries, newest, state, whole, context, cache, scale, BLOCK_SIZE, WIDTHS, N, True
    )
    store_lines(out_ptr, acc / total[:, None], begin, 0, m, count, 1, HEADS, WIDTHS[0])
    tl.store(line, (best + tl.log2(total)) * _LN_2, mask=m < count)


def latent_context_attention(
    q_latent: Tensor,
    q_rotary: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    scale: float,
    *,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    (count, heads, width), rows = q_latent.shape, len(context_lens)
    out = q_latent.new_empty(count, heads, width)
    lse = q_latent.new_empty(count, heads, dtype=torch.float32)
    if count == 0:
        return out, lse
    chosen = tiles or latent_tiles(count * heads, width, q_latent.dtype)
    _context_kernel[(count * heads // chosen.m + rows,)](
        strided(q_latent),
        strided(q_rotary),
        cache,
        block_tables,
        context_lens,
        query_start,
        out,
        lse,
        score_scale(1, scale),
        rows,
        block_tables.stride(0),
        **_sizes(q_latent, q_rotary, cache, chosen),
    )
    return out, lse


@triton.jit
def _fold_own(q, newest, state, k_rows, v_rows, first, last, count, scale, WIDTHS, N, MASKED):
    """Fold the row's own keys first .. last - 1 into a running softmax; `k_rows` and `v_rows` are
    each a pointer to the row's first token and the number of elements from one token to the
    next."""
    k_ptr, k_token = k_rows
    v_ptr, v_token = v_rows
    D: tl.constexpr = q.shape[1]
    E: tl.constexpr = state[0].shape[1]
    for start in range(first, last, N):
        place = start + tl.arange(0, N)
        keys = load_queries(k_ptr, place, count, k_token, 0, 1, WIDTHS[0], D)
        values = load_queries(v_ptr, place, count, v_token, 0, 1, WIDTHS[1], E)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if MASKED:
            scores = tl.where(place[None, :] <= newest[:, None], scores, float("-inf"))
        state = fold(state, scores, values, scale, MASKED)
    return state


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def _chunk_kernel(
    q_rows,
    k_rows,
    v_rows,
    earlier_rows,
    lse_ptr,
    lens_ptr,
    start_ptr,
    out_ptr,
    scale,
    rows,
    WIDTHS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """Compute M queries of one row and head per program. A row's tiles with the most keys run
    first. The running softmax of a query starts with the result for the tokens before the row."""
    q_ptr, q_token, q_head = q_rows
    k_ptr, k_token, k_head = k_rows
    v_ptr, v_token, v_head = v_rows
    e_ptr, e_token, e_head = earlier_rows
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    row, begin, count, first = row_of_tile(start_ptr, rows, tile, 1, M, 1)
    if first >= count:
        return
    begin = begin.to(tl.int64)
    m = first + tl.arange(0, M)
    place = ((begin + m) * heads + head)[:, None] * WIDTHS[1] + tl.arange(0, E)[None, :]
    inside = (m < count)[:, None] & (tl.arange(0, E) < WIDTHS[1])[None, :]
    dtype = out_ptr.dtype.element_ty
    if tl.load(lens_ptr + row) < 0:
        tl.store(out_ptr + place, tl.zeros([M, E], tl.float32).to(dtype), mask=inside)
        return
    q = load_queries(q_ptr + begin * q_token + head * q_head, m, count, q_token, 0, 1, WIDTHS[0], D)
    earlier = load_queries(
        e_ptr + begin * e_token + head * e_head, m, count, e_token, 0, 1, WIDTHS[1], E
    )
    lse = tl.load(lse_ptr + (begin + m) * heads + head, mask=m < count, other=float("-inf"))
    # The earlier result is normalised: as a running softmax, its `best` is lse and its total is 1.
    total = tl.where(lse == float("-inf"), 0.0, 1.0)
    state = earlier.to(tl.float32) * total[:, None], lse / _LN_2, total
    keys = k_ptr + begin * k_token + head * k_head, k_token
    values = v_ptr + begin * v_token + head * v_head, v_token
    whole = (first + 1) // N * N
    end = tl.minimum(first + M, count)
    state = _fold_own(q, m, state, keys, values, 0, whole, count, scale, WIDTHS, N, False)
    acc, _, total = _fold_own(q, m, state, keys, values, whole, end, count, scale, WIDTHS, N, True)
    tl.store(out_ptr + place, (acc / total[:, None]).to(dtype), mask=inside)


def chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    earlier: Tensor,
    earlier_lse: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    scale: float,
    *,
    tiles: Tiles | None = None,
) -> Tensor:
    """See the reference."""
    (count, heads, width), rows = q.shape, len(context_lens)
    out = v.new_empty(v.shape)
    if count == 0:
        return out
    chosen = tiles or forward_tiles(width, q.dtype)
    _chunk_kernel[(count // chosen.m + rows, heads)](
        strided(q),
        strided(k),
        strided(v),
        strided(earlier),
        earlier_lse.contiguous(),
        context_lens,
        query_start,
        out,
        score_scale(1, scale),
        rows,
        WIDTHS=(width, v.shape[-1]),
        D=padded(width),
        E=padded(v.shape[-1]),
        **chosen.launch(),
    )
    return out
