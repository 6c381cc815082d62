# mypy: disable-error-code="attr-defined"
"""Attention over a paged cache in Triton, for decode steps and prefill chunks; attention over
sequences is in `flash`.

All queries of a row that read the same keys are stacked in one dimension: T tokens times the REP =
heads / kv_heads heads of a group. Query m belongs to token m // REP and to head m % REP of the
group. A decode step thus fills a tensor core tile and reads each key once. The context of a decode
row is split over programs (flash-decoding), and a second kernel combines the results of the splits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.attention.flash import depth_attention, sequence_attention
from mtpkit.kernels.attention.reference import AttentionWindow
from mtpkit.kernels.attention.tile import Tiles, empty_state, fold, score_scale
from mtpkit.kernels.device import (
    Early,
    busy_programs,
    padded,
    row_of_tile,
    strided,
    wait_for_previous,
)
from mtpkit.kernels.kv_store.reference import UNSCALED, KVScales
from mtpkit.kernels.linear.reference import FP8

__all__ = ["depth_attention", "paged_attention", "prefill_attention", "sequence_attention"]

UNSPECIALIZED = ["tokens", "span", "fill", "longest", "width", "rows"]
"""Numbers that change from step to step and must not trigger a recompilation."""
UNALIGNED = ["table_ptr", "lens_ptr", "start_ptr", "ancestors_ptr"]
"""Tensors that may be slices: a change of their alignment must not trigger a recompilation."""
_MAX_PROGRAMS = 4096
"""Limit on the number of programs when long rows are split: empty programs are not free."""
_LONG = 1024
"""Most positions that one program should read, as far as `_MAX_PROGRAMS` allows, so that the
programs of a long row do not finish long after all other programs. On an H200, with the context
lengths of a mixed load, 64 rows take 63 us with this limit, and 102 us if no row is split."""
_FINE = 2
"""If filling the GPU takes more splits per row than this, rows are not split further."""
_FEW_LINES = 2048
"""Up to this many lines of output (one per token and head), one program combines each line, so that
a batch of one fills the GPU."""


def decode_tiles(queries: int, width: int, dtype: torch.dtype) -> Tiles:
    """Tiles for `queries` queries per row and group, of `width` channels each; loads of keys and
    values dominate."""
    if dtype.itemsize > 2 or width > 256:
        return Tiles(16, 32 if width <= 128 else 16, num_warps=8, num_stages=3)
    m = min(64, max(16, triton.next_power_of_2(queries)))
    return Tiles(m, 64 if width <= 128 else 32, num_warps=4, num_stages=3)


def split_plan(
    programs: int, span: int, n: int, resident: int = 2, longest: int | None = None
) -> tuple[int, int, int]:
    """Plan the splits of rows of up to `span` positions, where one split per row would need
    `programs` programs.

    Null rows count as rows: the number of real rows in a captured step changes from replay to
    replay, but the grid does not.

    Args:
        resident: number of programs that run on a multiprocessor at once.
        longest: positions that a split should have at most; None: a number that suits keys and
            values of a few heads.

    Returns:
        (splits launched per row, splits that each row should use at least, positions that a split
        should have at most)
    """
    longest = longest or _LONG
    most = triton.cdiv(span, n)
    # `busy_programs` counts two programs per multiprocessor, of which `resident` fit here.
    fill = min(most, triton.cdiv(busy_programs() * resident // 2, programs))
    more = min(triton.cdiv(span, longest), triton.cdiv(_MAX_PROGRAMS, programs))
    return fill if fill > _FINE else max(fill, more), fill, longest


def prefill_tiles(queries: int, width: int, dtype: torch.dtype) -> Tiles:
    """Tiles for `queries` queries per group in all rows, of `width` channels each.

    The number of queries of each row is not known here. On an H200 these tiles are the fastest or
    within 8% of the fastest for rows of 128 to 4,096 tokens.
    """
    if dtype.itemsize > 2 or width > 256:
        return Tiles(32, 16, num_warps=8, num_stages=2)
    return Tiles(16 if queries <= 16 else 64, 64 if width <= 128 else 32, num_warps=4, num_stages=3)


def _grouped(q: Tensor, dims: int, key_cache: Tensor, value_cache: Tensor) -> Tensor:
    """q as [..., kv_heads, heads / kv_heads, d] with `dims` dimensions."""
    # The only layouts that the kernels can address.
    assert key_cache.is_contiguous() and value_cache.is_contiguous()
    return q if q.dim() == dims else q.unflatten(-2, (key_cache.shape[2], -1))


def _sizes(q: Tensor, key_cache: Tensor, tiles: Tiles) -> dict[str, int]:
    """Compile-time arguments of a kernel, given q from `_grouped`."""
    groups, rep, width = q.shape[-3:]
    return dict(
        GROUPS=groups,
        REP=rep,
        WIDTH=width,
        BLOCK_SIZE=key_cache.shape[1],
        D=padded(width),
        **tiles.launch(),
    )


def _factors(width: int, scales: KVScales, cache: Tensor) -> tuple[float, float | None]:
    """The factor of the scores times log2(e), and that of the outputs; None: 1, which leaves it out
    of the kernel. The scales of a cache in fp8 are constant, so they need not be applied to each
    key and value."""
    if cache.dtype != FP8:
        return score_scale(width), None
    return score_scale(width) * scales.key, scales.value


@triton.jit
def load_queries(q_ptr, m, count, q_token, q_head, REP, WIDTH, D):
    """Load the queries `m` [M] of the row and group at `q_ptr` as [M, D]; zero from query `count`
    and from channel WIDTH on."""
    channel = tl.arange(0, D)[None, :]
    place = (m // REP).to(tl.int64) * q_token + (m % REP) * q_head
    return tl.load(
        q_ptr + place[:, None] + channel, mask=(m < count)[:, None] & (channel < WIDTH), other=0.0
    )


@triton.jit
def line_of(group, m, GROUPS, REP):
    """Index of query m [M] of a group among all (token, head) pairs of its row."""
    return m // REP * (GROUPS * REP) + group * REP + m % REP


@triton.jit
def store_lines(out_ptr, values, token, group, m, count, GROUPS, REP, WIDTH):
    """Store values [M, D] of the queries m [M] below `count`, for the row that begins at token
    `token` of out [tokens, heads, WIDTH]."""
    channel = tl.arange(0, values.shape[1])[None, :]
    place = (token * (GROUPS * REP) + line_of(group, m, GROUPS, REP)) * WIDTH
    mask = (m < count)[:, None] & (channel < WIDTH)
    tl.store(out_ptr + place[:, None] + channel, values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_blocks(table_ptr, place, last, BLOCK_SIZE):
    """Load the int64 block numbers of the positions `place` [N] below `last`. Unsigned division is
    cheaper."""
    return tl.load(table_ptr + place.to(tl.uint32) // BLOCK_SIZE, mask=place < last, other=0)


@triton.jit
def slots_of(block, place, BLOCK_SIZE):
    """Cache slots [N] of the positions `place` [N], which lie in the blocks `block` [N]. The hint
    says that a slot may be any number: without it, Triton 3.6 assumes that all slots are as aligned
    as the first one."""
    return tl.multiple_of(block * BLOCK_SIZE + place.to(tl.uint32) % BLOCK_SIZE, [1])


@triton.jit
def sees(place, newest, tree, window=None):
    """[M, N] bool, whether each query sees the positions `place` [N]. Without `tree`, a query sees
    the positions up to `newest` [M]. With `tree`, see `tree_of`, a query sees all positions before
    the tree and the entries in its mask. `window`: size and sinks, see `AttentionWindow`."""
    if tree is None:
        seen = place[None, :] <= newest[:, None]
    else:
        entry = place - tree[0]
        # Shifts by negative numbers or by more than 63 are undefined, even if dropped below.
        bit = (tree[1][:, None] >> tl.minimum(tl.maximum(entry, 0), 63).to(tl.int64)[None, :]) & 1
        seen = (entry < 0)[None, :] | (bit != 0)
    if window is not None:
        near = newest[:, None] - place[None, :] < window[0]
        seen = seen & (near | (place < window[1])[None, :])
    return seen


@triton.jit
def _positions(context, m, REP, ancestors_ptr, token, count):
    """[M] positions of queries: in a chain one after another, in a tree the context's end and the
    number of the ancestors, see `tree_of`."""
    if ancestors_ptr is None:
        return context + m // REP
    else:
        masks = tl.load(ancestors_ptr + token, mask=m < count, other=0)
        bits = (masks[:, None] >> tl.arange(0, 64).to(tl.int64)[None, :]) & 1
        return context + tl.sum(bits.to(tl.int32), 1) - 1


@triton.jit
def _near(context, size, N):
    """The first position, a multiple of N, of those that a query at position `context` or later
    sees as its last `size`."""
    return tl.maximum(context + 1 - size, 0) // N * N


@triton.jit
def _gap(context, window, N):
    """Positions that no query at position `context` or later sees: the first one, a multiple of N,
    and their number, another one."""
    first = (window[1] + N - 1) // N * N
    return first, tl.maximum(_near(context, window[0], N) - first, 0)


@triton.jit
def _either(one, other):
    return one | other


@triton.jit
def tree_of(ancestors_ptr, first, token, inside):
    """The tree of a tile of queries [M], as `sees` and `is_read` take it: the position of its first
    entry, the masks of the queries' tokens `token` [M] at `ancestors_ptr`, 0 where not `inside`
    [M], and the union of all these masks."""
    masks = tl.load(ancestors_ptr + token, mask=inside, other=0)
    return first, masks, tl.reduce(masks, 0, _either)


@triton.jit
def is_read(place, last, tree):
    """[N] bool, whether the positions `place` [N] lie before `last` and some query of the tile sees
    them. All others may hold NaN, which must not be loaded: NaN times a weight of zero is NaN."""
    inside = place < last
    if tree is not None:
        entry = place - tree[0]
        bit = (tree[2] >> tl.minimum(tl.maximum(entry, 0), 63).to(tl.int64)) & 1
        inside = inside & ((entry < 0) | (bit != 0))
    return inside


@triton.jit
def _beyond(place, gap):
    """The position with the number `place` among those outside the gap."""
    if gap is None:
        return place
    else:
        return place + tl.where(place >= gap[0], gap[1], 0)


@triton.jit
def _attend(
    q,
    newest,
    state,
    first,
    last,
    cache,
    scale,
    BLOCK_SIZE,
    SLOT,
    WIDTH,
    N,
    MASKED,
    tree=None,
    window=None,
    gap=None,
):
    """Fold the positions first .. last - 1 into a running softmax; first is a multiple of N.

    Args:
        q: [M, D].
        newest: [M], the last position that each query sees, used only if MASKED. If not MASKED, all
            queries see all positions, and last is a multiple of N.
        tree, window: see `sees`.
        gap: see `_gap`; first and last leave these positions out. None: there is no gap.
        state: as from `empty_state`.
        cache: pointers to the head's keys and values in slot 0, and to the row's block table. Slots
            are SLOT elements apart.
        scale: factor of the scores times log2(e).

    Returns:
        The new state.
    """
    key_ptr, value_ptr, table_ptr = cache
    D: tl.constexpr = q.shape[1]
    channel = tl.arange(0, D)[None, :]
    place = _beyond(first, gap) + tl.arange(0, N)
    # Block numbers are loaded one iteration ahead, so that the addresses of keys and values are
    # ready in time.
    block = load_blocks(table_ptr, place, _beyond(last, gap), BLOCK_SIZE)
    for start in range(first, last, N):
        place = _beyond(start, gap) + tl.arange(0, N)
        end = _beyond(start, gap) - start + last
        slot = slots_of(block, place, BLOCK_SIZE)
        offset = (slot * SLOT)[:, None] + channel
        if MASKED:
            inside = is_read(place, end, tree)[:, None] & (channel < WIDTH)
            keys = tl.load(key_ptr + offset, mask=inside, other=0.0)
            values = tl.load(value_ptr + offset, mask=inside, other=0.0)
        elif WIDTH < D:
            keys = tl.load(key_ptr + offset, mask=channel < WIDTH, other=0.0)
            values = tl.load(value_ptr + offset, mask=channel < WIDTH, other=0.0)
        else:
            keys = tl.load(key_ptr + offset)
            values = tl.load(value_ptr + offset)
        following = _beyond(start + N, gap) + tl.arange(0, N)
        block = load_blocks(table_ptr, following, _beyond(last, gap), BLOCK_SIZE)
        scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")
        if MASKED:
            scores = tl.where(sees(place, newest, tree, window), scores, float("-inf"))
        state = fold(state, scores, values.to(q.dtype), scale, MASKED)
    return state


@triton.jit
def row_range(lens_ptr, row, plan, splits, N, window=None):
    """Context length of a row, its number of positions including the new tokens but not those of
    `_gap` (0 if the context is -1), and its positions per split, such that it needs at most
    `splits` splits."""
    tokens, span, fill, longest = plan
    context = tl.load(lens_ptr + row).to(tl.int32)
    end = tl.where(context < 0, 0, tl.minimum(context + tokens, span))
    if window is not None:
        end = tl.maximum(end - _gap(context, window, N)[1], 0)
    length = tl.maximum(tl.minimum((end + fill - 1) // fill, longest), (end + splits - 1) // splits)
    return context, end, tl.maximum((length + N - 1) // N * N, N)


@Early
@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def _decode_kernel(
    q_rows,
    key_ptr,
    value_ptr,
    table_ptr,
    lens_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    ancestors_ptr,
    factors,
    window,
    tokens,
    span,
    fill,
    longest,
    width,
    GROUPS: tl.constexpr,
    REP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    EARLIER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute one split of a row for M queries of one kv group per program.

    A row that needs only one split gets its output here, and a row with context -1 gets zeros. For
    other rows, split s stores its part of the output in part [R, splits, tokens * heads, WIDTH] and
    the log2 of its sum of exponentials in lse [R, splits, tokens * heads]. If the row is a tree,
    tiles that lie wholly in the context need no mask. `factors`: see `_factors`; `window`: see
    `sees`.
    """
    wait_for_previous(EARLY)
    q_ptr, q_row, q_token, q_group, q_head = q_rows
    scale, out_scale = factors
    row = tl.program_id(1)
    split = tl.program_id(2)
    group = tl.program_id(0) % GROUPS
    context, end, length = row_range(
        lens_ptr, row, (tokens + EARLIER, span, fill, longest), tl.num_programs(2), N, window
    )
    first = split * length
    m = tl.program_id(0) // GROUPS * M + tl.arange(0, M)
    count = tokens * REP
    token = row.to(tl.int64) * tokens
    if first >= end:
        # `out` is not initialised, and a row without positions has no other program that writes it.
        if first == 0:
            store_lines(
                out_ptr, tl.zeros([M, D], tl.float32), token, group, m, count, GROUPS, REP, WIDTH
            )
        return
    q_base = q_ptr + row.to(tl.int64) * q_row + group * q_group
    q = load_queries(q_base, m, count, q_token, q_head, REP, WIDTH, D)
    last = tl.minimum(first + length, end)
    cache = key_ptr + group * WIDTH, value_ptr + group * WIDTH, table_ptr + row.to(tl.int64) * width
    slot: tl.constexpr = GROUPS * WIDTH
    state = empty_state(M, D)
    newest = context + m // REP
    tree = None
    gap = None
    if ancestors_ptr is not None:
        tree = tree_of(ancestors_ptr + row * tokens, context, m // REP, m < count)
    if window is not None:
        gap = _gap(context, window, N)
        newest = _positions(context, m, REP, ancestors_ptr, row * tokens + m // REP, count)
    elif ancestors_ptr is not None:
        whole = tl.maximum(first, tl.minimum(last, context // N * N))
        state = _attend(
            q, newest, state, first, whole, cache, scale, BLOCK_SIZE, slot, WIDTH, N, False
        )
        first = whole
    acc, best, total = _attend(
        q,
        newest,
        state,
        first,
        last,
        cache,
        scale,
        BLOCK_SIZE,
        slot,
        WIDTH,
        N,
        True,
        tree,
        window,
        gap,
    )
    # Queries that see no position of this split have best = -inf; lse becomes -inf too.
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None]
    if out_scale is not None:
        acc = acc * out_scale
    if length >= end:
        store_lines(out_ptr, acc, token, group, m, count, GROUPS, REP, WIDTH)
    else:
        token = (row.to(tl.int64) * tl.num_programs(2) + split) * tokens
        store_lines(part_ptr, acc, token, group, m, count, GROUPS, REP, WIDTH)
        place = token * (GROUPS * REP) + line_of(group, m, GROUPS, REP)
        tl.store(lse_ptr + place, best + tl.log2(total), mask=m < count)


@Early
@triton.jit(do_not_specialize=[*UNSPECIALIZED, "splits"], do_not_specialize_on_alignment=UNALIGNED)
def _combine_kernel(
    lens_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    window,
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
    EARLY: tl.constexpr,
):
    """Combine the splits of L of the row's `lines` = tokens * heads output lines per program, S
    splits at a time."""
    wait_for_previous(EARLY)
    row = tl.program_id(0)
    _, end, length = row_range(lens_ptr, row, (tokens, span, fill, longest), splits, N, window)
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
        # `higher` is finite from the first iteration on, since split 0 holds position 0; it is -inf
        # only for lines past the last one.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(lse - shift[None, :])
        fade = tl.exp2(best - shift)
        total = total * fade + tl.sum(weights, 0)
        acc = acc * fade[:, None] + tl.sum(part * weights[:, :, None], 0)
        best = higher
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    channel = tl.arange(0, D)[None, :]
    place = (row.to(tl.int64) * lines + line)[:, None] * WIDTH + channel
    tl.store(
        out_ptr + place,
        acc.to(out_ptr.dtype.element_ty),
        mask=(line < lines)[:, None] & (channel < WIDTH),
    )


def combine(
    context_lens: Tensor,
    out: Tensor,
    part: Tensor,
    lse: Tensor,
    plan: tuple[int, ...],
    splits: int,
    n: int,
    window: AttentionWindow | None = None,
) -> None:
    """Combine the results of the splits of rows into out [R, T, heads, d]; see `_decode_kernel` for
    part and lse.

    Args:
        plan: tokens, span, and the last two results of `split_plan`.
        n: positions that the kernel reads at a time.
    """
    rows, tokens, heads, width = out.shape
    lines = tokens * heads
    at_once = 1 if rows * lines <= _FEW_LINES else 8
    _combine_kernel[(rows, triton.cdiv(lines, at_once))](
        context_lens,
        out,
        part,
        lse,
        window,
        *plan,
        splits,
        lines,
        WIDTH=width,
        N=n,
        L=at_once,
        S=16 // at_once,
        D=padded(width),
        num_warps=4,
    )


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    ancestors: Tensor | None = None,
    earlier: int = 0,
    scales: KVScales = UNSCALED,
    window: AttentionWindow | None = None,
    *,
    tiles: Tiles | None = None,
    splits: int | None = None,
) -> Tensor:
    """See the reference. `splits` fixes the number of splits per row, whatever the batch."""
    q = _grouped(q, 5, key_cache, value_cache)
    rows, tokens, groups, rep, width = q.shape
    tiles = tiles or decode_tiles(tokens * rep, width, q.dtype)
    across = groups * triton.cdiv(tokens * rep, tiles.m)
    span = block_tables.shape[1] * key_cache.shape[1]
    fill = splits or 1
    longest = span
    if splits is None:
        read = span
        if window is not None:
            # A tile each is read in part at the end of the sinks and at both ends of the window.
            read = min(span, sum(window) + tokens + earlier + 3 * tiles.n)
        splits, fill, longest = split_plan(rows * across, read, tiles.n)
    plan = tokens, span, fill, longest
    lines = tokens * groups * rep
    out = q.new_empty(rows, tokens, groups * rep, width)
    joined = rows * splits * lines if splits > 1 else 0
    part, lse = (q.new_empty(size, dtype=torch.float32) for size in (joined * width, joined))
    if out.numel() == 0:
        return out
    _decode_kernel[(across, rows, splits)](
        strided(q),
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        out,
        part,
        lse,
        None if ancestors is None else ancestors.contiguous(),
        _factors(width, scales, key_cache),
        window,
        *plan,
        block_tables.stride(0),
        EARLIER=earlier,
        **_sizes(q, key_cache, tiles),
    )
    if splits > 1:
        joined_plan = tokens + earlier, *plan[1:]
        combine(context_lens, out, part, lse, joined_plan, splits, tiles.n, window)
    return out


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def _prefill_kernel(
    q_rows,
    key_ptr,
    value_ptr,
    table_ptr,
    lens_ptr,
    start_ptr,
    out_ptr,
    factors,
    window,
    rows,
    width,
    GROUPS: tl.constexpr,
    REP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """Compute M queries of one row and kv group per program, see `row_of_tile`. A row's tiles with
    the longest context run first. `factors`: see `_factors`."""
    q_ptr, q_token, q_group, q_head = q_rows
    scale, out_scale = factors
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    group = tl.program_id(1)
    row, begin, tokens, first = row_of_tile(start_ptr, rows, tile, REP, M, 1)
    count = tokens * REP
    if first >= count:
        return
    m = first + tl.arange(0, M)
    context = tl.load(lens_ptr + row).to(tl.int32)
    if context < 0:
        store_lines(
            out_ptr, tl.zeros([M, D], tl.float32), begin, group, m, count, GROUPS, REP, WIDTH
        )
        return
    q = load_queries(
        q_ptr + begin * q_token + group * q_group, m, count, q_token, q_head, REP, WIDTH, D
    )
    newest = context + m // REP
    cache = key_ptr + group * WIDTH, value_ptr + group * WIDTH, table_ptr + row.to(tl.int64) * width
    slot: tl.constexpr = GROUPS * WIDTH
    seen_by_all = (context + first // REP + 1) // N * N
    end = context + (tl.minimum(first + M, count) - 1) // REP + 1
    state = empty_state(M, D)
    begin_all = 0
    if window is not None:
        # What only some queries see, before what all of them see; positions in a gap are left out.
        oldest = context + first // REP
        gap = _gap(oldest, window, N)
        all_near = tl.maximum(end - window[0] + N - 1, 0) // N * N
        begin_all = tl.minimum(tl.maximum(all_near, _near(oldest, window[0], N)), seen_by_all)
        state = _attend(
            q,
            newest,
            state,
            0,
            begin_all - gap[1],
            cache,
            scale,
            BLOCK_SIZE,
            slot,
            WIDTH,
            N,
            True,
            None,
            window,
            gap,
        )
    state = _attend(
        q, newest, state, begin_all, seen_by_all, cache, scale, BLOCK_SIZE, slot, WIDTH, N, False
    )
    acc, _, total = _attend(
        q,
        newest,
        state,
        seen_by_all,
        end,
        cache,
        scale,
        BLOCK_SIZE,
        slot,
        WIDTH,
        N,
        True,
        None,
        window,
    )
    # The context is not split here: each query has seen its own key, so its total is not 0.
    acc = acc / total[:, None]
    if out_scale is not None:
        acc = acc * out_scale
    store_lines(out_ptr, acc, begin, group, m, count, GROUPS, REP, WIDTH)


def prefill_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    scales: KVScales = UNSCALED,
    window: AttentionWindow | None = None,
    *,
    tiles: Tiles | None = None,
) -> Tensor:
    """See the reference. A single short row is computed like a decode row, so that its context is
    split."""
    q = _grouped(q, 4, key_cache, value_cache)
    (count, groups, rep, width), rows = q.shape, len(context_lens)
    if count == 0:
        return q.new_empty(0, groups * rep, width)
    chosen = tiles or prefill_tiles(count * rep, width, q.dtype)
    blocks = count * rep // chosen.m + rows
    if tiles is None and rows == 1 and 2 * blocks * groups <= busy_programs():
        places = block_tables, context_lens
        return paged_attention(
            q[None], key_cache, value_cache, *places, scales=scales, window=window
        )[0]
    out = q.new_empty(count, groups * rep, width)
    _prefill_kernel[(blocks, groups)](
        strided(q),
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        query_start,
        out,
        _factors(width, scales, key_cache),
        window,
        rows,
        block_tables.stride(0),
        **_sizes(q, key_cache, chosen),
    )
    return out
