"""Drafts from a repeated head: one layer at every depth, with one cache.

Shape legend: T tokens of the step, R rows, S rows that sample, K drafts, V vocabulary, h hidden
size. p is a row's newest accepted position: h_p is known and t_{p+1} was just chosen.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.engine.drafting.protocol import Choice, MtpDrafter
from mtpkit.engine.steps.plan import Batch, Drafts, Verdict, embeddable
from mtpkit.kernels.step_rows import kv_slots
from mtpkit.model import mtp_forward
from mtpkit.model.inputs import StepInput


class RepeatedDrafter(MtpDrafter):
    """One physical layer at every depth, with one cache.

    Depth 1 runs over the whole step: entry j is computed from (h_j, t_{j+1}). Entries of rejected
    drafts are replaced before any token attends to them. Depth k >= 2 runs on one token per row,
    (g^{k-1}_p, draft_{k-1}), at position p + k - 1; g^{k-1}_p is the output of depth k - 1. There,
    recurrent layers continue from a copy of their committed state, which is discarded after the
    step. In a step with K = 0 only depth 1 runs, which keeps the cache complete for later steps.
    """

    def draft(self, hidden: Tensor, batch: Batch, verdict: Verdict) -> Drafts:
        batch = self.windowed(batch)
        flat, newest = batch.newest(verdict.accepted)
        depths = batch.shape.num_speculative_tokens

        # With K = 0 no hidden state is needed, but the cache gets its entries.
        drafting = flat if depths else flat[:0]
        shifted = shifted_token_ids(batch, verdict)[None]
        state = mtp_forward(self.model, 1, hidden, shifted, batch.inputs, keep=drafting)

        chosen: list[Choice] = []
        if len(drafting):
            chosen.append(self.choose(state[:, 0], 1, batch, newest))

            inputs = batch.inputs
            if depths > 1:
                # Only deeper depths change the states that depth 1 left: only they need a copy.
                inputs = inputs.continued(verdict.accepted[: batch.shape.sampling_rows])

            for depth in range(2, depths + 1):
                inputs = self._one_token(inputs, newest + (depth - 1))
                draft = embeddable(chosen[-1].token_ids)[None]
                state = mtp_forward(self.model, depth, state, draft, inputs)
                chosen.append(self.choose(state[:, 0], depth, batch, newest))
                inputs = inputs.advanced()

        return self.drafts(chosen, batch)

    def _one_token(self, inputs: StepInput, positions: Tensor) -> StepInput:
        """The same rows with one token each, at `positions` [S]."""
        slots = kv_slots(inputs.block_tables, inputs.query_start[:-1], positions, self.block_size)
        return replace(inputs, positions=positions, context_lens=positions, kv_slots=slots)


def shifted_token_ids(batch: Batch, verdict: Verdict) -> Tensor:
    """[T] the token after each token of the step, t_{j+1} for position j, made `embeddable`.

    Example, K = 2: a decode row [A, b, c] that accepted b and chose X gives [b, X, 0]; a chunk [P,
    Q] before the known token R gives [Q, R].
    """
    inputs = batch.inputs
    known = embeddable(verdict.token_ids)
    count = inputs.num_decode_tokens

    parts = []
    for group in inputs.decode_groups:
        decoded = known[group.rows, : group.width]
        # A tree has more tokens than the path that was accepted.
        if decoded.shape[1] < group.width:
            decoded = F.pad(decoded, (0, group.width - decoded.shape[1]))
        parts.append(decoded.flatten())
    if not inputs.num_chunk_rows:
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    # The token after the last one of a chunk is not in the step: in the flat order, another row's
    # first token follows there.
    rows = batch.rows[count:]
    next_index = torch.arange(count + 1, len(batch.rows) + 1, device=rows.device)
    is_last = next_index == inputs.query_start[rows + 1]
    following = batch.token_ids[count:].roll(-1)
    chunks = torch.where(is_last, known[rows, 0], following)
    return torch.cat([*parts, chunks])
