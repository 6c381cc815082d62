"""Recurrent state stored after each token of a step and committed by index: the simple reference
for `replay`."""

import math
from dataclasses import dataclass

from torch import Tensor

from mtpkit.model.state.base import (
    Committed,
    Newest,
    NoiseKey,
    Part,
    RecurrentState,
    StateSizes,
    StateSpec,
    StepPlaces,
)


@dataclass(frozen=True)
class Snapshot(RecurrentState):
    """The recurrent state of one layer after each token of a step."""

    newest: Newest
    """Counter that says which entry is the committed state."""

    @property
    def entries(self) -> Tensor:
        """[slots, decode width, ...], the state after each token of a step; one entry more if the
        state is behind, see `Newest.of`."""
        return self.tensors["state"]

    @property
    def folded(self) -> Tensor:
        """[slots, ...], the state as a prefill chunk reads and leaves it."""
        return self.entries[:, self.newest.start]

    def entries_of(self, step: StepPlaces, index: Tensor) -> Tensor:
        """See `State.entries_of`."""
        return self._at(step, index)

    @property
    def chunk_end(self) -> dict[str, Tensor]:
        """See `State.chunk_end`."""
        return {"state": self.folded}

    def settling(self, committed: Committed) -> tuple[Tensor, Tensor]:
        """See `State.settling`: the committed entry."""
        return self.newest.places(committed.counts[self.newest], 1)


@dataclass(frozen=True)
class SnapshotSpec(StateSpec):
    """Sizes of a recurrent state that is kept after each token."""

    kind = Snapshot
    shape: tuple[int, ...]

    def parts(self, sizes: StateSizes) -> dict[str, Part]:
        """See `StateSpec.parts`."""
        (newest,) = self.counters(sizes)
        # `start` is the entry that a chunk leaves: beyond those of a step if the state is behind.
        entries = max(sizes.decode_width, newest.start + 1)
        return {"state": Part((entries, *self.shape), sizes.state_dtype)}

    def make(self, tensors: dict[str, Tensor], sizes: StateSizes) -> Snapshot:
        """See `StateSpec.make`."""
        key = NoiseKey(sizes.layer, sizes.rank * math.prod(self.shape[:1]))
        return self.kind(tensors, *self.counters(sizes), key=key)

    def counters(self, sizes: StateSizes) -> tuple[Newest]:
        """See `StateSpec.counters`."""
        return (Newest.of(sizes.decode_width, sizes),)
