"""State space duality: the chunked scan of Mamba2 (Dao and Gu 2024, arXiv:2405.21060, section 6)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    documents: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_size: int = 128,
) -> tuple[Tensor, Tensor]:
    """S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T; y_t = S_t C_t + D x_t, with S = 0 before each document.

    Shape legend: b batch, s sequence, h heads, p head width, g groups of h / g heads, n state width.

    Args:
        x: [b, s, h, p].
        dt: [b, s, h], positive.
        A: [h], negative.
        B, C: [b, s, g, n].
        D: [h] or None.
        documents: [b, s] int, non-decreasing; None: one document a row.
        initial_state: [b, h, p, n], continued by the first document of each row; None: zeros.
        chunk_size: tokens whose pairs are formed at a time; changes rounding only.

    Returns:
        y [b, s, h, p] in the dtype of x, and the fp32 state after the last token [b, h, p, n]. Computed in fp32,
        the sums of log decays in fp64.
    """
    batch, length, heads, width = x.shape
    groups, state_dim = B.shape[2:]
    rep = heads // groups
    chunk = min(chunk_size, length)
    pad = -length % chunk
    num_chunks = (length + pad) // chunk

    def chunked(t: Tensor, *tail: int) -> Tensor:
        return F.pad(t.float(), (0, 0) * (t.dim() - 2) + (0, pad)).view(batch, num_chunks, chunk, *tail)

    # Padding has dt = 0: it neither decays the state nor adds to it.
    dt_c = chunked(dt, groups, rep)
    x_c = chunked(x, groups, rep, width) * dt_c[..., None]
    B_c, C_c = chunked(B, groups, state_dim), chunked(C, groups, state_dim)
    # Log decay since the chunk's start, [b, c, l, g, r]. In fp64: after a token that forgets nearly everything, the
    # difference of two large sums is the small decay between the tokens that follow.
    decay = torch.cumsum((dt_c * A.float().view(groups, rep)).double(), dim=2)

    pairs = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()[None, None, :, :, None, None]
    to_end: Tensor | None = None
    from_start: Tensor | None = None
    if documents is not None:
        docs = F.pad(documents, (0, pad), mode="replicate") if pad else documents
        docs = docs.view(batch, num_chunks, chunk)
        pairs = pairs & (docs[..., :, None] == docs[..., None, :])[..., None, None]
        last = docs[..., -1]
        previous = torch.cat([docs[:, :1, 0], last[:, :-1]], 1)
        to_end = (docs == last[..., None])[..., None, None]
        from_start = (docs == previous[..., None])[..., None, None]

    # Pairs inside a chunk.
    log_pair = (decay[:, :, :, None] - decay[:, :, None, :]).float()  # [b, c, l, s, g, r]
    weights = torch.exp(log_pair.masked_fill(~pairs, float("-inf")))
    scores = torch.einsum("bclgn,bcsgn->bclsg", C_c, B_c)
    y = torch.einsum("bclsgr,bcsgrp->bclgrp", scores[..., None] * weights, x_c)

    # What each chunk adds to the state, and the states at the chunks' starts.
    weight_end = torch.exp((decay[:, :, -1:] - decay).float())
    if to_end is not None:
        weight_end = weight_end * to_end
    added = torch.einsum("bcsgn,bcsgrp->bcgrpn", B_c, x_c * weight_end[..., None])
    keep = torch.exp(decay[:, :, -1].float())  # [b, c, g, r]
    if from_start is not None:
        keep = keep * from_start[:, :, -1]
    state = x_c.new_zeros(batch, groups, rep, width, state_dim)
    if initial_state is not None:
        state = initial_state.float().view_as(state)
    starts = []
    for c in range(num_chunks):
        starts.append(state)
        state = state * keep[:, c, ..., None, None] + added[:, c]

    weight_start = torch.exp(decay.float())
    if from_start is not None:
        weight_start = weight_start * from_start
    y = y + torch.einsum("bclgn,bcgrpn->bclgrp", C_c, torch.stack(starts, 1)) * weight_start[..., None]
    y = y.reshape(batch, num_chunks * chunk, heads, width)[:, :length]
    if D is not None:
        y = y + x.float() * D.float()[:, None]
    return y.to(x.dtype), state.reshape(batch, heads, width, state_dim)
