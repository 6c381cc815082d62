"""Bookkeeping of a step's rows before and after the model runs: slot mapping, positions, tokens of
the next step.

Shape legend: S slots, D decode rows of W tokens, R rows, N rows that sample, K drafts, B blocks per
row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mtpkit.kernels.ring import ring_base


class DecodeRows(NamedTuple):
    """The decode rows of a step, all int64."""

    token_ids: Tensor
    """[D * W]."""
    rows: Tensor
    """[D * W], the row of each token."""
    positions: Tensor
    """[D * W]."""
    kv_slots: Tensor
    """[D * W], see `kv_slots`."""
    flat: Tensor
    """[D * W], 0, 1, 2, ..."""
    starts: Tensor
    """[D + 1], the first token of each row, and the end of the last one."""
    context_lens: Tensor
    """[D]."""
    counts: tuple[Tensor, ...]
    """[D] each, the `counts` of each row's slot."""


def decode_rows(
    slots: Tensor,
    live: Tensor | None,
    num_computed: Tensor,
    tokens: Tensor,
    counts: tuple[Tensor, ...],
    block_tables: Tensor,
    width: int,
    block_size: int,
) -> DecodeRows:
    """Gather the input tokens of decode rows, their positions and slot mapping, and the counts of
    their states.

    Args:
        slots: [D] int64; -1: a null row, which reads the last slot.
        live: [D] int64, negative for rows that have ended, whose keys and values are not stored;
            None: all are live.
        num_computed: [S] int64, numbers of committed positions.
        tokens: [S, W or more] int64.
        counts: [S] int64 each, counts that states keep per slot.
        block_tables: [R, B] int64, the blocks of each row.
        width: W.
    """
    index = torch.arange(len(slots) * width, device=slots.device)
    context_lens = num_computed[slots]
    rows = index // width
    positions = (context_lens[:, None] + index[:width]).flatten()
    places = kv_slots(block_tables, rows, positions, block_size)
    return DecodeRows(
        token_ids=tokens[slots, :width].flatten(),
        rows=rows,
        positions=positions,
        kv_slots=places if live is None else torch.where(live[rows] < 0, -1, places),
        flat=index,
        starts=torch.arange(len(slots) + 1, device=slots.device) * width,
        context_lens=context_lens,
        counts=tuple(held[slots] for held in counts),
    )


def kv_slots(block_tables: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """[T] slot mapping: the cache entries of tokens at `positions` [T] of `rows` [T], given
    `block_tables` [R, B]."""
    return block_tables[rows, positions // block_size] * block_size + positions % block_size


def ring_lens_after(ring_lens: Tensor, new: Tensor, width: int, length: int) -> Tensor:
    """Count the committed entries in rings of `length` places after a step.

    Args:
        ring_lens: [R] int64, the committed entries before the step.
        new: [R] int64, how many of each row's `width` input tokens are committed.
    """
    return ring_base(ring_lens, width, length) + new


def store_rows(
    slots: Tensor,
    num_computed: Tensor,
    tokens: Tensor,
    context_lens: Tensor,
    last: Tensor,
    accepted: Tensor,
    chosen: Tensor,
    drafts: Tensor,
    counts: tuple[Tensor, ...] = (),
    new_counts: tuple[Tensor, ...] = (),
) -> None:
    """Write the computed positions of rows, the counts of their states, and their next input
    tokens: the chosen token and its drafts.

    Args:
        slots: [R] int64; -1: a null row, which writes the last slot.
        num_computed: [S] int64, written.
        tokens: [S, 1 + K or more] int64, written for the N rows that sample, which come first; 0
            for negative tokens.
        context_lens: [R] int64, positions committed before the step.
        last: [R] int64, index of the newest committed token within each row.
        accepted, chosen: [R] and [R, 1 + K] int64; a row chose the token `chosen[accepted]`.
        drafts: [N, K] int64.
        counts: [S] int64 each, written.
        new_counts: [R] int64 each, the values that are written to `counts`.
    """
    count = len(drafts)
    for held, new in zip(counts, new_counts, strict=True):
        held[slots] = new
    num_computed[slots] = context_lens + last + 1
    newest = chosen[:count].gather(1, accepted[:count, None])
    tokens[slots[:count], : 1 + drafts.shape[1]] = torch.cat([newest, drafts], 1).clamp_min(0)
