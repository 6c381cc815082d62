"""State space duality: the chunked scan of Mamba2 (Dao and Gu 2024, arXiv:2405.21060, section
6)."""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.kernels.rounding.reference import Noise, narrowed_row


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
    """Compute S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T and y_t = S_t C_t + D x_t, with S = 0
    before each document.

    Shape legend: b batch, s sequence, h heads, p head width, g groups of h / g heads, n state
    width.

    Args:
        x: [b, s, h, p].
        dt: [b, s, h], positive.
        A: [h], negative.
        B, C: [b, s, g, n].
        D: [h] or None.
        documents: [b, s] int, non-decreasing; None: one document per row.
        initial_state: [b, h, p, n], continued by the first document of each row; None: zeros.
        chunk_size: tokens per chunk; changes rounding only.

    Returns:
        y [b, s, h, p] in the dtype of x, and the fp32 state after the last token [b, h, p, n]. All
        is computed in fp32 except the sums of log decays, which are in fp64.
    """
    batch, length, heads, width = x.shape
    groups, state_dim = B.shape[2:]
    rep = heads // groups
    chunk = min(chunk_size, length)
    # Padding has dt = 0: it neither decays the state nor adds to it.
    dt_c = _chunked(dt, chunk, groups, rep).permute(0, 1, 3, 4, 2)  # [b, c, g, r, l]
    # [b, c, g, r, l, p]
    x_c = _chunked(x, chunk, groups, rep, width).permute(0, 1, 3, 4, 2, 5) * dt_c[..., None]
    # [b, c, g, l, n]
    B_c, C_c = (_chunked(t, chunk, groups, state_dim).transpose(2, 3) for t in (B, C))
    # Log decay since the chunk's start, [b, c, g, r, l]. In fp64: after a token that forgets nearly
    # everything, small decays between later tokens are differences of two large sums.
    decay = torch.cumsum((dt_c * A.float().view(groups, rep, 1)).double(), dim=-1)

    pairs = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    to_end: Tensor | None = None
    from_start: Tensor | None = None
    if documents is not None:
        same, to_end, from_start = _within_documents(documents, chunk)
        pairs = pairs & same
    y = _inside_chunks(x_c, B_c, C_c, decay, pairs)

    # Contribution of each chunk to the state, and the states at the chunks' starts.
    weight_end = torch.exp((decay[..., -1:] - decay).float())
    if to_end is not None:
        weight_end = weight_end * to_end
    # [b, c, g, r, p, n]
    added = (x_c * weight_end[..., None]).transpose(-1, -2) @ B_c[:, :, :, None]
    keep = torch.exp(decay[..., -1].float())  # [b, c, g, r]
    if from_start is not None:
        keep = keep * from_start[..., -1]
    state = x_c.new_zeros(batch, groups, rep, width, state_dim)
    if initial_state is not None:
        state = initial_state.float().view_as(state)
    starts, state = _pass_states(state, keep, added)

    weight_start = torch.exp(decay.float())
    if from_start is not None:
        weight_start = weight_start * from_start
    y = y + (C_c[:, :, :, None] @ starts.transpose(-1, -2)) * weight_start[..., None]
    y = y.permute(0, 1, 4, 2, 3, 5).reshape(batch, -1, heads, width)[:, :length]
    if D is not None:
        y = y + x.float() * D.float()[:, None]
    return y.to(x.dtype), state.reshape(batch, heads, width, state_dim)


