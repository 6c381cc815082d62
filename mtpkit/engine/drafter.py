"""Proposes the tokens that the next step verifies.

Shape legend: T tokens of the step, R rows, S rows that sample, K drafts, V vocabulary, h hidden size. p is a row's
newest accepted position: h_p is known and t_{p+1} was just chosen.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from mtpkit.config import ModelConfig
from mtpkit.engine import sampler
from mtpkit.engine.batch import kv_slots
from mtpkit.engine.step import Batch, Drafts, Verdict, embeddable
from mtpkit.errors import UserError
from mtpkit.kernels import sampling as ops
from mtpkit.kernels.linear import linear
from mtpkit.kernels.ssm_update import ring_base
from mtpkit.model import compute_logits, draft_output_weight, greedy_tokens, mtp_forward
from mtpkit.model.inputs import AttentionCache, LayerCache, ReplayCache, StepInput

_logger = logging.getLogger(__name__)


class Drafter(Protocol):
    """Anything that can propose drafts."""

    device_only: bool
    """Whether it looks at nothing of the host's, so that a step may run before the results of the last are known."""

    def draft(self, hidden: Tensor, batch: Batch, verdict: Verdict) -> Drafts:
        """[S, K] drafts that continue the rows that sample, given the base's hidden states [T, 1, h]."""
        ...


class NoDrafter:
    """Proposes nothing: plain decoding."""

    device_only = True

    def draft(self, hidden: Tensor, batch: Batch, verdict: Verdict) -> Drafts:
        """Zero drafts a row."""
        return Drafts(verdict.token_ids.new_zeros(batch.plan.num_sampling_rows, 0))


def make_drafter(
    model: Any,
    num_speculative_tokens: int,
    block_size: int,
    num_slots: int,
    sample: bool,
    draft_token_ids: Tensor | None = None,
) -> Drafter:
    """The drafter that fits the heads of `model`.

    Args:
        num_speculative_tokens: the largest K.
        sample: draw drafts from the heads' distribution.
        draft_token_ids: [D] int64, the tokens that drafts are chosen among; None: all.

    Raises:
        UserError: the model has no heads, too few, or of a kind that cannot be unrolled.
    """
    config, depths = model.mtpkit_config, num_speculative_tokens
    if depths == 0:
        return NoDrafter()
    check_depths(config, depths)
    if not config.mtp_use_repeated_layer:
        return DistinctDrafter(model, depths, block_size, sample, draft_token_ids, num_slots)
    if config.mtp_depths_known and depths > config.mtp_num_depths:
        _logger.warning(
            "num_speculative_tokens is %d, but the head is of %d depths: later drafts were not trained",
            depths,
            config.mtp_num_depths,
        )
    return RepeatedDrafter(model, depths, block_size, sample, draft_token_ids)


def default_depths(config: ModelConfig) -> int:
    """K where a user names none: as many drafts as the heads of a model were trained for and can make."""
    return 1 if _draft_one(config) else config.default_num_speculative_tokens


def check_depths(config: ModelConfig, depths: int | Literal["auto"], name: str = "num_speculative_tokens") -> None:
    """Refuse to make more drafts than the heads of a model can.

    Args:
        name: of the setting, in the error.

    Raises:
        UserError: there are no heads, too few, or they are of a kind that cannot be unrolled.
    """
    if depths == 0:
        return
    given = f"{name} is {depths!r}, but"
    if not config.mtp_num_depths:
        raise UserError(f"{given} the model has no MTP heads: train some, or set it to 0")
    if config.mtp_use_repeated_layer:
        return
    if depths == "auto":
        raise UserError(f"{name} 'auto' needs a repeated MTP head: set a number for distinct ones")
    if _draft_one(config) and depths > 1:
        raise UserError(
            f"{given} distinct heads with Mamba layers (MTP pattern {config.mtp_pattern!r}) draft one token: "
            "set it to 1"
        )
    if depths > config.mtp_num_depths:
        raise UserError(
            f"{given} the model has {config.mtp_num_depths} distinct MTP heads: set it to {config.mtp_num_depths} "
            "or less"
        )


def _draft_one(config: ModelConfig) -> bool:
    """Whether heads draft one token alone: the Mamba states of distinct ones are not taken back."""
    return bool(config.mtp_num_depths) and not config.mtp_use_repeated_layer and "M" in config.mtp_pattern


class _MtpDrafter:
    """What both kinds of heads share: choosing a token from a depth's hidden state."""

    def __init__(
        self, model: Any, num_speculative_tokens: int, block_size: int, sample: bool, draft_token_ids: Tensor | None
    ) -> None:
        self.model = model
        self.num_speculative_tokens = num_speculative_tokens
        self.block_size = block_size
        self.sample = sample
        self.draft_token_ids = draft_token_ids
        self._draft_weight = None if draft_token_ids is None else draft_output_weight(model, draft_token_ids)

    def _choose(self, state: Tensor, depth: int, batch: Batch, newest: Tensor) -> tuple[Tensor, Tensor | None]:
        """Draft `depth` of each row from `state` [S, h]: [S] tokens or `NO_TOKEN` and, when drawn, [S, V] their
        distributions."""
        if not self.sample:
            return greedy_tokens(self.model, state, self._draft_weight, self.draft_token_ids), None
        if self._draft_weight is None:
            logits = compute_logits(self.model, state)
        else:
            logits = state.new_full((len(state), self.model.mtpkit_config.vocab_size), -torch.inf)
            logits[:, self.draft_token_ids] = linear(state, self._draft_weight)
        rows = torch.arange(len(state), device=state.device)
        probs = sampler.probabilities(logits, batch.sampling, rows)
        numbers = sampler.uniforms(batch.sampling, rows, newest + 1 + depth, sampler.DRAFT_STREAM)
        return ops.sample(probs, numbers), probs

    def _drafts(self, chosen: list[tuple[Tensor, Tensor | None]], batch: Batch) -> Drafts:
        if not chosen:
            return Drafts(batch.token_ids.new_zeros(batch.plan.num_sampling_rows, batch.plan.num_speculative_tokens))
        probs = [p for _, p in chosen if p is not None]
        return Drafts(torch.stack([tokens for tokens, _ in chosen], 1), torch.stack(probs, 1) if probs else None)


