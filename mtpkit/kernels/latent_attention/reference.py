"""Multi-head latent attention over a paged cache of latents, with the projections of keys and
values absorbed.

The method is that of DeepSeek-V2 (arXiv:2405.04434, section 2.1.2). The cache holds one row per
token for all heads, [latent c; rotary key]. A head with keys Wk c and values Wv c has the scores q
(Wk c) = (q Wk) c and the output sum p Wv c = Wv sum p c. Its queries are therefore multiplied by Wk
before attention and its outputs by Wv after it, and in between all heads attend to the cached rows
themselves.

Prefill chunks attend in this way to the tokens that were cached before the chunk. Inside the chunk
they use each head's own keys and values.

Shape legend: R rows (requests), T tokens per row, C width of the latent, P width of the rotary key.
"""

import torch
from torch import Tensor

from mtpkit.kernels.attention.reference import attend_paged, chunk_rows


def latent_attention(
    q_latent: Tensor,
    q_rotary: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    ancestors: Tensor | None = None,
    earlier: int = 0,
) -> Tensor:
    """Causal attention of the newest T tokens of R rows over the paged cache, including the new
    tokens' own entries.

    Query t of row r has position context_lens[r] + t and sees positions up to its own. The Triton
    twin splits a context in a way that depends on the batch and on the length of the block table,
    so the last bits of a row's output depend on both.

    Args:
        q_latent: [R, T, heads, C], queries times Wk; q_rotary: [R, T, heads, P], rotated. All
            strides but the last may be arbitrary.
        cache: [num_blocks, block_size, C + P].
        block_tables: [R, B] int64; only blocks with positions below context_lens[r] + T are read.
        context_lens: [R] int64, number of tokens before the T new ones; -1: the row's output is
            zero.
        scale: factor of the scores.
        ancestors, earlier: for rows that are trees, see `paged_attention`.

    Returns:
        [R, T, heads, C], latents weighted by softmax(scale * (q_latent c + q_rotary k)).
    """
    rows = cache[:, :, None]
    out = attend_paged(
        torch.cat([q_latent, q_rotary], -1),
        rows,
        rows[..., : q_latent.shape[-1]],
        block_tables,
        context_lens.clamp_min(0),
        scale,
        None if ancestors is None else (ancestors, earlier),
    )
    return torch.where((context_lens >= 0)[:, None, None, None], out, 0)


def latent_context_attention(
    q_latent: Tensor,
    q_rotary: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of R concatenated rows, with any number of new tokens each, over the tokens cached
    before the new ones.

    No size depends on the contents of `query_start`, so a CUDA graph can be captured.
    `chunk_attention` adds the attention among the new tokens, for which each head's own keys and
    values need fewer FLOPs than latents.

    Args:
        q_latent: [T, heads, C], q_rotary: [T, heads, P], cache, block_tables: as for
            `latent_attention`.
        context_lens: [R] int64, number of tokens before the new ones; -1 for rows that are padding.
            For a row with 0 or -1 nothing is read.
        query_start: [R + 1] int64, first token of each row and the end of the last row; the queries
            begin at token query_start[0].

    Returns:
        Latents weighted by softmax, [T, heads, C], zero where there is no context; and the
        logarithm of the sum of the exponentials of the scores, [T, heads] fp32, -inf where there is
        no context.
    """
    out = torch.zeros_like(q_latent)
    lse = q_latent.new_full(q_latent.shape[:2], -torch.inf, dtype=torch.float32)
    queries = torch.cat([q_latent, q_rotary], -1).float()
    for row, tokens in chunk_rows(query_start, context_lens, len(q_latent)):
        if not (length := int(context_lens[row])):
            continue
        entries = cache[block_tables[row].flatten()].flatten(0, 1)[:length].float()
        scores = scale * torch.einsum("thd,nd->thn", queries[tokens], entries)
        lse[tokens] = scores.logsumexp(-1)
        out[tokens] = (scores.softmax(-1) @ entries[:, : q_latent.shape[-1]]).to(out.dtype)
    return out, lse


def chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    earlier: Tensor,
    earlier_lse: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention inside each of R concatenated rows, in one softmax with the attention to the
    tokens before the row.

    Args:
        q, k: [T, heads, d], v: [T, heads, e]. All strides but the last may be arbitrary.
        earlier: [T, heads, e], the values before the row, weighted by a softmax over their scores
            alone; earlier_lse: [T, heads] fp32, the logarithm of the sum of the exponentials of
            these scores, -inf where nothing comes before.
        context_lens, query_start: as for `latent_context_attention`; a row with context -1 gets
            zeros.
        scale: factor of the scores.

    Returns:
        [T, heads, e].
    """
    out = v.new_zeros(v.shape)
    for _, tokens in chunk_rows(query_start, context_lens, len(q)):
        own = slice(tokens.start, tokens.stop)
        scores = scale * torch.einsum("thd,nhd->htn", q[own].float(), k[own].float())
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril()
        both = torch.cat(
            [earlier_lse[own].t()[..., None], scores.masked_fill(~seen, -torch.inf)], -1
        ).softmax(-1)
        values = (
            both[..., 1:] @ v[own].transpose(0, 1).float()
            + both[..., :1] * earlier[own].transpose(0, 1).float()
        )
        out[own] = values.transpose(0, 1).to(out.dtype)
    return out
