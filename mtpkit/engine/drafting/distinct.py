"""Drafts from distinct heads: a layer and a cache per depth.

Shape legend: T tokens of the step, R rows, S rows that sample, K drafts, V vocabulary, h hidden size. p is a row's
newest accepted position: h_p is known and t_{p+1} was just chosen.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mtpkit.engine.batch import kv_slots
from mtpkit.engine.drafting.protocol import MtpDrafter
from mtpkit.engine.step import Batch, Drafts, Verdict, embeddable
from mtpkit.model import mtp_forward
from mtpkit.model.inputs import StepInput
from mtpkit.platform import to_device


class DistinctDrafter(MtpDrafter):
    """One physical layer and one cache per depth, for two drafts or more; one draft needs no window.

    Entry j of depth k is computed from (g^{k-1}_j, t_{j+k}). When a step begins at position c, entries c-K+1 .. c-1 of
    the deeper caches were computed from drafts. Every depth therefore runs over a window: the positions of the step and
    the K - 1 before them, whose base hidden states are stored per slot. Where a token is not known yet, the new draft
    takes its place. Recurrent states of the heads are those before the window, K - 1 positions behind; see
    `StateSizes.behind`.

    Example, K = 3, one row: committed 10, computed positions 10..13, one draft accepted. The window is 8..13, p = 11,
    t_12 was just chosen. Depth 2 reads t_10 .. t_12 at 8..10 and draft 1 at 11; depth 3 reads t_11, t_12, draft 1,
    draft 2 at 8..11. Positions 12 and 13 hold garbage that the next window, from 10 on, replaces.

    In a step with fewer than K drafts all depths run, which keeps their caches complete for later steps.
    """

    def __init__(
        self, model: Any, num_speculative_tokens: int, block_size: int, sample: bool, draft_token_ids: Tensor | None
    ) -> None:
        super().__init__(model, num_speculative_tokens, block_size, sample, draft_token_ids)
        self.earlier = (num_speculative_tokens - 1, model.mtpkit_config.hidden_size)

    def draft(self, hidden: Tensor, batch: Batch, verdict: Verdict) -> Drafts:
        window = _Window(batch, verdict, hidden, self.num_speculative_tokens, self.block_size)
        count, state = batch.plan.num_sampling_rows, window.hidden
        newest, flat = window.newest[:count], window.flat_newest[:count]
        chosen: list[tuple[Tensor, Tensor | None]] = []
        for depth in range(1, self.num_speculative_tokens + 1):
            drafting = flat if depth <= batch.plan.num_speculative_tokens else flat[:0]
            last = depth == self.num_speculative_tokens
            tokens = window.token_ids(depth)[None]
            state = mtp_forward(self.model, depth, state, tokens, window.inputs, keep=drafting if last else None)
            if len(drafting):
                chosen.append(self.choose(state[:, 0] if last else state[flat, 0], depth, batch, newest))
                window.future[:count, depth] = embeddable(chosen[-1][0])
        return self.drafts(chosen, batch)


class _Window:
    """Flat layout of a step's positions and up to K - 1 positions before each row, W tokens in all.

    All decode rows have K - 1 + `decode_width` tokens, so that shapes do not depend on values that only the device
    knows. If fewer than K - 1 positions precede the step, the row extends beyond it, within the lookahead that the
    scheduler reserves; the next window replaces those entries. The K - 1 newest positions of a chunk are also a decode
    row, which continues from the states that the positions before them, a chunk of their own, leave.

    Example, K = 3: a chunk of the positions 4 .. 9 becomes the decode row 8, 9 and the chunk 2 .. 7.
    """

    def __init__(self, batch: Batch, verdict: Verdict, hidden: Tensor, depths: int, block_size: int) -> None:
        self.depths, begin = depths, batch.inputs.context_lens
        rows = (_decode_rows if batch.inputs.num_decode_rows else _chunks)(batch, depths - 1)
        offsets = rows.inputs.context_lens - rows.inputs.query_start[:-1]
        self.positions = offsets[rows.of_token] + torch.arange(len(rows.of_token), device=begin.device)
        slots = kv_slots(rows.inputs.block_tables, rows.of_token, self.positions, block_size)
        self.inputs = replace(rows.inputs, positions=self.positions, kv_slots=slots)
        self.owner = rows.owner[rows.of_token]
        """[W] the row of the step that each token belongs to."""
        index = self.positions - begin[self.owner]
        ahead = index + torch.arange(1 + depths, device=begin.device)[:, None]
        ahead = ahead.minimum(batch.inputs.query_start.diff()[self.owner] - 1)
        self.known = batch.token_ids_at(self.owner.expand_as(ahead), ahead)
        """[1 + K, W] t_j, t_{j+1}, .., t_{j+K} for each position j, as far as the step feeds them."""
        self.hidden = batch.hidden_at(self.owner, ahead[0], hidden)[:, None]
        """[W, 1, h], the base's hidden states."""

        self.newest = begin + batch.last_index(verdict.accepted)
        self.flat_newest = self.newest - offsets[: len(begin)]
        known = batch.lookahead.clamp_min(0)
        self.future = torch.cat([known, known[:, :1]], dim=1)
        """[R, 1 + K] tokens after p: the chosen token, then each draft once it is made, or a prompt's known tokens."""
        count = batch.plan.num_sampling_rows
        self.future[:count, 0] = embeddable(verdict.token_ids.gather(1, verdict.accepted[:, None])[:count, 0])

    def token_ids(self, depth: int) -> Tensor:
        """[W] t_{j+depth} for each position j, known or drafted."""
        beyond = self.positions + depth - self.newest[self.owner] - 1
        return torch.where(beyond < 0, self.known[depth], self.future[self.owner, beyond.clamp(0, self.depths)])


