"""State of the running requests on the device, from which the next step reads what the previous
step decided.

Only this module writes that state: it admits requests, stores the results of steps and resets
slots. The one exception is `earlier`: the launch that restores the states of the layers from a
checkpoint restores it, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtpkit.config import LARGEST_COUNT
from mtpkit.engine.requests.config import EngineConfig
from mtpkit.engine.requests.params import MOST_END_TOKENS
from mtpkit.engine.requests.request import Request
from mtpkit.engine.requests.tree import DynamicTree
from mtpkit.engine.steps.constrained import Masks
from mtpkit.engine.steps.host_drafts import HostDrafts
from mtpkit.engine.steps.plan import NO_HEADS, Batch, Drafts, Earlier, HeadSpan, Verdict
from mtpkit.engine.steps.processors import GREEDY, PROCESSORS, Chosen, Columns, Use
from mtpkit.engine.steps.sampler import Sampling
from mtpkit.engine.steps.vocabulary import Vocabulary
from mtpkit.kernels.step_rows import store_rows
from mtpkit.model.state import Committed, Counter
from mtpkit.platform import to_device

_NO_END = -2
"""Padding of `Ends.token_ids`; it equals neither a token nor `NO_TOKEN`."""


@dataclass(frozen=True)
class Ends:
    """End conditions of requests. No step goes beyond the end of its request, and steps that are
    launched later leave the slot unchanged, so that a checkpoint can be made of the slot once the
    host has learned of the end."""

    token_ids: Tensor
    """[slots, MOST_END_TOKENS] int64, tokens that end the request; if there are more, the smallest
    ones."""
    limits: Tensor
    """[slots] int64, the number of committed positions at which `max_tokens` ends the request."""
    reached: Tensor
    """[slots] bool, whether the request has ended."""

    def admit(self, slots: Tensor, requests: Sequence[Request]) -> None:
        """Write the end conditions of `requests` to their slots."""
        rows = []
        for one in requests:
            ends = sorted(one.end_token_ids)[:MOST_END_TOKENS]
            limit = len(one.prompt_token_ids) + one.max_tokens - 1
            rows.append([limit, *ends, *[_NO_END] * (MOST_END_TOKENS - len(ends))])
        # Limits and tokens share one copy to the device.
        values = to_device(rows, torch.int64, slots.device)
        self.limits[slots] = values[:, 0]
        self.token_ids[slots] = values[:, 1:]
        self.reached.index_fill_(0, slots, False)

    def cut(self, batch: Batch, verdict: Verdict) -> Tensor:
        """[R] the number of accepted drafts that come before the end of each row's request; marks
        requests that end."""
        count = batch.shape.sampling_rows
        slots = batch.inputs.state_slots[:count]
        accepted = verdict.accepted[:count]
        chosen = verdict.token_ids[:count]
        index = torch.arange(chosen.shape[1], device=chosen.device)
        ended = (chosen[..., None] == self.token_ids[slots][:, None]).any(-1)
        # The token chosen at index i follows first + i committed positions.
        first = batch.newest_positions(torch.zeros_like(verdict.accepted))[:count] + 1
        ended |= first[:, None] + index >= self.limits[slots][:, None]
        at = torch.where(ended & (index <= accepted[:, None]), index, chosen.shape[1]).amin(1)
        self.reached[slots] = at <= accepted
        return torch.cat([accepted.minimum(at), verdict.accepted[count:]])


@dataclass(frozen=True)
class DeviceState:
    """State of the requests by slot, from which a step gathers its rows. All tensors are [slots,
    ...] and stay at their address, as CUDA graphs require.

    A slot keeps nothing of its previous request: `admit` writes part of it before the last chunk of
    a prompt, and the step of that chunk writes the rest. A preempted request is restored in the
    same way from the tokens on the host.
    """

    tokens: Tensor
    """[slots, 1 + K] int64, the inputs of the next step: the newest token and the drafts after it;
    [slots, T] for trees."""
    num_computed: Tensor
    """[slots] int64, number of positions that are committed in the states of the layers."""
    committed: Committed
    """Counters of the layers' states for the committed positions."""
    seeds: Tensor
    """[slots] int64."""
    columns: Columns
    """Columns of all `PROCESSORS`."""
    draft_probs: Tensor | None
    """[slots, K, v] float32, the distributions that drafts were drawn from, for the v tokens that
    this rank holds, see `Batch.draft_probs`; None: drafts are not drawn."""
    parents: Tensor | None
    """[slots, T] int64, parents of the tokens in trees that grow; None: trees do not grow."""
    earlier: Earlier | None
    """[slots, E, ...], the last E committed positions; None: nothing on this rank reads them. With
    a prefix cache there is one position more, since the heads begin one position before a
    checkpoint. Pipeline stages before the last one have no hidden states to keep."""
    ends: Ends | None
    """End conditions of requests; None: only the host checks them."""
    vocabulary: Vocabulary

    @classmethod
    def allocate(
        cls,
        count: int,
        config: EngineConfig,
        vocabulary: Vocabulary,
        device: torch.device,
        counters: Sequence[Counter] = (),
        span: HeadSpan = NO_HEADS,
        dtype: torch.dtype = torch.float32,
        hidden_size: int = 0,
    ) -> "DeviceState":
        """Allocate empty slots.

        Args:
            counters: counters that the states of the layers have for each request.
            span: see `Drafter.span`.
            dtype: dtype of hidden states.
            hidden_size: the base's hidden size, needed with a prefix cache; 0: this rank lacks the
                base's hidden states.
        """
        cached = config.enable_prefix_caching
        positions = span.before
        if cached and hidden_size:
            positions = positions + 1
        else:
            hidden_size = span.hidden_size

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(count, *shape, dtype=dtype, device=device)

        columns = {}
        for processor in PROCESSORS:
            for name, form in processor.columns(vocabulary, config.decode_width).items():
                shape = (count, *form.shape)
                columns[name] = torch.full(shape, form.fill, dtype=form.dtype, device=device)
        draft_probs = None
        if config.draft_distributions:
            shape = (config.draft_distributions, vocabulary.width)
            draft_probs = zeros(*shape, dtype=torch.float32)
        parents = None
        if isinstance(config.tree, DynamicTree):
            # A chain is a valid tree, which slots have that no step has written yet.
            chain = torch.arange(-1, config.tree.tokens - 1, device=device)
            parents = chain.repeat(count, 1)
        earlier = None
        if positions:
            hidden = zeros(positions, hidden_size, dtype=dtype)
            earlier = Earlier(zeros(positions), hidden)
        ends = None
        if cached:
            token_ids = zeros(MOST_END_TOKENS).fill_(_NO_END)
            ends = Ends(token_ids, zeros(), zeros(dtype=torch.bool))
        return cls(
            tokens=zeros(config.decode_width),
            num_computed=zeros(),
            committed=Committed.none(counters, count, device),
            seeds=zeros(),
            columns=columns,
            draft_probs=draft_probs,
            parents=parents,
            earlier=earlier,
            ends=ends,
            vocabulary=vocabulary,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the state."""
        own = [value for value in vars(self).values() if isinstance(value, Tensor)]
        parts = [
            value
            for part in (self.earlier, self.ends)
            if part is not None
            for value in vars(part).values()
        ]
        return [*own, *self.committed.counts.values(), *self.columns.values(), *parts]

    def earlier_at(self, slots: Tensor, behind: bool = False) -> Earlier | None:
        """[R, E, ...] the committed positions that the drafter reads before a step of the rows at
        `slots`.

        Args:
            behind: the step begins at the last committed position, see `StepShape.resumed`.
        """
        if self.earlier is None:
            return None
        # With a prefix cache one position more is kept: a usual step leaves out the oldest, and one
        # that begins at the last committed position leaves out that one, which it computes itself.
        spare = int(self.ends is not None)
        if self.earlier.token_ids.shape[1] == spare:
            return None
        kept = slice(0, -1) if behind else slice(spare, None)
        return Earlier(self.earlier.token_ids[slots][:, kept], self.earlier.hidden[slots][:, kept])

    def newest_hidden(self, slots: Tensor) -> Tensor | None:
        """[R, 1, h] the base's hidden states at the last committed position of the rows at `slots`;
        None: this rank keeps none."""
        return None if self.earlier is None else self.earlier.hidden[slots, -1][:, None]

    def live(self, slots: Tensor, decoding: int) -> Tensor:
        """[R] `slots`, with -1 for those of the first `decoding` rows whose requests have ended."""
        if self.ends is None:
            return slots
        rows = torch.arange(len(slots), device=slots.device)
        return torch.where(self.ends.reached[slots] & (rows < decoding), -1, slots)

    def sampling(self, slots: Tensor, use: Use) -> Sampling:
        """Sampling parameters of the rows at `slots` [S]."""
        use = use if self.vocabulary.width else GREEDY
        return Sampling(use, slots, self.seeds, self.columns, self.vocabulary)

    def admit(self, requests: Sequence[Request]) -> None:
        """Write the sampling parameters of `requests`, before the last chunk of their prompts is
        computed. The step of that chunk may make a chain of drafts where the next step verifies a
        tree, so the tree is reset here.

        Nothing here waits for the device. `tensor[slots] = 0` would: PyTorch copies the number and
        waits for the copy.
        """
        if not requests:
            return
        ids = [[request.slot for request in requests], [request.seed for request in requests]]
        slots, seeds = to_device(ids, torch.int64, self.tokens.device)
        self.seeds[slots] = seeds

        self.tokens.index_fill_(0, slots, 0)
        if self.parents is not None:
            self.parents[slots] = torch.arange(-1, self.parents.shape[1] - 1, device=slots.device)

        size = self.vocabulary.size
        numbers = [
            {
                name: value
                for one in PROCESSORS
                for name, value in one.numbers(request.params, size).items()
            }
            for request in requests
        ]
        # One copy takes all numbers to the device; float64 represents each of them exactly.
        values = to_device([list(row.values()) for row in numbers], torch.float64, slots.device)
        for name, column in zip(numbers[0], values.T, strict=True):
            self.columns[name][slots] = column.to(self.columns[name].dtype)
        if self.vocabulary.width:
            for processor in PROCESSORS:
                processor.admit(self.columns, slots, requests, self.vocabulary)
        if self.ends is not None:
            self.ends.admit(slots, requests)

    def write_masks(self, masks: Masks) -> None:
        """Write what may follow the tokens of constrained requests in their next step."""
        if self.vocabulary.width:
            # All in one copy: the device waits for the host here.
            where = np.array([masks.slots, masks.places], np.int32).T
            values = np.concatenate([where, masks.allowed], axis=1)
            sent = to_device(values, torch.int32, self.tokens.device)
            slots, places = sent[:, :2].long().T
            self.columns["allowed_next"][slots, places] = sent[:, 2:]

    def write_drafts(self, drafts: HostDrafts) -> None:
        """Write the drafts that the next step verifies, see `HostDrafts`."""
        device = self.tokens.device
        own = np.array(drafts.slots, np.int64)[:, None]
        sent = to_device(np.concatenate([own, drafts.token_ids], axis=1), torch.int64, device)
        slots = sent[:, 0]
        self.tokens[slots, 1 : sent.shape[1]] = sent[:, 1:]
        if self.parents is not None and drafts.parents is not None:
            self.parents[slots] = to_device(drafts.parents, torch.int64, device)
        rows, places = drafts.chosen.nonzero()
        if self.draft_probs is not None and len(rows):
            self._make_certain(np.array(drafts.slots)[rows], places, drafts.token_ids[rows, places])

    def _make_certain(self, slots: np.ndarray, places: np.ndarray, token_ids: np.ndarray) -> None:
        """Replace the distributions of drafts [n] that were not drawn by ones that have only them.

        Args:
            places: which of the drafts of its row each is.
        """
        assert self.draft_probs is not None
        values = np.stack([slots, places, token_ids])
        where = to_device(values, torch.int64, self.tokens.device)
        column = torch.arange(self.vocabulary.width, device=self.tokens.device)
        certain = column == self.vocabulary.place(where[2])[:, None]
        self.draft_probs[where[0], where[1]] = certain.float()

    def drafts_at(self, slots: Sequence[int]) -> Tensor:
        """[R, T - 1] int64, the drafts at `slots` [R], followed by [R, T] parents for trees that
        grow."""
        places = to_device(slots, torch.int64, self.tokens.device)
        token_ids = self.tokens[places, 1:]
        return (
            token_ids if self.parents is None else torch.cat([token_ids, self.parents[places]], 1)
        )

    def step(
        self, batch: Batch, verdict: Verdict, drafts: Drafts, hidden: Tensor | None = None
    ) -> None:
        """Store the results of a batch. Chunks that do not end a prompt have no tokens to store.

        Args:
            hidden: [T, 1, h], the base's hidden states; may be None if no `earlier` ones are kept.
        """
        inputs = batch.inputs
        slots = batch.inputs.state_slots
        # A slot whose request ends stays at its end, while the host still commits what the verdict
        # accepts: it finds the end itself.
        kept = verdict.accepted if self.ends is None else self.ends.cut(batch, verdict)
        last = batch.last_index(kept)
        # One kernel writes all of these: small ops in a row would cost more time than their work.
        store_rows(
            slots,
            self.num_computed,
            self.tokens,
            inputs.context_lens,
            last,
            verdict.accepted,
            verdict.token_ids,
            drafts.token_ids,
            tuple(self.committed.counts.values()),
            tuple(inputs.committed_after(last + 1).counts.values()),
        )
        if self.earlier is not None:
            assert hidden is not None
            # The newest positions may reach back before the step. `batch` has a copy of what was
            # kept there, so that nothing is read here that was just written.
            positions = self.earlier.token_ids.shape[1]
            rows = torch.arange(len(slots), device=slots.device)[:, None].expand(-1, positions)
            places = last[:, None] + torch.arange(1 - positions, 1, device=slots.device)
            self.earlier.token_ids[slots] = batch.token_ids_at(rows, places)
            self.earlier.hidden[slots] = batch.hidden_at(rows, places, hidden)
        self._count_tokens(batch, verdict, drafts)

    def _count_tokens(self, batch: Batch, verdict: Verdict, drafts: Drafts) -> None:
        """Store the distributions and parents of the drafts, and let processors count the chosen
        tokens."""
        count = batch.shape.sampling_rows
        slots = batch.inputs.state_slots[:count]
        accepted = verdict.accepted[:count]
        if self.draft_probs is not None and drafts.probs is not None:
            self.draft_probs[slots, : drafts.probs.shape[1]] = drafts.probs
        if self.parents is not None and drafts.parents is not None:
            self.parents[slots] = drafts.parents
        token_ids = verdict.token_ids[:count]
        chosen = Chosen(accepted, token_ids, self.vocabulary.place(token_ids))
        for processor in PROCESSORS:
            if processor.name in batch.sampling.use:
                processor.count(self.columns, slots, chosen)

    def settled(self, slots: Tensor, committed: Committed) -> None:
        """Reset the counters of the slots [R], whose states are now as a prefill chunk would have
        left them.

        Args:
            committed: the counters of the slots until now.
        """
        self.committed.put(slots, committed.none(committed.counts, len(slots), slots.device))

    def restart(self, first: int = 0) -> None:
        """Reset the slots from `first` on to position 0, for null rows."""
        self.num_computed[first:].zero_()
        if self.ends is not None:
            self.ends.limits[first:].fill_(LARGEST_COUNT)
            self.ends.token_ids[first:].fill_(_NO_END)
            self.ends.reached[first:].fill_(False)

    def pretend(self, position: int) -> None:
        """Make all slots look as in the middle of decoding after `position` positions, for steps
        that are only timed. What the layers hold of them is whatever their memory holds."""
        self.restart()
        self.num_computed.fill_(position)
        self.committed.spread(position)
