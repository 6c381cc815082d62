"""State of the running requests on the device, from which the next step reads what the previous step decided.

Only this module writes that state: it admits requests, stores the results of steps and resets slots.
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
    """State of the requests by slot, from which a step gathers its rows. All tensors are [slots, ...] and stay at their
    address, as CUDA graphs require.

    A slot keeps nothing of the request that had it before: `admit` writes it before the last chunk of a prompt, and the
    step of that chunk writes the rest. A preempted request is restored in the same way from the tokens on the host.
    """

    tokens: Tensor
    """[slots, 1 + K] int64, the inputs of the next step: the newest token and the drafts after it."""
    num_computed: Tensor
    """[slots] int64, number of positions that are committed in the states of the layers."""
    committed: Committed
    """Counters of the layers' states for the committed positions."""
    seeds: Tensor
    """[slots] int64."""
    columns: Columns
    """Columns of all `PROCESSORS`."""
    draft_probs: Tensor | None
    """[slots, K, V] float32, the distributions that drafts were drawn from; None: drafts are not drawn."""
    earlier: Earlier | None
    """[slots, E, ...], the last E committed positions; None: the drafter does not read them."""
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
        """Allocate empty slots.

        Args:
            counters: counters that the states of the layers have for each request.
            earlier: E and the hidden size, see `Drafter.earlier`.
            dtype: dtype of hidden states.
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
        """All tensors of the state."""
        own = [value for value in vars(self).values() if isinstance(value, Tensor)]
        earlier = () if self.earlier is None else vars(self.earlier).values()
        return [*own, *self.committed.counts.values(), *self.columns.values(), *earlier]

    def sampling(self, slots: Tensor, use: Use) -> Sampling:
        """Sampling parameters of the rows at `slots` [S]."""
        return Sampling(use, slots, self.seeds, self.columns)

    def admit(self, requests: Sequence[Request]) -> None:
        """Write the sampling parameters of `requests`, before the last chunk of their prompts is computed."""
        if not requests:
            return
        ids = [[request.slot for request in requests], [request.seed for request in requests]]
        slots, seeds = to_device(ids, torch.int64, self.tokens.device)
        self.seeds[slots] = seeds
        numbers = [
            {name: value for one in PROCESSORS for name, value in one.numbers(request.params, self.vocab_size).items()}
            for request in requests
        ]
        # One copy takes all numbers to the device; float64 represents each of them exactly.
        values = to_device([list(row.values()) for row in numbers], torch.float64, slots.device)
        for name, column in zip(numbers[0], values.T, strict=True):
            self.columns[name][slots] = column.to(self.columns[name].dtype)
        for processor in PROCESSORS:
            processor.admit(self.columns, slots, requests)

    def step(self, batch: Batch, verdict: Verdict, drafts: Drafts, hidden: Tensor) -> None:
        """Store the results of a batch. Chunks that do not end a prompt have no tokens to store.

        Args:
            hidden: [T, 1, h], the base's hidden states.
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
        """Store the chosen tokens and the drafts of the rows that sample."""
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
        """Reset the slots from `first` on to position 0, for null rows and for steps that are only timed."""
        self.num_computed[first:].zero_()
