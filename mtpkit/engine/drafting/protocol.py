"""What the engine asks of a drafter, and the drafter of plain decoding."""

from typing import Protocol

from torch import Tensor

from mtpkit.engine.step import Batch, Drafts, Verdict


class Drafter(Protocol):
    """Anything that can propose drafts. It looks at nothing of the host's: a step may run before the results of the
    last one are known there, and be captured in a CUDA graph."""

    earlier: tuple[int, int]
    """E and h: how many committed positions before a step it reads, and the size of their hidden states. The recurrent
    states of the heads stay E positions behind."""

    def draft(self, hidden: Tensor, batch: Batch, verdict: Verdict) -> Drafts:
        """[S, K] drafts that continue the rows that sample, given the base's hidden states [T, 1, h]."""
        ...


class NoDrafter:
    """Proposes nothing: plain decoding."""

    earlier = (0, 0)

    def draft(self, hidden: Tensor, batch: Batch, verdict: Verdict) -> Drafts:
        """Zero drafts a row."""
        return Drafts(verdict.token_ids.new_zeros(batch.plan.num_sampling_rows, 0))
