"""What every kind of state answers for: its tensors and bytes, and what of it is committed.

A layer names its states as `StateSpec`s; a `State` is one of them, allocated for all requests of an engine. A new kind
is a subclass of each, in a file of its own. What tells the accepted tokens from the rejected ones is a `Counter` that
its spec names, and that the engine keeps for each request without knowing what it counts.

Shape legend: R rows (requests) of a step, K speculative tokens; a unit is a block of the paged cache or the slot of a
request.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

Rollback = Literal["replay", "snapshot"]
Unit = Literal["block", "slot"]


@dataclass(frozen=True)
class StateSizes:
    """What the engine decides about the states of all layers."""

    block_size: int
    """Tokens of a block."""
    decode_width: int
    """Most tokens that a decode step feeds a row: 1 + K, and `behind` more."""
    rollback: Rollback
    """How recurrent state is taken back after a rejection."""
    dtype: torch.dtype
    """Type of the model's activations."""
    state_dtype: torch.dtype = torch.float32
    """Type of recurrent state."""
    behind: int = 0
    """Positions that a step feeds again before those that it computes first: the states stop this far behind what is
    committed. Deeper depths of distinct heads do this, see `DistinctDrafter`."""


@dataclass(frozen=True)
class Part:
    """Shape of one unit of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    """None: that of the model's activations."""
    in_ring: bool = False
    """Whether it is there only to take rejected tokens back."""


@dataclass(frozen=True)
class Counter(ABC):
    """A number that a kind of state keeps for each request. States with equal counters share one tensor, so that a step
    counts once for all layers."""

    behind: int = field(default=0, kw_only=True)
    """See `StateSizes.behind`."""
    start: int = field(default=0, kw_only=True)
    """The count after a prefill chunk."""

    @abstractmethod
    def after(self, counts: Tensor, width: int, new: Tensor) -> Tensor:
        """[R] a new tensor: the counts once rows with `counts` [R] were fed `width` tokens and `new` [R] of them
        stand."""


