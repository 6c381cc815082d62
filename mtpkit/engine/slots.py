"""What the device knows of each running request, so that a step needs nothing that the step before it decided."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpkit.engine.sampler import SamplingTensors, SamplingUse
from mtpkit.engine.step import Batch, Drafts, Verdict, embeddable
from mtpkit.model.state import Committed, Counter

_FILTERS = ("top_k", "top_p", "min_p")


@dataclass(frozen=True)
class Slots:
    """State of the requests by their slot; a step gathers its rows from it and puts them back. All [slots, ...]."""

    tokens: Tensor
    """[slots, 1 + K] int64: the newest token and the drafts after it, which the next step feeds."""
    num_computed: Tensor
    """[slots] int64, positions that are committed in the states."""
    committed: Committed
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    """[slots] float32."""
    top_k: Tensor
    seeds: Tensor
    """[slots] int64."""
    draft_probs: Tensor | None
    """[slots, K, V] float32 where drafts are drawn from a distribution."""

    @classmethod
    def allocate(
        cls, count: int, depths: int, counters: Sequence[Counter], device: torch.device, vocab_size: int | None
    ) -> "Slots":
        """Slots that hold nothing yet, with filters that null rows can be sampled by.

        Args:
            counters: what the states of the layers count for each request.
            vocab_size: None where drafts are not drawn from a distribution.
        """

        def ints(*shape: int, fill: int = 0) -> Tensor:
            return torch.full((count, *shape), fill, dtype=torch.int64, device=device)

        def floats(*shape: int, fill: float = 0.0) -> Tensor:
            return torch.full((count, *shape), fill, dtype=torch.float32, device=device)

        return cls(
            tokens=ints(1 + depths),
            num_computed=ints(),
            committed=Committed.none(counters, count, device),
            temperature=floats(),
            top_p=floats(fill=1.0),
            min_p=floats(),
            top_k=ints(fill=1),
            seeds=ints(),
            draft_probs=floats(depths, vocab_size) if vocab_size and depths else None,
        )

    def sampling(self, slots: Tensor, use: SamplingUse) -> SamplingTensors:
        """Parameters of the rows at `slots` [R]."""
        return SamplingTensors(
            all_greedy=use.all_greedy,
            temperature=self.temperature[slots],
            seeds=self.seeds[slots],
            penalties=None,
            **{name: getattr(self, name)[slots] if getattr(use, name) else None for name in _FILTERS},
        )

    def admit(self, slots: Tensor, sampling: SamplingTensors, vocab_size: int) -> None:
        """Keep the parameters of new requests at `slots` [S]."""
        self.temperature[slots] = sampling.temperature
        self.seeds[slots] = sampling.seeds
        for name, off in zip(_FILTERS, (vocab_size, 1.0, 0.0), strict=True):
            values = getattr(sampling, name)
            getattr(self, name)[slots] = off if values is None else values

    def store(self, batch: Batch, verdict: Verdict, drafts: Drafts) -> None:
        """Take up what a batch gave. Of chunks, those that do not end a prompt leave no tokens."""
        inputs, plan = batch.inputs, batch.plan
        slots, count = inputs.state_slots, plan.num_sampling_rows
        new = verdict.accepted + 1 if plan.num_decode_rows else inputs.query_start.diff()
        self.num_computed[slots] = inputs.context_lens + new
        self.committed.put(slots, inputs.committed_after(verdict.accepted, new))
        sampling_slots = slots[:count]
        newest = verdict.token_ids.gather(1, verdict.accepted[:, None])[:count]
        self.tokens[sampling_slots, : 1 + drafts.token_ids.shape[1]] = embeddable(
            torch.cat([newest, drafts.token_ids], 1)
        )
        if self.draft_probs is not None and drafts.probs is not None:
            self.draft_probs[sampling_slots] = drafts.probs