def _chunked(t: Tensor, chunk: int, *tail: int) -> Tensor:
    """Reshape [b, s, ...] to [b, c, l, *tail] in fp32, with zeros after the end."""
    pad = -t.shape[1] % chunk
    t = t.float() if pad == 0 else F.pad(t.float(), (0, 0) * (t.dim() - 2) + (0, pad))
    return t.reshape(t.shape[0], t.shape[1] // chunk, chunk, *tail)


def _inside_chunks(x: Tensor, B: Tensor, C: Tensor, decay: Tensor, pairs: Tensor) -> Tensor:
    """Contributions of tokens to outputs of their own chunk, [b, c, g, r, l, p]; `pairs` [.., l, l]
    masks them."""
    log_pair = (decay[..., :, None] - decay[..., None, :]).float()  # [b, c, g, r, l, s]
    weights = torch.exp(log_pair.masked_fill(~pairs, float("-inf")))
    scores = (C @ B.transpose(-1, -2))[:, :, :, None]
    return (scores * weights) @ x


def _pass_states(state: Tensor, keep: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """States at the starts of chunks [b, c, g, r, p, n], and the state after the last chunk."""
    starts = []
    for kept, new in zip(keep.unbind(1), added.unbind(1), strict=True):
        starts.append(state)
        state = state * kept[..., None, None] + new
    return torch.stack(starts, 1), state


class KeptStates(NamedTuple):
    """Destinations for the states at regular positions of R rows."""

    every: int
    """Positions between two states; a multiple of the scan's chunk size."""
    first: Tensor
    """[R] int64, place of each row's first kept state; its later ones follow. -1: no state of the
    row is kept."""
    states: Tensor
    """[places, h, p, n] of any float dtype; may be a view."""


def ssd_varlen(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    starts: Tensor,
    chunk_size: int,
    states: Tensor | None = None,
    slots: Tensor | None = None,
    context_lens: Tensor | None = None,
    kept: KeptStates | None = None,
    noise: Noise | None = None,
) -> Tensor:
    """Scan R concatenated rows, each from its stored state, which the state after the row then
    replaces.

    A row continues states[slots[r]] if context_lens[r] > 0; otherwise it starts from zeros, and its
    slot may hold anything before. Chunks end at positions (context_lens[r] plus the index in the
    row) that are multiples of the chunk size: with fp32 states, a prompt that is cut at such
    positions gives bit-identical fp32 results however it is cut. No size depends on the values in
    `starts`, so that a CUDA graph can be captured.

    Args:
        x: [T, h, p]; dt: [T, h], before bias and softplus; B, C: [T, g, n]. All may be views of
            larger tensors.
        A_log, D, dt_bias: [h], with A = -exp(A_log); `dt_limit` clamps the softplus.
        starts: [R + 1] int64, first token of each row and the end of the last one; x begins at
            token starts[0]. Rows may be empty: such a row leaves its state as it is, or makes it
            zero if it has no context.
        chunk_size: tokens per chunk; changes rounding only.
        states: [slots, h, p, n] of any float dtype, may be a view, updated in place at `slots`.
            None: every row starts from zeros, and no state is kept.
        slots, context_lens: [R] int64, needed with `states`. The tokens of a row at slot -1 are
            padding: they touch no state, and their y is zero.
        kept: takes the state after each position of row r that is a multiple of `kept.every` and
            lies in context_lens[r] + 1 .. context_lens[r] + length of the row, at places
            kept.first[r], kept.first[r] + 1, ... Positions count tokens: the state after position
            64 has seen 64 tokens. Needs `states`.
        noise: makes the rounding of float16 `states` stochastic, see `rounding.reference`; None: to
            nearest. States of `kept` are always rounded to nearest.

    Returns:
        y [T, h, p] in the dtype of x.

    Example, chunk size 64, starts [0, 100, 100], context_lens [50, 0]: row 0 is scanned as the
    tokens at 50 .. 63, 64 .. 127 and 128 .. 149. With `kept.every` 64, the states after 64 and
    after 128 tokens are kept. Row 1 is empty: its state becomes zero.
    """
    bounds = (starts - starts[0]).tolist()
    assert bounds[-1] == len(x), f"rows end at token {bounds[-1]} of {len(x)}"
    assert states is not None or kept is None, (
        "states are kept at positions, which only rows with a context have"
    )
    assert kept is None or kept.every % chunk_size == 0, (
        f"{kept} at other positions than ends of chunks"
    )
    A = -torch.exp(A_log.float())
    y = x.new_zeros(x.shape)
    for row, (begin, end) in enumerate(pairwise(bounds)):
        context = 0
        state = x.new_zeros(*x.shape[1:], B.shape[-1], dtype=torch.float32)
        if states is not None:
            assert slots is not None and context_lens is not None
            slot = int(slots[row])
            context = int(context_lens[row])
            if slot < 0 or (context > 0 and begin == end):
                continue
            if context > 0:
                state = states[slot].float()
        first = -1 if kept is None else int(kept.first[row])
        while begin < end:
            stop = min(end, begin + chunk_size - context % chunk_size)
            span = slice(begin, stop)
            y[span], state = _scan_chunk(
                x[span], dt[span], B[span], C[span], A, D, dt_bias, dt_limit, state
            )
            context = context + stop - begin
            begin = stop
            if kept is not None and first >= 0 and context % kept.every == 0:
                kept.states[first] = state.to(kept.states)
                first += 1
        if states is not None:
            states[slot] = narrowed_row(state, states.dtype, noise, row, context - 1)
    return y


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    starts: Tensor,
    chunk_size: int,
    states: Tensor | None = None,
    wide: bool = False,
) -> Tensor:
    """Scan R concatenated rows of any lengths. Differentiable in all tensors but `starts`.

    Args:
        x: [T, h, p]; dt: [T, h], before bias and softplus; B, C: [T, g, n]. All may be views of
            larger tensors.
        A_log, D, dt_bias: [h], with A = -exp(A_log); D may be None; `dt_limit` clamps the softplus.
        starts: [R + 1] int64, first token of each row and the end of the last one; x begins at
            token starts[0].
        chunk_size: tokens per chunk; changes rounding only.
        states: [R, h, p, n], the states before the rows; None: zeros.
        wide: return y in fp32 whatever the dtype of x.

    Returns:
        y [T, h, p] in the dtype of x; fp32 if `wide`.
    """
    lens = starts.diff()
    A = -torch.exp(A_log.float())
    steps = F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)
    tokens = [t[None] for t in (x.float() if wide else x, steps, B, C)]

    def scan(span: slice, **more: Tensor | None) -> Tensor:
        x, steps, B, C = (t[:, span] for t in tokens)
        return ssd_chunk_scan(x, steps, A, B, C, D, chunk_size=chunk_size, **more)[0][0]

    if states is None:
        documents = torch.repeat_interleave(lens)[None] if len(lens) > 1 else None
        return scan(slice(None), documents=documents)
    bounds = pairwise((starts - starts[0]).tolist())
    rows = (
        (slice(*span), state[None])
        for span, state in zip(bounds, states, strict=True)
        if span[0] < span[1]
    )
    return torch.cat([scan(span, initial_state=state) for span, state in rows])


def _scan_chunk(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute y of one chunk after `state` [h, p, n], and the next state. All ops run on the
    chunk's tokens alone, since the last bit of an elementwise op may depend on an element's place
    in a tensor."""
    steps = F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)
    x, steps, B, C = (t[None] for t in (x, steps, B, C))
    y, states = ssd_chunk_scan(
        x, steps, A, B, C, D, initial_state=state[None], chunk_size=x.shape[1]
    )
    return y[0], states[0]


def _within_documents(documents: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Masks from documents [b, s]: pairs of a chunk in one document [b, c, 1, 1, l, l], tokens [b,
    c, 1, 1, l] in the document of their chunk's last token, and tokens in the document of the last
    token before their chunk."""
    pad = -documents.shape[1] % chunk
    docs = F.pad(documents, (0, pad), mode="replicate") if pad else documents
    docs = docs.reshape(len(docs), -1, 1, 1, chunk)
    last = docs[..., -1:]
    previous = torch.cat([docs[:, :1, ..., :1], last[:, :-1]], 1)
    return docs[..., :, None] == docs[..., None, :], docs == last, docs == previous
