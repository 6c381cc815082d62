"""What every kind of state answers for: its tensors and bytes, what of it is committed, copies of one request's share.

A layer names its states as `StateSpec`s; a `State` is one of them, allocated for all requests of an engine. A new kind
is a subclass of each, in a file of its own. Where rejected tokens are taken back by more than the index of the newest
accepted one, its spec names a `Counter`, which the engine keeps for each request without knowing what it counts.

Shape legend: R rows (requests) of a step, K speculative tokens; a unit is a block of the paged cache or the slot of a
request.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

Rollback = Literal["replay", "snapshot"]
Unit = Literal["block", "slot"]
Saved = dict[str, Tensor]
"""One unit's share of the tensors of a state, by their names."""


@dataclass(frozen=True)
class StateSizes:
    """What the engine decides about the states of all layers."""

    block_size: int
    """Tokens of a block."""
    decode_width: int
    """Most tokens that a decode step feeds a row: 1 + K."""
    rollback: Rollback
    """How recurrent state is taken back after a rejection."""
    dtype: torch.dtype
    """Of the model's activations."""
    state_dtype: torch.dtype = torch.float32
    """Of recurrent state."""


@dataclass(frozen=True)
class Part:
    """Shape of one unit of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    """None: that of the model's activations."""
    in_ring: bool = False
    """Whether it is there only to take rejected tokens back."""


class Counter(Hashable, Protocol):
    """A number that a kind of state keeps for each request beside `Committed.last`. States with equal counters share
    one tensor, so that a step counts once for all layers."""

    def after(self, counts: Tensor, width: int, new: Tensor | int) -> Tensor:
        """[R] a new tensor: the counts once rows with `counts` [R] were fed `width` tokens and `new` of them stand."""
        ...


@dataclass(frozen=True)
class Committed:
    """Which part of what the states hold is committed, for the rows of a step or for all slots.

    Drafts form a chain, whose accepted part the index of its last token tells. The path through a tree of drafts would
    stand here beside it.
    """

    last: Tensor
    """[R] int64, which token of the last step is the newest accepted one: its index among the tokens that the step fed,
    0 after a prefill chunk."""
    counts: Mapping[Counter, Tensor]
    """[R] int64 of each counter, 0 after a prefill chunk."""

    @classmethod
    def none(cls, counters: Iterable[Counter], rows: int, device: torch.device) -> Self:
        """Rows after a prefill chunk, or before one; each tensor is its own."""

        def zeros() -> Tensor:
            return torch.zeros(rows, dtype=torch.int64, device=device)

        return cls(zeros(), {counter: zeros() for counter in counters})

    def at(self, slots: Tensor | slice) -> Self:
        """The rows at `slots`."""
        return replace(self, last=self.last[slots], counts={key: held[slots] for key, held in self.counts.items()})

    def put(self, slots: Tensor | slice, rows: Self) -> None:
        """Write `rows` to the rows at `slots`."""
        self.last[slots] = rows.last
        for counter, held in self.counts.items():
            held[slots] = rows.counts[counter]

    def after_chunk(self, zeros: Tensor) -> Self:
        """Rows whose last step was a prefill chunk; `zeros` [R] int64."""
        return replace(self, last=zeros, counts=dict.fromkeys(self.counts, zeros))

    def after(self, width: int, last: Tensor, new: Tensor | int) -> Self:
        """These rows after a decode step.

        Args:
            width: tokens that each row was fed.
            last: [R] int64, index of the newest accepted one.
            new: how many were accepted.
        """
        counts = {counter: counter.after(held, width, new) for counter, held in self.counts.items()}
        return replace(self, last=last, counts=counts)


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

    def copy(self, unit: int, committed: Committed) -> Saved:
        """What `restore` needs of one unit. Does not wait for the device.

        Args:
            committed: of all slots.
        """
        return {name: tensor[unit].clone() for name, tensor in self.tensors.items()}

    def restore(self, unit: int, saved: Saved) -> None:
        """Write what `copy` gave to a unit; `Committed.last` of its request is 0 from then on."""
        for name, value in saved.items():
            self.tensors[name][unit] = value


class StateSpec(ABC):
    """The sizes of one state of a layer. Subclasses are frozen dataclasses."""

    unit: ClassVar[Unit] = "slot"
    kind: ClassVar[type[State]]
    """What `make` makes, where that needs tensors alone."""

    @abstractmethod
    def parts(self, sizes: StateSizes) -> dict[str, Part]:
        """The tensors, by name."""

    def make(self, tensors: dict[str, Tensor], sizes: StateSizes) -> State:
        """The state that has these tensors."""
        return self.kind(tensors)

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


@runtime_checkable
class KeepsState(Protocol):
    """A module that keeps something of earlier tokens. Its attribute `layer_name`, the key of its states in
    `StepInput.states`, is set when the model is built."""

    def state_specs(self) -> tuple[StateSpec, ...]:
        """What it keeps of a request or of a token."""
        ...
