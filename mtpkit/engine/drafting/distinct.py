"""Drafts from distinct heads: a layer and a cache per depth.

Shape legend: T tokens of the step, R rows, S rows that sample, K drafts, V vocabulary, h hidden
size. p is a row's newest accepted position: h_p is known and t_{p+1} was just chosen.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.engine.drafting.protocol import Choice, MtpDrafter
from mtpkit.engine.steps.batch import token_rows
from mtpkit.engine.steps.plan import Batch, Drafts, HeadSpan, Verdict, embeddable
from mtpkit.kernels.step_rows import kv_slots
from mtpkit.model import mtp_forward
from mtpkit.model.inputs import StepInput


class DistinctDrafter(MtpDrafter):
    """One physical layer and one cache per depth, for two drafts or more; one draft needs no
    window.

    Entry j of depth k is computed from (g^{k-1}_j, t_{j+k}), where g^k is the output of depth k,
    and g^0 is h. When a step begins at position c, entries c-K+1 .. c-1 of the deeper caches were
    computed from drafts. Every depth therefore runs over a window: the positions of the step and
    the K - 1 before them, whose base hidden states are stored per slot. Where a token is not known
    yet, the new draft takes its place. The heads' recurrent states end before the window, K - 1
    positions behind the committed ones; see `StateSizes.behind`.

    Example, K = 3, one row: committed 10, computed positions 10..13, one draft accepted. The window
    is 8..13, p = 11, t_12 was just chosen. Depth 2 reads t_10 .. t_12 at 8..10 and draft 1 at 11;
    depth 3 reads t_11, t_12, draft 1, draft 2 at 8..11. Positions 12 and 13 hold garbage that the
    next window, from 10 on, replaces.

    In a step with fewer than K drafts all depths run, which keeps their caches complete for later
    steps.
    """

    @property
    def span(self) -> HeadSpan:
        """See `Drafter.span`."""
        depths = self.num_speculative_tokens
        return HeadSpan(depths - 1, depths, self.model.mtpkit_config.hidden_size)

    def draft(self, hidden: Tensor, batch: Batch, verdict: Verdict) -> Drafts:
        batch = self.windowed(batch)
        window = Window(batch, verdict, hidden, self.num_speculative_tokens, self.block_size)
        count = batch.shape.sampling_rows
        state = window.hidden
        newest = window.newest[:count]
        flat = window.flat_newest[:count]
        chosen: list[Choice] = []
        for depth in range(1, self.num_speculative_tokens + 1):
            drafting = flat if depth <= batch.shape.num_speculative_tokens else flat[:0]
            tokens = window.token_ids(depth)[None]
            # The last depth computes only what drafts are chosen from; all others are read whole by
            # the next depth.
            last = depth == self.num_speculative_tokens
            keep = drafting if last else None
            state = mtp_forward(self.model, depth, state, tokens, window.inputs, keep=keep)
            if len(drafting):
                kept = state[:, 0] if last else state[flat, 0]
                chosen.append(self.choose(kept, depth, batch, newest))
                window.future[:count, depth] = embeddable(chosen[-1].token_ids)
        return self.drafts(chosen, batch)


class Window:
    """Flat layout of a step's positions and up to K - 1 positions before each row, W tokens in all.

    Every row of the step becomes a decode row of K - 1 + `decode_width` tokens here, so that shapes
    do not depend on values that only the device knows. A decode row of the step now begins K - 1
    positions earlier. A chunk of the step becomes a decode row that begins at its K - 1 newest
    positions, and a chunk from K - 1 positions before it up to there, from whose states the decode
    row continues. A row that reaches beyond the step, as all do whose request has fewer than K - 1
    positions before it, stays within `EngineConfig.reach`, which the scheduler reserves; the next
    window replaces those entries.

    Example, K = 3: a chunk of the positions 4 .. 9 becomes the decode row 8 .. 13 and the chunk 2
    .. 7.
    """

    def __init__(
        self, batch: Batch, verdict: Verdict, hidden: Tensor, depths: int, block_size: int
    ) -> None:
        self.depths = depths
        begin = batch.inputs.context_lens
        rows = _Rows.of(batch, depths - 1)
        self.owner = rows.owner
        self.positions = rows.positions
        slots = kv_slots(rows.inputs.block_tables, rows.of_token, self.positions, block_size)
        index = self.positions - begin[self.owner]
        if rows.padding is not None:
            # Padding has any owner: it must neither store anything nor read beyond that row.
            slots = torch.where(rows.padding, -1, slots)
            index = torch.where(rows.padding, 0, index)
        self.inputs = replace(rows.inputs, positions=self.positions, kv_slots=slots)

        # Beyond the row's end its last token is read; `token_ids` takes `future` there instead.
        fed_after = index + torch.arange(1 + depths, device=begin.device)[:, None]
        fed_after = fed_after.minimum(batch.inputs.query_start.diff()[self.owner] - 1)
        self.known = batch.token_ids_at(self.owner.expand_as(fed_after), fed_after)
        """[1 + K, W] t_j, t_{j+1}, .., t_{j+K} for each position j, as far as the step feeds
        them."""
        self.hidden = batch.hidden_at(self.owner, fed_after[0], hidden)[:, None]
        """[W, 1, h], the base's hidden states."""

        self.newest = batch.newest_positions(verdict.accepted)
        in_row = self.newest - rows.inputs.context_lens[: len(begin)]
        self.flat_newest = (rows.inputs.query_start[: len(begin)] + in_row).clamp_min(0)
        known = batch.lookahead.clamp_min(0)
        self.future = torch.cat([known, known[:, :1]], dim=1)
        """[R, 1 + K] tokens after p: the chosen token, then each draft once it is made, or a
        prompt's known tokens."""
        count = batch.shape.sampling_rows
        self.future[:count, 0] = embeddable(
            verdict.token_ids.gather(1, verdict.accepted[:, None])[:count, 0]
        )

    def token_ids(self, depth: int) -> Tensor:
        """[W] t_{j+depth} for each position j, known or drafted."""
        beyond = self.positions + depth - self.newest[self.owner] - 1
        return torch.where(
            beyond < 0, self.known[depth], self.future[self.owner, beyond.clamp(0, self.depths)]
        )