class _Rows(NamedTuple):
    """Rows of a window: first one decode row for each row of the step, then chunks."""

    inputs: StepInput
    """Step input of these rows; its positions and KV slots are still those of the step."""
    owner: Tensor
    """The row of the step that each row belongs to."""
    of_token: Tensor
    """[W] the row of each token."""


def _decode_rows(batch: Batch, before: int) -> _Rows:
    """Decode rows, each extended by up to `before` positions before it."""
    inputs, device = batch.inputs, batch.token_ids.device
    count, width = len(inputs.state_slots), before + inputs.decode_width
    longer = replace(
        inputs,
        query_start=torch.arange(0, count * width + 1, width, device=device),
        context_lens=(inputs.context_lens - before).clamp_min(0),
        decode_width=width,
    )
    owner = torch.arange(count, device=device)
    return _Rows(longer, owner, torch.arange(count * width, device=device) // width)


def _chunks(batch: Batch, before: int) -> _Rows:
    """Chunks, each extended by up to `before` positions before it; their newest `before` positions are decode rows."""
    inputs, rows, device = batch.inputs, batch.plan.rows, batch.token_ids.device

    def ints(values: Sequence | np.ndarray) -> Tensor:
        return to_device(values, torch.int64, device)

    starts = [max(0, row.start - before) for row in rows]
    ends = [max(0, row.start + row.length - before) for row in rows]
    chunks = [index for index, end in enumerate(ends) if end]
    if len(chunks) < len(rows):  # no chunk writes the states from which these decode rows continue
        inputs.states.clear_heads(inputs.state_slots[ints([index for index, end in enumerate(ends) if not end])])
    lens = tuple(ends[index] - starts[index] for index in chunks)
    counts = [before] * len(rows) + [*lens]
    owner = ints([*range(len(rows)), *chunks])
    split = replace(
        inputs,
        query_start=ints([*accumulate(counts, initial=0)]),
        context_lens=ints([*ends, *(starts[index] for index in chunks)]),
        block_tables=inputs.block_tables[owner],
        state_slots=inputs.state_slots[owner],
        committed=inputs.committed.at(owner),
        num_decode_rows=len(rows),
        decode_width=before,
        prefill_lens=lens,
    )
    return _Rows(split, owner, ints(np.repeat(np.arange(len(counts)), counts)))
