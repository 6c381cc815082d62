"""Drafts from distinct heads: a layer and a cache per depth.

Shape legend: T tokens of the step, R rows, S rows that sample, K drafts, V vocabulary, h hidden size. p is a row's
newest accepted position: h_p is known and t_{p+1} was just chosen.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mtpkit.engine.batch import kv_slots
from mtpkit.engine.drafting.heads import MtpDrafter
from mtpkit.engine.step import Batch, Drafts, Verdict, embeddable
from mtpkit.model import mtp_forward


class DistinctDrafter(MtpDrafter):
    """One physical layer and one cache a depth.

    Depth k's entry j is made from (g^{k-1}_j, t_{j+k}), so when a step begins at position c the entries c-K+1 .. c-1
    of the deeper caches were made from drafts. Every depth therefore runs over a window of the step's positions and the
    K - 1 before them, whose base hidden states are kept for each slot; tokens not known yet are drafts again.

    Example, K = 3, one row: committed 10, computed positions 10..13, one draft accepted. The window is 8..13, p = 11,
    t_12 was just chosen. Depth 2 reads t_10 .. t_12 at 8..10 and draft 1 at 11; depth 3 reads t_11, t_12, draft 1,
    draft 2 at 8..11. Positions 12 and 13 hold garbage that the next window, from 10 on, replaces.

    With fewer than K drafts in a step all depths run, which keeps their caches true for later steps.
    """

    def __init__(
        self, model: Any, num_speculative_tokens: int, block_size: int, sample: bool, draft_token_ids: Tensor | None
    ) -> None:
        super().__init__(model, num_speculative_tokens, block_size, sample, draft_token_ids)
        self.earlier = (num_speculative_tokens - 1, model.mtpkit_config.hidden_size)

    def draft(self, hidden: Tensor, batch: Batch, verdict: Verdict) -> Drafts:
        """See `Drafter.draft`."""
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
    """The flat layout of a step's positions and up to K - 1 before them, W tokens in all.

    Rows of chunks are as long as that makes them. Decode rows all have K - 1 + `decode_width` tokens, so that the shape
    of a step depends on nothing that only the device knows: where fewer positions are before the step, the row goes on
    behind it, inside of the room that the scheduler reserves, with entries that the next window replaces.
    """

    def __init__(self, batch: Batch, verdict: Verdict, hidden: Tensor, depths: int, block_size: int) -> None:
        inputs, rows, device = batch.inputs, len(batch.inputs.state_slots), batch.token_ids.device
        self.depths, before = depths, depths - 1
        first = (inputs.context_lens - before).clamp_min(0)
        lens: tuple[int, ...] = ()
        if inputs.num_decode_rows:
            width = before + inputs.decode_width
            self.start = torch.arange(0, rows * width + 1, width, device=device)
            self.rows = torch.arange(rows * width, device=device) // width
        else:
            lens = tuple(row.length + min(row.start, before) for row in batch.plan.rows)
            lengths = inputs.query_start.diff() + inputs.context_lens - first
            self.start = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            self.rows = torch.arange(rows, device=device).repeat_interleave(lengths, output_size=sum(lens))
        self.positions = torch.arange(len(self.rows), device=device) + (first - self.start[:-1])[self.rows]
        index = self.positions - inputs.context_lens[self.rows]
        if inputs.num_decode_rows:
            index = index.clamp(max=inputs.decode_width - 1)
        self.tokens, base = batch.at(self.rows, index, hidden)
        self.hidden = base[:, None]
        """[W, 1, h], the base's hidden states."""

        last = batch.last_index(verdict.accepted)
        self.newest = inputs.context_lens + last
        self.flat_newest = self.start[:-1] + self.newest - first
        known = batch.lookahead.clamp_min(0)
        self.future = torch.cat([known, known[:, :1]], dim=1)
        """[R, 1 + K] tokens after p: the chosen one, then the drafts as they come, or a prompt's known tokens."""
        count = batch.plan.num_sampling_rows
        self.future[:count, 0] = embeddable(verdict.token_ids.gather(1, verdict.accepted[:, None])[:count, 0])
        self.inputs = replace(
            inputs,
            positions=self.positions,
            query_start=self.start,
            context_lens=first,
            kv_slots=kv_slots(inputs.block_tables, self.rows, self.positions, block_size),
            decode_width=before + inputs.decode_width,
            prefill_lens=lens,
        )

    def token_ids(self, depth: int) -> Tensor:
        """[W] t_{j+depth} for each position j, as far as it is known or drafted."""
        beyond = self.positions + depth - self.newest[self.rows] - 1
        return torch.where(beyond < 0, self.tokens.roll(-depth), self.future[self.rows, beyond.clamp(0, self.depths)])