@dataclass(frozen=True)
class Newest(Counter):
    """The index of the newest token that stands among those that the last step fed; `start` where none of them does,
    which is at position 0 of states that are behind."""

    @classmethod
    def of(cls, written: int, sizes: StateSizes) -> Self:
        """That of a state into whose first `written` places a step writes; one that is behind has what a chunk left
        after them, where no step overwrites it."""
        return cls(behind=sizes.behind, start=written if sizes.behind else 0)

    def after(self, counts: Tensor, width: int, new: Tensor) -> Tensor:
        """See `Counter.after`."""
        return torch.where(new > 0, new - 1, self.start) if self.behind else new - 1

    def places(self, counts: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Where the `length` places of what is committed are for `counts` [R], and where a chunk leaves them; see
        `State.settling`."""
        steps = torch.arange(length, device=counts.device)
        return counts[:, None] + steps, self.start + steps


@dataclass(frozen=True)
class Committed:
    """Which part of what the states hold is committed, for the rows of a step or for all slots.

    Drafts form a chain, whose accepted part the index of its last token tells; the accepted path through a tree of
    drafts is made one, see `States.keep_path`.
    """

    counts: Mapping[Counter, Tensor]
    """[R] int64 of each counter."""

    @classmethod
    def none(cls, counters: Iterable[Counter], rows: int, device: torch.device) -> Self:
        """Rows after a prefill chunk, or before one; each tensor is its own."""
        return cls({one: torch.full((rows,), one.start, dtype=torch.int64, device=device) for one in counters})

    def at(self, slots: Tensor | slice) -> Self:
        """The rows at `slots`."""
        return replace(self, counts={counter: held[slots] for counter, held in self.counts.items()})

    def restarted(self, first: int) -> Self:
        """These rows, those from `first` on as after a prefill chunk."""
        parts = ((one, held[:first], held[first:]) for one, held in self.counts.items())
        counts = {
            one: torch.cat([kept, torch.full_like(rest, one.start)]) if len(rest) else kept for one, kept, rest in parts
        }
        return replace(self, counts=counts)

    def followed_by(self, rows: int) -> Self:
        """These rows and `rows` more as after a prefill chunk."""
        more = {one: torch.cat([held, held.new_full((rows,), one.start)]) for one, held in self.counts.items()}
        return replace(self, counts=more)

    def put(self, slots: Tensor | slice, rows: Self) -> None:
        """Write `rows` to the rows at `slots`."""
        for counter, held in self.counts.items():
            held[slots] = rows.counts[counter]

    def after(self, context_lens: Tensor, width: int, new: Tensor) -> Self:
        """These rows after a decode step.

        Args:
            context_lens: [R] int64, positions that were committed before it.
            width: tokens that each row was fed.
            new: [R] int64, how many of them stand.
        """
        stand = {0: new}
        for behind in {counter.behind for counter in self.counts} - {0}:
            ends = [(lens - behind).clamp_min(0) for lens in (context_lens, context_lens + new)]
            stand[behind] = ends[1] - ends[0]
        counts = {one: one.after(held, width + one.behind, stand[one.behind]) for one, held in self.counts.items()}
        return replace(self, counts=counts)

    def fed(self, width: int, new: Tensor) -> Self:
        """These rows after they were fed `width` tokens each, counted as the states themselves see them, of which `new`
        [R] stand."""
        return replace(self, counts={one: one.after(held, width, new) for one, held in self.counts.items()})


@dataclass(frozen=True)
class StepPlaces:
    """Where the decode rows of a step leave entries: R rows of T tokens."""

    context_lens: Tensor
    """[R] int64, tokens that were committed before the step."""
    kv_slots: Tensor
    """[R, T] int64, see `StepInput.kv_slots`."""
    state_slots: Tensor
    """[R] int64; -1: a null row."""


@dataclass(frozen=True)
class State:
    """One state of one layer, for all units."""

    unit: ClassVar[Unit] = "slot"
    tensors: dict[str, Tensor]
    """[units, ...] each, by the names of `StateSpec.parts`."""

    def fork(self, slots: Tensor) -> Self:
        """A state whose slot r is a copy of slot slots[r]: an MTP depth goes on from what is committed here, on a copy
        that is then forgotten."""
        return replace(self, tensors={name: tensor[slots] for name, tensor in self.tensors.items()})

    @property
    def chunk_end(self) -> dict[str, Tensor]:
        """[units, ...] by name, views of what a prefill chunk reads and leaves."""
        return self.tensors

    def settling(self, committed: Committed) -> tuple[Tensor, Tensor] | None:
        """The places in each of `of_tokens` that hold what is committed of R rows, [R, P] int64, and those where a
        chunk would have left it, [P] int64; see `States.settle`. None: a chunk would have left it where it is, except
        rings, which only the layer can fold.

        Args:
            committed: of these rows.
        """
        if any(isinstance(value, Counter) for value in vars(self).values()):
            raise NotImplementedError(
                f"{type(self).__name__} keeps a counter, so it needs a `settling` that says where its committed part is"
            )
        return None

    @property
    def of_tokens(self) -> list[Tensor]:
        """[units, places, ...] the tensors that have an entry for each token of a step."""
        return list(self.tensors.values())

    def entries_of(self, step: StepPlaces, index: Tensor) -> Tensor:
        """[R, P] int64, the entries, counted over all units, that the tokens `index` [R, P] of a step's rows have in
        each of `of_tokens`; negative for null rows. States of one class whose tensors have equally many places have the
        same."""
        raise NotImplementedError(f"{type(self).__name__} does not say where it keeps the tokens of a tree")

    def _at(self, step: StepPlaces, place: Tensor) -> Tensor:
        """The entries at the places [R, P] of the rows' slots."""
        return step.state_slots[:, None] * self.of_tokens[0].shape[1] + place


@dataclass(frozen=True)
class PagedState(State):
    """A state with an entry for each position, in blocks. Rejected tokens are taken back by forgetting their positions,
    which later tokens overwrite."""

    unit = "block"

    def entries_of(self, step: StepPlaces, index: Tensor) -> Tensor:
        """See `State.entries_of`."""
        return step.kv_slots.gather(1, index)

    def fork(self, slots: Tensor) -> Self:
        """Itself: what a depth writes beyond the committed positions is overwritten before anything reads it."""
        return self


class StateSpec(ABC):
    """The sizes of one state of a layer. Subclasses are frozen dataclasses."""

    unit: ClassVar[Unit] = "slot"
    kind: ClassVar[Callable[..., State]]
    """What has these sizes; its fields are the tensors and the counters."""

    @abstractmethod
    def parts(self, sizes: StateSizes) -> dict[str, Part]:
        """The tensors, by name."""

    def make(self, tensors: dict[str, Tensor], sizes: StateSizes) -> State:
        """The state that has these tensors."""
        return self.kind(tensors, *self.counters(sizes))

    def counters(self, sizes: StateSizes) -> tuple[Counter, ...]:
        """What has to be counted for each request."""
        return ()

    def unit_bytes(self, sizes: StateSizes, only_rings: bool = False) -> int:
        """Bytes of one unit, or what its rings take of them."""
        parts = [part for part in self.parts(sizes).values() if part.in_ring or not only_rings]
        return sum(math.prod(part.shape) * (part.dtype or sizes.dtype).itemsize for part in parts)

    def allocate(self, units: int, sizes: StateSizes, device: torch.device) -> State:
        """The state for `units` units, uninitialised: a layer reads only what was written for the request."""
        tensors = {
            name: torch.empty(units, *part.shape, dtype=part.dtype or sizes.dtype, device=device)
            for name, part in self.parts(sizes).items()
        }
        return self.make(tensors, sizes)
