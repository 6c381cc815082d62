"""What the device knows of each running request, so that a step needs nothing that the step before it decided.

This is the one writer of it: requests are admitted, steps taken up and slots put back to their start here alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpkit.engine.options import EngineConfig
from mtpkit.engine.processors import PROCESSORS, Columns, Use
from mtpkit.engine.request import Request
from mtpkit.engine.sampler import Sampling
from mtpkit.engine.step import Batch, Drafts, Earlier, Verdict, embeddable
from mtpkit.model.state import Committed, Counter
from mtpkit.platform import to_device


@dataclass(frozen=True)
class DeviceState:
    """State of the requests by their slot, from which a step gathers its rows. All tensors are [slots, ...] and stay at
    their address, as CUDA graphs need.

    A slot keeps nothing of the request that had it before: the last chunk of a prompt is preceded by `admit`, and its
    step writes the rest. A preempted request is restored the same way, from the tokens that the host knows.
    """

    tokens: Tensor
    """[slots, 1 + K] int64: the newest token and the drafts after it, which the next step feeds."""
    num_computed: Tensor
    """[slots] int64, positions that are committed in the states of the layers."""
    committed: Committed
    """What the states of the layers hold of it."""
    seeds: Tensor
    """[slots] int64."""
    columns: Columns
    """What each of `PROCESSORS` keeps."""
    draft_probs: Tensor | None
    """[slots, K, V] float32 where drafts are drawn from a distribution."""
    earlier: Earlier | None
    """[slots, E, ...], the last E committed positions where the drafter reads them."""
    vocab_size: int

    @classmethod
    def allocate(
        cls,
        count: int,
        config: EngineConfig,
        vocab_size: int,
        device: torch.device,
        counters: Sequence[Counter] = (),
        earlier: tuple[int, int] = (0, 0),
        dtype: torch.dtype = torch.float32,
    ) -> "DeviceState":
        """Slots that hold nothing yet.

        Args:
            counters: what the states of the layers count for each request.
            earlier: E and the hidden size, see `Drafter.earlier`.
            dtype: of hidden states.
        """
        depths, (positions, hidden_size) = config.num_speculative_tokens, earlier

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(count, *shape, dtype=dtype, device=device)

        forms = {name: form for one in PROCESSORS for name, form in one.columns(vocab_size).items()}
        return cls(
            tokens=zeros(1 + depths),
            num_computed=zeros(),
            committed=Committed.none(counters, count, device),
            seeds=zeros(),
            columns={
                name: torch.full((count, *form.shape), form.fill, dtype=form.dtype, device=device)
                for name, form in forms.items()
            },
            draft_probs=zeros(depths, vocab_size, dtype=torch.float32) if config.draft_sampling and depths else None,
            earlier=Earlier(zeros(positions), zeros(positions, hidden_size, dtype=dtype)) if positions else None,
            vocab_size=vocab_size,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        own = [value for value in vars(self).values() if isinstance(value, Tensor)]
        earlier = () if self.earlier is None else vars(self.earlier).values()
        return [*own, *self.committed.counts.values(), *self.columns.values(), *earlier]

    def sampling(self, slots: Tensor, use: Use) -> Sampling:
        """How the rows at `slots` [S] sample."""
        return Sampling(use, slots, self.seeds, self.columns)

    def admit(self, requests: Sequence[Request]) -> None:
        """Write what `requests` ask for, before the last chunk of their prompts is computed."""
        if not requests:
            return
        ids = [[request.slot for request in requests], [request.seed for request in requests]]
        slots, seeds = to_device(ids, torch.int64, self.tokens.device)
        self.seeds[slots] = seeds
        numbers = [
            {name: value for one in PROCESSORS for name, value in one.numbers(request.params, self.vocab_size).items()}
            for request in requests
        ]
        # One copy takes them all to the device: float64 holds each as it is.
        values = to_device([list(row.values()) for row in numbers], torch.float64, slots.device)
        for name, column in zip(numbers[0], values.T, strict=True):
            self.columns[name][slots] = column.to(self.columns[name].dtype)
        for processor in PROCESSORS:
            processor.admit(self.columns, slots, requests)

    def step(self, batch: Batch, verdict: Verdict, drafts: Drafts, hidden: Tensor) -> None:
        """Take up what a batch gave. Of chunks, those that do not end a prompt leave no tokens.

        Args:
            hidden: [T, 1, h], the base's.
        """
        inputs, last = batch.inputs, batch.last_index(verdict.accepted)
        slots = inputs.state_slots
        self.num_computed[slots] = inputs.context_lens + last + 1
        self.committed.put(slots, inputs.committed_after(last + 1))
        if self.earlier is not None:
            positions = self.earlier.token_ids.shape[1]
            rows = torch.arange(len(slots), device=slots.device)[:, None].expand(-1, positions)
            places = last[:, None] + torch.arange(1 - positions, 1, device=slots.device)
            self.earlier.token_ids[slots] = batch.token_ids_at(rows, places)
            self.earlier.hidden[slots] = batch.hidden_at(rows, places, hidden)
        self._take_tokens(batch, verdict, drafts)

    def _take_tokens(self, batch: Batch, verdict: Verdict, drafts: Drafts) -> None:
        """Take up what the rows that sample chose and drafted."""
        count = batch.plan.num_sampling_rows
        slots, accepted = batch.inputs.state_slots[:count], verdict.accepted[:count]
        token_ids = verdict.token_ids[:count]
        newest = token_ids.gather(1, accepted[:, None])
        self.tokens[slots, : 1 + drafts.token_ids.shape[1]] = embeddable(torch.cat([newest, drafts.token_ids], 1))
        if self.draft_probs is not None and drafts.probs is not None:
            self.draft_probs[slots] = drafts.probs
        for processor in PROCESSORS:
            if processor.name in batch.sampling.use:
                processor.count(self.columns, slots, accepted, token_ids)

    def restart(self, first: int = 0) -> None:
        """Put the slots from `first` on back to position 0: null rows, and rows of steps that are only timed."""
        self.num_computed[first:].zero_()
