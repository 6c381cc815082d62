"""Recurrent state with the rollback that the engine is configured for."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mtpkit.model.state.base import Counter, Part, State, StateSizes, StateSpec
from mtpkit.model.state.replay import ReplaySpec
from mtpkit.model.state.snapshot import SnapshotSpec


@dataclass(frozen=True)
class RecurrentSpec(StateSpec):
    """Sizes of one layer's recurrent state and, by name, of the inputs that advance it.
    `StateSizes.rollback` chooses between a `Snapshot` and a `Replay`."""

    shape: tuple[int, ...]
    inputs: Mapping[str, Part]

    def chosen(self, sizes: StateSizes) -> SnapshotSpec | ReplaySpec:
        """Return the spec for the configured rollback."""
        if sizes.rollback == "snapshot":
            return SnapshotSpec(self.shape)
        return ReplaySpec(self.shape, self.inputs)

    def parts(self, sizes: StateSizes) -> dict[str, Part]:
        """See `StateSpec.parts`."""
        return self.chosen(sizes).parts(sizes)

    def make(self, tensors: dict[str, Tensor], sizes: StateSizes) -> State:
        """See `StateSpec.make`."""
        return self.chosen(sizes).make(tensors, sizes)

    def counters(self, sizes: StateSizes) -> tuple[Counter, ...]:
        """See `StateSpec.counters`."""
        return self.chosen(sizes).counters(sizes)
