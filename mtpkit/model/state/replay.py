"""Recurrent state as one state and a ring of the small inputs that came after it.

A step reads the state once, and writes it only when the step's tokens no longer fit into the ring.
Rejected tokens are rolled back by forgetting their inputs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mtpkit.kernels.ring import ring_capacity, ring_length
from mtpkit.kernels.step_rows import ring_lens_after
from mtpkit.model.state.base import (
    Committed,
    Counter,
    NoiseKey,
    Part,
    RecurrentState,
    StateSizes,
    StateSpec,
    StepPlaces,
)


@dataclass(frozen=True)
class Ring(Counter):
    """Counts the committed inputs in rings of `length` places that are not folded into the state
    yet: those of a request's last positions. The count never exceeds `ring_capacity(length)`, so
    that a step never writes to places that it reads."""

    length: int

    def after(self, counts: Tensor, width: int, new: Tensor) -> Tensor:
        """See `Counter.after`."""
        return ring_lens_after(counts, new, width, self.length)

    def spread(self, counts: Tensor, position: int) -> Tensor:
        """See `Counter.spread`."""
        # Kernels find the entries before the position: there are no more of them than positions.
        most = min(ring_capacity(self.length), max(0, position - self.behind))
        return torch.arange(len(counts), device=counts.device) % (1 + most)


@dataclass(frozen=True)
class Replay(RecurrentState):
    """The recurrent state of one layer and, for each replayed input, the ring of its values after
    that state."""

    ring: Ring

    @property
    def folded(self) -> Tensor:
        """[slots, ...], the state before the inputs in the ring; after a prefill chunk the ring is
        empty."""
        return self.tensors["state"]

    @property
    def chunk_end(self) -> dict[str, Tensor]:
        """See `State.chunk_end`: without the rings."""
        return {"state": self.folded}

    def settling(self, committed: Committed) -> None:
        """See `State.settling`: the layer folds the rings."""

    def inputs(self, name: str) -> Tensor:
        """Return the latest inputs `name`, [slots, L, ...], with the input of position i at place i
        % L."""
        return self.tensors[name]

    @property
    def of_tokens(self) -> list[Tensor]:
        """See `State.of_tokens`: the rings."""
        return [tensor for name, tensor in self.tensors.items() if name != "state"]

    def entries_of(self, step: StepPlaces, index: Tensor) -> Tensor:
        """See `State.entries_of`."""
        return self._at(step, (step.context_lens[:, None] + index) % self.ring.length)


@dataclass(frozen=True)
class ReplaySpec(StateSpec):
    """Sizes of a recurrent state and, by name, of the inputs that are replayed onto it."""

    kind = Replay
    shape: tuple[int, ...]
    inputs: Mapping[str, Part]

    def ring(self, sizes: StateSizes) -> Ring:
        """Return the counter of the rings; a kind whose kernel needs another ring length overrides
        this."""
        return Ring(ring_length(sizes.decode_width), behind=sizes.behind)

    def parts(self, sizes: StateSizes) -> dict[str, Part]:
        """See `StateSpec.parts`."""
        length = self.ring(sizes).length
        rings = {
            n: replace(part, shape=(length, *part.shape), in_ring=True)
            for n, part in self.inputs.items()
        }
        return {"state": Part(self.shape, sizes.state_dtype), **rings}

    def make(self, tensors: dict[str, Tensor], sizes: StateSizes) -> Replay:
        """See `StateSpec.make`."""
        key = NoiseKey(sizes.layer, sizes.rank * math.prod(self.shape[:1]))
        return self.kind(tensors, *self.counters(sizes), key=key)

    def counters(self, sizes: StateSizes) -> tuple[Ring]:
        """See `StateSpec.counters`."""
        return (self.ring(sizes),)
