"""Drafts from a repeated head: one layer at every depth, with one cache.

Shape legend: T tokens of the step, R rows, S rows that sample, K drafts, V vocabulary, h hidden size. p is a row's
newest accepted position: h_p is known and t_{p+1} was just chosen.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mtpkit.engine.batch import kv_slots
from mtpkit.engine.drafting.heads import MtpDrafter
from mtpkit.engine.step import Batch, Drafts, Verdict, embeddable
from mtpkit.kernels.ssm_update import ring_base
from mtpkit.model import mtp_forward
from mtpkit.model.inputs import AttentionCache, LayerCache, ReplayCache, StepInput


class RepeatedDrafter(MtpDrafter):
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
            chosen.append(self.choose(state[:, 0], 1, batch, newest))
            depths = batch.plan.num_speculative_tokens
            inputs = self._continue_at(batch, verdict) if depths > 1 else batch.inputs
            for depth in range(2, depths + 1):
                inputs = self._one_token(inputs, newest + depth - 1)
                state = mtp_forward(self.model, depth, state, embeddable(chosen[-1][0])[None], inputs)
                chosen.append(self.choose(state[:, 0], depth, batch, newest))
                inputs = self._advance(inputs)
        return self.drafts(chosen, batch)

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
