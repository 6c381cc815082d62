"""Interface of every kind of state: its tensors, its bytes, and its committed part.

A layer lists its states as `StateSpec`s; a `State` is one of them, allocated for all requests of an
engine. A new kind is a subclass of each, in a separate file. A `Counter` named by the spec
separates the accepted tokens from the rejected ones; the engine keeps it for each request without
knowing what it counts.

Shape legend: R rows (requests) of a step, K speculative tokens; a unit is a block of the paged
cache or the slot of a request.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from mtpkit.kernels.rounding import Noise

Rollback = Literal["replay", "snapshot"]
Unit = Literal["block", "slot"]


@dataclass(frozen=True)
class StateSizes:
    """Sizes and types that the engine sets for the states of all layers."""

    block_size: int
    """Tokens per block."""
    decode_width: int
    """Most tokens that a decode step feeds per row: 1 + K, and `behind` more."""
    rollback: Rollback
    """Method that rolls recurrent state back after a rejection."""
    dtype: torch.dtype
    """Type of the model's activations."""
    state_dtype: torch.dtype = torch.float32
    """Type of recurrent state."""
    kv_dtype: torch.dtype | None = None
    """Type of keys and values; None: `dtype`."""
    behind: int = 0
    """Positions that a step feeds again before its new positions: the states lag the committed
    tokens by this many. Distinct heads do this at their deeper depths, see `DistinctDrafter`."""
    rank: int = 0
    """Tensor-parallel rank, which has the heads from `rank` times its own number of heads on."""
    layer: int = 1
    """Number of the layer in the keys of noise, see `StateLayout.sizes_of`."""


@dataclass(frozen=True)
class Part:
    """Shape and type of one unit of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    """None: the dtype of the model's activations."""
    in_ring: bool = False
    """Whether the tensor is a ring, which exists only to roll back rejected tokens."""


@dataclass(frozen=True)
class Counter(ABC):
    """A number that a kind of state keeps for each request. States with equal counters share one
    tensor, so that a step counts once for all layers."""

    behind: int = field(default=0, kw_only=True)
    """See `StateSizes.behind`."""
    start: int = field(default=0, kw_only=True)
    """The count after a prefill chunk."""

    @abstractmethod
    def after(self, counts: Tensor, width: int, new: Tensor) -> Tensor:
        """Return a new tensor [R]: the counts after rows with `counts` [R] were fed `width` tokens
        each, of which `new` [R] were accepted."""

    def spread(self, counts: Tensor, position: int) -> Tensor:
        """Return a new tensor [R] of counts that are about as frequent as while R requests decode,
        for steps that are only timed.

        Args:
            counts: [R], for the dtype and the device.
            position: number of committed positions of each request.
        """
        return torch.full_like(counts, self.start)


