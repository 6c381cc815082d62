"""Multi-head latent attention over a paged cache of latents, with the projections of keys and values absorbed.

DeepSeek-V2 (arXiv:2405.04434, section 2.1.2). Of a token the cache holds one row for all heads, [latent c; rotary key].
A head with keys Wk c and values Wv c has the scores q (Wk c) = (q Wk) c and the output sum p Wv c = Wv sum p c: its
queries are multiplied by Wk before, its outputs by Wv after, and in between all heads attend to the rows themselves.

Shape legend: R rows (requests), T tokens per row, C width of the latent, P width of the rotary key.
"""

import torch
from torch import Tensor

from mtpkit.kernels.attention.reference import attend_paged, chunk_rows


def latent_attention(
    q_latent: Tensor, q_rotary: Tensor, cache: Tensor, block_tables: Tensor, context_lens: Tensor, scale: float
) -> Tensor:
    """Causal attention of the newest T tokens of R rows over their paged rows, the new tokens' included.

    Query t of row r has position context_lens[r] + t and sees positions up to its own. How the Triton twin splits a
    context depends on the batch and on the length of the block table, and so do the last bits of a row's output.

    Args:
        q_latent: [R, T, heads, C], queries times Wk; q_rotary: [R, T, heads, P], rotated. Of any strides but the last.
        cache: [num_blocks, block_size, C + P].
        block_tables: [R, B] int64; only blocks with positions below context_lens[r] + T are read.
        context_lens: [R] int64, number of tokens before the T new ones; -1: the row's output is zero.
        scale: factor of the scores.

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
    )
    return torch.where((context_lens >= 0)[:, None, None, None], out, 0)


def latent_prefill_attention(
    q_latent: Tensor,
    q_rotary: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    scale: float,
) -> Tensor:
    """`latent_attention` of R rows of any number of new tokens each, concatenated; see `prefill_attention` for rows.

    Args:
        q_latent: [T, heads, C], q_rotary: [T, heads, P].
        query_start: [R + 1] int64, first token of each row and the end of the last one; the queries begin at token
            query_start[0].

    Returns:
        [T, heads, C].
    """
    out = torch.zeros_like(q_latent)
    for row, tokens in chunk_rows(query_start, context_lens, len(q_latent)):
        own = block_tables[row], context_lens[row]
        out[tokens] = latent_attention(q_latent[None, tokens], q_rotary[None, tokens], cache, *own, scale)[0]
    return out