class RepeatedDrafter(_MtpDrafter):
    """One physical layer at every depth, with one cache.

    Depth 1 runs over the whole step: entry j is made from (h_j, t_{j+1}), those of rejected drafts are overwritten
    before anything can see them. Depth k >= 2 runs on one token a row, (g^{k-1}_p, draft_{k-1}) at position p + k - 1;
    Mamba layers continue from their committed state there, on a copy of it that the step then forgets. With K = 0 in a
    step only depth 1 runs, which keeps the cache true for later steps.
    """

    device_only = True

    def draft(self, hidden: Tensor, batch: Batch, verdict: Verdict) -> Drafts:
        """See `Drafter.draft`."""
        flat, newest = batch.newest(verdict.accepted)
        drafting = flat if batch.plan.num_speculative_tokens else flat[:0]
        shifted = shifted_token_ids(batch, verdict)[None]
        state = mtp_forward(self.model, 1, hidden, shifted, batch.inputs, keep=drafting)
        chosen: list[tuple[Tensor, Tensor | None]] = []
        if len(drafting):
            chosen.append(self._choose(state[:, 0], 1, batch, newest))
            depths = batch.plan.num_speculative_tokens
            inputs = self._continue_at(batch, verdict) if depths > 1 else batch.inputs
            for depth in range(2, depths + 1):
                inputs = self._one_token(inputs, newest + depth - 1)
                state = mtp_forward(self.model, depth, state, embeddable(chosen[-1][0])[None], inputs)
                chosen.append(self._choose(state[:, 0], depth, batch, newest))
                inputs = self._advance(inputs)
        return self._drafts(chosen, batch)

    def _continue_at(self, batch: Batch, verdict: Verdict) -> StepInput:
        """The rows that sample, as one-token rows whose recurrent state is a copy of what depth 1 left at p."""
        inputs, count = batch.inputs, batch.plan.num_sampling_rows
        slots, accepted = inputs.state_slots[:count], verdict.accepted[:count]
        copies: dict[str, LayerCache] = {
            name: type(cache)(*(tensor[slots] for tensor in vars(cache).values()))
            for name, cache in inputs.caches.items()
            if name.startswith("mtp.") and not isinstance(cache, AttentionCache)
        }
        in_ring = ring_base(inputs.ring_lens[:count], inputs.decode_width, _ring_length(copies)) + accepted + 1
        in_ring[inputs.num_decode_rows :] = 0  # a chunk leaves its state folded
        return replace(
            inputs,
            query_start=torch.arange(count + 1, device=slots.device),
            block_tables=inputs.block_tables[:count],
            state_slots=torch.arange(count, device=slots.device),
            committed=accepted,
            ring_lens=in_ring,
            num_decode_rows=count,
            decode_width=1,
            prefill_lens=(),
            caches={**inputs.caches, **copies},
        )

    def _one_token(self, inputs: StepInput, positions: Tensor) -> StepInput:
        """The same rows with their token at `positions` [S]."""
        slots = kv_slots(inputs.block_tables, inputs.query_start[:-1], positions, self.block_size)
        return replace(inputs, positions=positions, context_lens=positions, kv_slots=slots)

    def _advance(self, inputs: StepInput) -> StepInput:
        """The same rows after their token, which the copies of the recurrent state have taken up."""
        in_ring = ring_base(inputs.ring_lens, 1, _ring_length(inputs.caches)) + 1
        return replace(inputs, committed=torch.zeros_like(inputs.committed), ring_lens=in_ring)


def _ring_length(caches: Mapping[str, LayerCache]) -> int:
    """Entries of the replay rings; 1 where there are none."""
    return next((cache.x.shape[1] for cache in caches.values() if isinstance(cache, ReplayCache)), 1)


def shifted_token_ids(batch: Batch, verdict: Verdict) -> Tensor:
    """[T] the token after each of the step's, `embeddable`: t_{j+1} for position j.

    Example, K = 2: a decode row of input [A, b, c] that accepted b and chose X gives [b, X, 0]; a chunk [P, Q] before a
    known R gives [Q, R].
    """
    if batch.plan.num_decode_rows:
        return embeddable(verdict.token_ids).flatten()
    shifted = batch.token_ids.roll(-1)
    shifted[batch.inputs.query_start[1:] - 1] = embeddable(verdict.token_ids[:, 0])
    return shifted


class DistinctDrafter(_MtpDrafter):
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
                chosen.append(self._choose(state[flat, 0], depth, batch, newest))
                window.future[:count, depth] = embeddable(chosen[-1][0])
        return self._drafts(chosen[: batch.plan.num_speculative_tokens], batch)


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