@dataclass(frozen=True)
class Newest(Counter):
    """The index of the newest accepted token among those that the last step fed; `start` if none
    was accepted, which happens at position 0 of states that are behind."""

    @classmethod
    def of(cls, written: int, sizes: StateSizes) -> Self:
        """Return the counter of a state to whose first `written` places a step writes. If the state
        is behind, a prefill chunk stores the committed part after those places, where no step
        overwrites it."""
        return cls(behind=sizes.behind, start=written if sizes.behind else 0)

    def after(self, counts: Tensor, width: int, new: Tensor) -> Tensor:
        """See `Counter.after`."""
        # Other states are always fed a token that is accepted: the newest token of the request.
        if not self.behind:
            return new - 1
        return torch.where(new > 0, new - 1, self.start)

    def places(self, counts: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the `length` places of the committed part for `counts` [R], and the places where a
        chunk leaves that part; see `State.settling`."""
        steps = torch.arange(length, device=counts.device)
        return counts[:, None] + steps, self.start + steps


@dataclass(frozen=True)
class Committed:
    """The committed part of the states, for the rows of a step or for all slots.

    Drafts form a chain, so the index of the last accepted token is enough. The accepted path
    through a tree of drafts is first made a chain, see `States.keep_path`.
    """

    counts: Mapping[Counter, Tensor]
    """[R] int64 of each counter."""

    @classmethod
    def none(cls, counters: Iterable[Counter], rows: int, device: torch.device) -> Self:
        """Return rows as after a prefill chunk, or before one; counters share no tensor."""
        return cls(
            {
                one: torch.full((rows,), one.start, dtype=torch.int64, device=device)
                for one in counters
            }
        )

    def at(self, slots: Tensor | slice) -> Self:
        """Return the rows at `slots`."""
        return replace(self, counts={counter: held[slots] for counter, held in self.counts.items()})

    def followed_by(self, rows: int) -> Self:
        """Return these rows, followed by `rows` more as after a prefill chunk."""
        more = {
            one: torch.cat([held, held.new_full((rows,), one.start)])
            for one, held in self.counts.items()
        }
        return replace(self, counts=more)

    def spread(self, position: int) -> None:
        """Overwrite all rows, see `Counter.spread`."""
        for counter, held in self.counts.items():
            held.copy_(counter.spread(held, position))

    def put(self, slots: Tensor | slice, rows: Self) -> None:
        """Overwrite the rows at `slots` with `rows`."""
        for counter, held in self.counts.items():
            held[slots] = rows.counts[counter]

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of several parts, one part after another."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            {one: torch.cat([part.counts[one] for part in parts]) for one in parts[0].counts}
        )

    def after(
        self, context_lens: Tensor, width: int, new: Tensor, widest: int | None = None
    ) -> Self:
        """Return these rows after a decode step.

        Args:
            context_lens: [R] int64, positions that were committed before the step.
            width: tokens that each row was fed.
            new: [R] int64, number of accepted tokens of each row.
            widest: the most tokens of any row of the step, as many as states that are behind were
                fed for each row, besides those that they are fed again; None: `width`.
        """
        # A state that is behind advances by the accepted tokens, too, but near position 0 by fewer:
        # there is nothing yet that it could be behind.
        stand = {0: new}
        for behind in {counter.behind for counter in self.counts} - {0}:
            ends = [(lens - behind).clamp_min(0) for lens in (context_lens, context_lens + new)]
            stand[behind] = ends[1] - ends[0]
        counts = {
            one: one.after(
                held, one.behind + (widest or width if one.behind else width), stand[one.behind]
            )
            for one, held in self.counts.items()
        }
        return replace(self, counts=counts)

    def fed(self, width: int, new: Tensor) -> Self:
        """Return these rows after the states were fed `width` tokens per row, of which `new` [R]
        were accepted. Unlike in `after`, both include the tokens that states that are behind are
        fed again."""
        return replace(
            self, counts={one: one.after(held, width, new) for one, held in self.counts.items()}
        )


@dataclass(frozen=True)
class StepPlaces:
    """Places where a step's decode rows store their entries: R rows of T tokens."""

    context_lens: Tensor
    """[R] int64, number of tokens that were committed before the step."""
    kv_slots: Tensor
    """[R, T] int64, see `StepInput.kv_slots`."""
    state_slots: Tensor
    """[R] int64; -1: a null row."""


@dataclass(frozen=True)
class State:
    """One state of one layer, for all units."""

    unit: ClassVar[Unit] = "slot"
    tensors: dict[str, Tensor]
    """Tensors [units, ...], by the names of `StateSpec.parts`."""

    def fork(self, slots: Tensor) -> Self:
        """Return a state whose slot r is a copy of slot slots[r]. An MTP depth continues from the
        committed part on such a copy, which is dropped afterwards."""
        return replace(self, tensors={name: tensor[slots] for name, tensor in self.tensors.items()})

    @property
    def chunk_end(self) -> dict[str, Tensor]:
        """Views [units, ...], by name, of the part that a prefill chunk reads and leaves."""
        return self.tensors

    def settling(self, committed: Committed) -> tuple[Tensor, Tensor] | None:
        """Return the places in each tensor of `of_tokens` that hold the committed part of R rows,
        [R, P] int64, and the places where a chunk would have left it, [P] int64; see
        `States.settle`. None: it already is where a chunk would have left it, except for rings,
        which only the layer can fold.

        Args:
            committed: the committed part of these rows.
        """
        # With a counter, the committed part moves from step to step, and None would be wrong.
        if any(isinstance(value, Counter) for value in vars(self).values()):
            raise NotImplementedError(
                f"{type(self).__name__} keeps a counter, so it needs a `settling` that says where"
                " its committed part is"
            )
        return None

    @property
    def of_tokens(self) -> list[Tensor]:
        """[units, places, ...] the tensors that have an entry for each token of a step."""
        return list(self.tensors.values())

    def entries_of(self, step: StepPlaces, index: Tensor) -> Tensor:
        """[R, P] int64, the entries of the tokens `index` [R, P] of a step's rows in each tensor of
        `of_tokens`, counted over all units; negative for null rows. States of one class whose
        tensors have the same number of places have the same entries."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say where it keeps the tokens of a tree"
        )

    def _at(self, step: StepPlaces, place: Tensor) -> Tensor:
        """Return the entries, counted over all slots, at the places [R, P] of the rows' slots."""
        return step.state_slots[:, None] * self.of_tokens[0].shape[1] + place


class NoiseKey(NamedTuple):
    """The part of the key of rounding noise that the states of one layer have in common, see
    `Noise`."""

    layer: int = 1
    first_head: int = 0


@dataclass(frozen=True)
class RecurrentState(State):
    """A recurrent state, [..., heads, ...] in the tensor `state`. In float16 it is rounded
    stochastically."""

    key: NoiseKey = field(default=NoiseKey(), kw_only=True, compare=False)

    def noise(self, requests: Tensor | None, positions: Tensor | None = None) -> Noise | None:
        """Return the noise for ops that write the state; None: they round it to nearest, or not at
        all.

        Args:
            requests, positions: see `Noise`; no requests where no state of the step is in float16.
        """
        if requests is None or self.tensors["state"].dtype != torch.float16:
            return None
        return Noise(requests, *self.key, positions)


@dataclass(frozen=True)
class PagedState(State):
    """A state with an entry for each position, in blocks. Rollback forgets the positions of
    rejected tokens, which later tokens overwrite."""

    unit = "block"

    def entries_of(self, step: StepPlaces, index: Tensor) -> Tensor:
        """See `State.entries_of`."""
        return step.kv_slots.gather(1, index)

    def fork(self, slots: Tensor) -> Self:
        """Return the state itself: entries that a depth writes past committed positions are
        overwritten before use."""
        return self


class StateSpec(ABC):
    """The sizes of one state of a layer. Subclasses are frozen dataclasses."""

    unit: ClassVar[Unit] = "slot"
    kind: ClassVar[Callable[..., State]]
    """Class of the states with these sizes; its fields are the tensors and the counters."""

    @abstractmethod
    def parts(self, sizes: StateSizes) -> dict[str, Part]:
        """Return the shape and type of each tensor, by name."""

    def make(self, tensors: dict[str, Tensor], sizes: StateSizes) -> State:
        """Make the state that has these tensors."""
        return self.kind(tensors, *self.counters(sizes))

    def counters(self, sizes: StateSizes) -> tuple[Counter, ...]:
        """Return the counters that the state needs for each request."""
        return ()

    def unit_bytes(self, sizes: StateSizes, only_rings: bool = False) -> int:
        """Return the bytes of one unit, or only those of its rings."""
        parts = [part for part in self.parts(sizes).values() if part.in_ring or not only_rings]
        return sum(math.prod(part.shape) * (part.dtype or sizes.dtype).itemsize for part in parts)

    def allocate(self, units: int, sizes: StateSizes, device: torch.device) -> State:
        """Allocate the state for `units` units, uninitialised: a layer reads only what was written
        for its request."""
        tensors = {
            name: torch.empty(units, *part.shape, dtype=part.dtype or sizes.dtype, device=device)
            for name, part in self.parts(sizes).items()
        }
        return self.make(tensors, sizes)
