"""Attention: over whole sequences, over a paged cache, and over the depths of a
multi-token-prediction head."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.kernels import MOST_TREE_TOKENS
from mtpkit.kernels.ancestors import seen_tokens
from mtpkit.kernels.kv_store.reference import UNSCALED, KVScales


class AttentionWindow(NamedTuple):
    """What a query sees of the positions up to its own. The sinks are those of Xiao et al. 2023,
    Efficient Streaming Language Models with Attention Sinks, arXiv:2309.17453."""

    size: int
    """The last so many, its own among them; at least 1."""
    sinks: int = 0
    """And the first so many of its document."""


def sequence_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    scale: float | None = None,
    window: AttentionWindow | None = None,
) -> Tensor:
    """Causal attention inside each document.

    Args:
        q: [b, s, heads, d]; k: [b, s, kv_heads, d]; v: [b, s, kv_heads, e].
        documents: [b, s] int; None: one document per row.
        scale: factor of the scores; None: 1 / sqrt(d).
        window: None: queries see all of their document up to their position.

    Returns:
        [b, s, heads, e].
    """
    mask = None
    if documents is not None or window is not None:
        mask = _seen(q.shape[1], documents, window, q.device)[:, None]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    causal = mask is None
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def _seen(
    length: int, documents: Tensor | None, window: AttentionWindow | None, device: torch.device
) -> Tensor:
    """[1 or b, s, s] bool, the keys that each query of a sequence sees."""
    mask = torch.ones(1, length, length, dtype=torch.bool, device=device).tril()
    if documents is not None:
        mask = mask & (documents[:, :, None] == documents[:, None, :])
    if window is None:
        return mask
    place = torch.arange(length, device=device)
    near = place[:, None] - place < window.size
    # Of a row of the mask, the first key that is seen begins the query's document.
    begins = mask.int().argmax(-1)
    return mask & (near | (place - begins[..., None] < window.sinks))


def depth_attention(
    q: Tensor,
    first_k: Tensor,
    first_v: Tensor,
    later_k: list[Tensor],
    later_v: list[Tensor],
    documents: Tensor | None = None,
    scale: float | None = None,
    window: AttentionWindow | None = None,
) -> Tensor:
    """Compute attention of MTP depth k as serving does: position i sees depth 1's entries at j <=
    i, and the entries of depths 2..k at i itself.

    Args:
        q: [b, s, heads, d], queries of depth k.
        first_k: [b, s, kv_heads, d], depth 1; first_v: [b, s, kv_heads, e].
        later_k, later_v: depths 2..k in order, each with the shape of depth 1's keys or values.
        documents: [b, s] int; None: one document per row.
        scale: factor of the scores; None: 1 / sqrt(d).
        window: of the query's own position, i + k - 1, so that its last k - 1 positions are the
            later depths' entries; at least k. None: queries see all of their document.

    Returns:
        [b, s, heads, e] in the dtype of q.
    """
    batch, length, heads, width = q.shape
    groups = first_k.shape[2]
    grouped = q.view(batch, length, groups, heads // groups, width).permute(0, 2, 3, 1, 4).float()
    grouped = grouped * (1 / math.sqrt(width) if scale is None else scale)
    mask = _seen(length, documents, window_before(window, len(later_k)), q.device)[:, None, None]
    # [b, g, 1, s, d]
    keys, values = (t.permute(0, 2, 1, 3).float()[:, :, None] for t in (first_k, first_v))
    scores = [(grouped @ keys.transpose(-1, -2)).masked_fill(~mask, float("-inf"))]
    diagonal = torch.stack(later_k, 3).permute(0, 2, 1, 3, 4).float()  # [b, g, s, depths, d]
    scores.append(torch.einsum("bgrsd,bgsed->bgrse", grouped, diagonal))
    probs = torch.cat(scores, -1).softmax(-1)
    out = probs[..., :length] @ values
    diagonal_v = torch.stack(later_v, 3).permute(0, 2, 1, 3, 4).float()
    out = out + torch.einsum("bgrse,bgsed->bgrsd", probs[..., length:], diagonal_v)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, length, heads, -1).to(q.dtype)


def window_before(window: AttentionWindow | None, later: int) -> AttentionWindow | None:
    """The window as queries count it from a position that is `later` before their own."""
    return window and window._replace(size=window.size - later)


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
) -> Tensor:
    """Causal attention of the newest T tokens of R rows over the rows' paged keys and values,
    including those of the new tokens.

    Query t of row r has position context_lens[r] + t and sees positions up to its own. The Triton
    twin splits a context in a way that depends on the batch and on the length of the block table,
    so the last bits of a row's output depend on both.

    With `ancestors` the rows are trees. Entry j of a tree lies at position context_lens[r] + j of
    the cache, and a query sees the context and the entries in its mask.

    Args:
        q: [R, T, heads, d]; or [R, T, kv_heads, heads / kv_heads, d] for a view of a fused
            projection whose heads have no single stride.
        key_cache, value_cache: [num_blocks, block_size, kv_heads, d].
        block_tables: [R, B] int64; only blocks with positions below context_lens[r] + T are read.
        context_lens: [R] int64, number of tokens before the T new ones, or before the tree.
        ancestors: [R, T] int64 masks of the T queries, see `kernels.ancestors`; None: a chain.
        earlier: number of the tree's entries that come before those of the T queries.
        scales: of caches in fp8.
        window: None: queries see all positions up to their own. In a tree, a query's position is
            that of the context's end and the number of its ancestors.

    Returns:
        [R, T, heads, d].
    """
    tree = None if ancestors is None else (ancestors, earlier)
    return attend_paged(
        q.flatten(2, -2),
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        tree=tree,
        scales=scales,
        window=window,
    )


def attend_paged(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float | None = None,
    tree: tuple[Tensor, int] | None = None,
    scales: KVScales = UNSCALED,
    window: AttentionWindow | None = None,
) -> Tensor:
    """`paged_attention` of q [R, T, heads, d] with values [num_blocks, block_size, kv_heads, e], to
    [R, T, heads, e].

    Args:
        scale: factor of the scores; None: 1 / sqrt(d).
        tree: `ancestors` and `earlier`; None: a chain.
        scales: of caches in fp8.
        window: as there.
    """
    rows, tokens, heads, width = q.shape
    block_size, groups = key_cache.shape[1:3]
    span = block_tables.shape[1] * block_size
    places = torch.arange(span, device=q.device)
    position = context_lens[:, None] + torch.arange(tokens, device=q.device)
    if tree is None:
        mask = places <= position[..., None]  # [R, T, span]
    else:
        mask = _sees_in_tree(tree[0], places - context_lens[:, None])
        position = context_lens[:, None] + seen_tokens(tree[0], 1 + MOST_TREE_TOKENS).sum(-1) - 1
    if window is not None:
        near = position[..., None] - places < window.size
        mask &= near | (places < window.sinks)
    # What no query sees may be NaN, and NaN times a weight of zero is NaN, so masking the scores is
    # not enough.
    used = mask.any(1)[..., None, None]
    keys, values = (
        torch.where(used, cache[block_tables].view(rows, span, groups, -1).to(q.dtype), 0)
        for cache in (key_cache, value_cache)
    )
    # Heads of a group share keys: stack them as additional queries.
    rep = heads // groups
    stacked = q.reshape(rows, tokens, groups, rep, width).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = mask.repeat(1, rep, 1)[:, None]
    keys = keys.transpose(1, 2)
    values = values.transpose(1, 2)
    # PyTorch adds the mask to the scores, so a key of NaN would reach the queries that do not see
    # it, too.
    broken = ~keys.isfinite().all(-1)[:, :, None]  # [R, groups, 1, span]
    keys = keys.masked_fill(broken.transpose(2, 3), 0.0)
    bias = torch.where(mask, torch.where(broken, math.nan, 0.0), -torch.inf).to(q.dtype)
    if scales.key != 1:
        scale = scales.key * (1 / math.sqrt(width) if scale is None else scale)
    out = F.scaled_dot_product_attention(stacked, keys, values, attn_mask=bias, scale=scale)
    if scales.value != 1:
        out = out * scales.value
    return out.unflatten(2, (rep, tokens)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _sees_in_tree(ancestors: Tensor, entries: Tensor) -> Tensor:
    """[R, T, span] bool, whether each query sees the tree entries with the numbers `entries` [R,
    span]; negative ones are context, which all queries see."""
    count = 1 + MOST_TREE_TOKENS
    own = seen_tokens(ancestors, count).gather(
        2, entries.clamp(0, count - 1)[:, None].expand(-1, ancestors.shape[1], -1)
    )
    return (entries < 0)[:, None] | own


def prefill_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    scales: KVScales = UNSCALED,
    window: AttentionWindow | None = None,
) -> Tensor:
    """`paged_attention` of R rows with any number of new tokens each, concatenated in q.

    No size depends on the contents of `query_start`, so a CUDA graph can be captured. The Triton
    twin may split the context of a single short row as `paged_attention` does.

    Example, query_start [4, 6, 9]: q has 5 tokens; the first 2 belong to row 0, the others to row
    1.

    Args:
        q: [T, heads, d] or [T, kv_heads, heads / kv_heads, d].
        key_cache, value_cache, block_tables: as for `paged_attention`.
        context_lens: [R] int64, number of tokens before the new ones. A row with -1 is padding: its
            tokens read no block, and their outputs are zero.
        query_start: [R + 1] int64, first token of each row and the end of the last row; q begins at
            token query_start[0]. Rows may be empty.
        scales: of caches in fp8.
        window: as there.

    Returns:
        [T, heads, d].
    """
    out = torch.zeros_like(q.flatten(1, -2))
    for row, tokens in chunk_rows(query_start, context_lens, len(q)):
        own = block_tables[row], context_lens[row]
        rows = paged_attention(
            q[None, tokens], key_cache, value_cache, *own, scales=scales, window=window
        )
        out[tokens] = rows[0]
    return out


def chunk_rows(
    query_start: Tensor, context_lens: Tensor, count: int
) -> Iterator[tuple[slice, slice]]:
    """Yield (row, its tokens), both as slices, for each row that has tokens and is not padding; see
    `prefill_attention`.

    Args:
        count: number of tokens of all rows together.
    """
    bounds = (query_start - query_start[0]).tolist()
    assert bounds[-1] == count, f"rows end at token {bounds[-1]} of {count}"
    for row, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end and context_lens[row] >= 0:
            yield slice(row, row + 1), slice(begin, end)
