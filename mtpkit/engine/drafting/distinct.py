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
from mtpkit.model.inputs import StepInput


class DistinctDrafter(MtpDrafter):
    """One physical layer and one cache a depth.

    Depth k's entry j is made from (g^{k-1}_j, t_{j+k}), so when a step begins at position c the entries c-K+1 .. c-1
    of the deeper caches were made from drafts. Every depth therefore runs over a window of the step's positions and the
    K - 1 before them, whose base hidden states are kept for each slot; tokens not known yet are drafts again.

    Example, K = 3, one row: committed 10, computed positions 10..13, one draft accepted. The window is 8..13, p = 11,
    t_12 was just chosen. Depth 2 reads t_10 .. t_12 at 8..10 and draft 1 at 11; depth 3 reads t_11, t_12, draft 1,
    draft 2 at 8..11. Positions 12 and 13 hold garbage that the next window, from 10 on, replaces.
    """

    device_only = False  # the tokens before a step's come from the requests

    def __init__(
        self,
        model: Any,
        num_speculative_tokens: int,
        block_size: int,
        sample: bool,
        draft_token_ids: Tensor | None,
        num_slots: int,
    ) -> None:
        super().__init__(model, num_speculative_tokens, block_size, sample, draft_token_ids)
        weight = next(model.parameters())
        size = (num_slots, num_speculative_tokens - 1, model.mtpkit_config.hidden_size)
        self._tails = torch.zeros(size, dtype=weight.dtype, device=weight.device)
        """[slots, K - 1, h] base hidden states of each slot's last committed positions, the newest last."""

    def draft(self, hidden: Tensor, batch: Batch, verdict: Verdict) -> Drafts:
        """See `Drafter.draft`."""
        window = _Window(batch, verdict, self.num_speculative_tokens, self.block_size)
        state = window.hidden(hidden, self._tails)
        self._tails[batch.inputs.state_slots] = window.tail(state)
        count = batch.plan.num_sampling_rows
        newest, flat = window.newest[:count], window.flat_newest[:count]
        chosen: list[tuple[Tensor, Tensor | None]] = []
        for depth in range(1, self.num_speculative_tokens + 1):
            state = mtp_forward(self.model, depth, state, window.token_ids(depth)[None], window.inputs)
            if count:
                chosen.append(self.choose(state[flat, 0], depth, batch, newest))
                window.future[:count, depth] = embeddable(chosen[-1][0])
        return self.drafts(chosen[: batch.plan.num_speculative_tokens], batch)


class _Window:
    """The flat layout of a step's positions and up to K - 1 before them, W tokens in all."""

    def __init__(self, batch: Batch, verdict: Verdict, depths: int, block_size: int) -> None:
        inputs, rows, device = batch.inputs, batch.plan.rows, batch.token_ids.device
        self.depths = depths
        before = inputs.context_lens.clamp(max=depths - 1)
        lengths = before + inputs.query_start.diff()
        self.start = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        host_before = [min(row.start, depths - 1) for row in rows]
        total = sum(row.length + b for row, b in zip(rows, host_before, strict=True))
        self.rows = torch.arange(len(rows), device=device).repeat_interleave(lengths, output_size=total)
        first = inputs.context_lens - before
        self.positions = torch.arange(total, device=device) - (self.start[:-1] - first)[self.rows]

        offset = verdict.accepted.clone()
        offset[inputs.num_decode_rows :] = inputs.query_start.diff()[inputs.num_decode_rows :] - 1
        self.newest = inputs.context_lens + offset
        self.flat_newest = self.start[:-1] + before + offset

        # Index of each window token in [kept tails; step]; the tails are right-aligned.
        place = self.positions - inputs.context_lens[self.rows]
        in_tail = self.rows * (depths - 1) + depths - 1 + place
        in_step = len(rows) * (depths - 1) + inputs.query_start[self.rows] + place
        self.source = torch.where(place < 0, in_tail, in_step)
        self.slots = inputs.state_slots

        tails = [row.request.token_ids[row.start - b : row.start] for row, b in zip(rows, host_before, strict=True)]
        self.tokens = torch.empty(total, dtype=torch.int64, device=device)
        self.tokens[place < 0] = torch.tensor([t for tail in tails for t in tail], dtype=torch.int64, device=device)
        self.tokens[place >= 0] = batch.token_ids
        known = batch.lookahead.clamp_min(0)
        self.future = torch.cat([known, known[:, :1]], dim=1)
        """[R, 1 + K] tokens after p: the chosen one, then the drafts as they come, or a prompt's known tokens."""
        count = batch.plan.num_sampling_rows
        self.future[:count, 0] = embeddable(verdict.token_ids.gather(1, verdict.accepted[:, None])[:count, 0])
        self.inputs = self._step_input(batch, before, host_before, block_size)

    def _step_input(self, batch: Batch, before: Tensor, host_before: list[int], block_size: int) -> StepInput:
        """Decode rows stay uniform unless one of them has fewer than K - 1 positions before it."""
        inputs, decode = batch.inputs, batch.inputs.num_decode_rows
        decode = decode if all(b == self.depths - 1 for b in host_before[:decode]) else 0
        lengths = [row.length + b for row, b in zip(batch.plan.rows, host_before, strict=True)]
        return replace(
            inputs,
            positions=self.positions,
            query_start=self.start,
            context_lens=inputs.context_lens - before,
            kv_slots=kv_slots(inputs.block_tables, self.rows, self.positions, block_size),
            num_decode_rows=decode,
            decode_width=self.depths - 1 + inputs.decode_width,
            prefill_lens=tuple(lengths[decode:]),
        )

    def hidden(self, hidden: Tensor, tails: Tensor) -> Tensor:
        """[W, 1, h] base hidden states, from the step's [T, 1, h] and the kept ones [slots, K - 1, h]."""
        kept = tails[self.slots].flatten(0, 1)
        return torch.cat([kept, hidden[:, 0]])[self.source][:, None]

    def tail(self, hidden: Tensor) -> Tensor:
        """[R, K - 1, h] what to keep of `hidden` [W, 1, h]; meaningless before position 0, where it is never read."""
        back = torch.arange(self.depths - 2, -1, -1, device=hidden.device)
        return hidden[(self.flat_newest[:, None] - back).clamp_min(0), 0]

    def token_ids(self, depth: int) -> Tensor:
        """[W] t_{j+depth} for each position j, as far as it is known or drafted."""
        beyond = self.positions + depth - self.newest[self.rows] - 1
        return torch.where(beyond < 0, self.tokens.roll(-depth), self.future[self.rows, beyond.clamp(0, self.depths)])
