"""Recurrent state kept after each token of a step and committed by index: the simple reference for `replay`."""

from dataclasses import dataclass

from torch import Tensor

from mtpkit.model.state.base import Committed, Part, Saved, State, StateSizes, StateSpec


@dataclass(frozen=True)
class Snapshot(State):
    """The recurrent state of one layer after each token of a step."""

    @property
    def entries(self) -> Tensor:
        """[slots, 1 + K, ...]; entry `Committed.last` is the committed state."""
        return self.tensors["state"]

    @property
    def folded(self) -> Tensor:
        """[slots, ...], the state where `Committed.last` is 0, as a prefill chunk reads and leaves it."""
        return self.entries[:, 0]

    def copy(self, unit: int, committed: Committed) -> Saved:
        """See `State.copy`: the committed entry."""
        return {"state": self.entries[unit, committed.last[unit : unit + 1]][0]}

    def restore(self, unit: int, saved: Saved) -> None:
        """See `State.restore`."""
        self.folded[unit] = saved["state"]


@dataclass(frozen=True)
class SnapshotSpec(StateSpec):
    """Sizes of a recurrent state that is kept after each token."""

    kind = Snapshot
    shape: tuple[int, ...]

    def parts(self, sizes: StateSizes) -> dict[str, Part]:
        """See `StateSpec.parts`."""
        return {"state": Part((sizes.decode_width, *self.shape), sizes.state_dtype)}