class _Rows(NamedTuple):
    """Rows of a window: first one decode row for each row of the step, then one chunk for each of
    its chunks, then a null row with the tokens that no chunk needs."""

    inputs: StepInput
    """Step input of these rows; its positions and KV slots are still those of the step."""
    of_token: Tensor
    """[W] the row of each token."""
    owner: Tensor
    """[W] the row of the step that each token belongs to."""
    positions: Tensor
    """[W] int64."""
    padding: Tensor | None
    """[W] bool, the tokens of the null row, which have position 0 and any owner; None: there are no
    chunks."""

    @classmethod
    def of(cls, batch: Batch, before: int) -> "_Rows":
        """Extend each row by up to `before` positions before it."""
        inputs = batch.inputs
        decoding = batch.inputs.num_decode_rows
        count = len(inputs.state_slots)
        width = before + inputs.decode_width
        indices = torch.arange(count * width, device=batch.token_ids.device)
        # A null row among the chunks has all padding tokens of the step, and none here.
        lens = inputs.query_start[decoding:].diff() * (inputs.state_slots[decoding:] >= 0)
        contexts = inputs.context_lens.clamp_min(0)
        starts = (contexts - before).clamp_min(0)
        ends = (contexts[decoding:] + lens - before).clamp_min(0)
        begins = torch.cat([starts[:decoding], ends])
        rows = indices // width
        longer = replace(
            inputs,
            query_start=torch.arange(0, count * width + 1, width, device=indices.device),
            context_lens=begins,
            num_decode_rows=count,
            decode_width=width,
            short=(0, 0),
        )
        decoded = cls(longer, rows, rows, begins[rows] + indices % width, None)
        if not inputs.num_chunk_rows:
            return decoded
        return decoded._with_chunks(batch, starts[decoding:], ends)

    def _with_chunks(self, batch: Batch, starts: Tensor, ends: Tensor) -> "_Rows":
        """Append chunks from `starts` to `ends` [C], and a null row, to these decode rows."""
        inputs = batch.inputs
        first = batch.inputs.num_decode_rows
        chunks = len(starts)
        # As many tokens as the step's chunks have: only the device knows how many are needed, which
        # are never more.
        tokens = len(batch.token_ids) - inputs.num_decode_tokens
        null = starts.new_full((1,), -1)
        lasts = torch.cat([(ends - starts).cumsum(0), starts.new_full((1,), tokens)])
        rows, index = token_rows(lasts, tokens)
        padding = rows == chunks
        owner = torch.where(padding, first, first + rows)
        positions = torch.where(padding, 0, F.pad(starts, (0, 1))[rows] + index)
        none = inputs.state_slots[first:] < 0
        keys = inputs.noise_keys
        if keys is not None:
            keys = torch.cat([keys, keys[first:], keys.new_zeros(1)])
        longer = replace(
            self.inputs,
            query_start=torch.cat([self.inputs.query_start, self.inputs.query_start[-1] + lasts]),
            context_lens=torch.cat(
                [self.inputs.context_lens, torch.where(none, null, starts), null]
            ),
            block_tables=torch.cat(
                [inputs.block_tables, inputs.block_tables[first:], inputs.block_tables[:1]]
            ),
            state_slots=torch.cat([inputs.state_slots, inputs.state_slots[first:], null]),
            committed=self.inputs.committed.followed_by(chunks + 1),
            noise_keys=keys,
        )
        return _Rows(
            longer,
            torch.cat([self.of_token, self.inputs.num_decode_rows + rows]),
            torch.cat([self.owner, owner]),
            torch.cat([self.positions, positions]),
            torch.cat([torch.zeros_like(self.of_token, dtype=torch.bool), padding]),
        )
