"""Recurrent state kept after each token of a step and committed by index: the simple reference for `replay`."""

from dataclasses import dataclass

from torch import Tensor

from mtpkit.model.state.base import Committed, Counter, Newest, Part, Saved, State, StateSizes, StateSpec


@dataclass(frozen=True)
class Snapshot(State):
    """The recurrent state of one layer after each token of a step."""

    newest: Newest
    """Tells the entry of the committed state."""

    @property
    def entries(self) -> Tensor:
        """[slots, decode width, ...], the state after each token of a step, and, of a state that is behind, one more
        that no step overwrites: what a chunk left."""
        return self.tensors["state"]

    @property
    def folded(self) -> Tensor:
        """[slots, ...], the state as a prefill chunk reads and leaves it."""
        return self.entries[:, self.newest.start]

    def copy(self, unit: int, committed: Committed) -> Saved:
        """See `State.copy`: the committed entry."""
        return {"state": self.entries[unit, committed.counts[self.newest][unit : unit + 1]][0]}

    def restore(self, unit: int, saved: Saved) -> None:
        """See `State.restore`."""
        self.folded[unit] = saved["state"]


@dataclass(frozen=True)
class SnapshotSpec(StateSpec):
    """Sizes of a recurrent state that is kept after each token."""

    shape: tuple[int, ...]

    def newest(self, sizes: StateSizes) -> Newest:
        """The counter of the committed entry."""
        return Newest(behind=sizes.behind, start=sizes.decode_width if sizes.behind else 0)

    def parts(self, sizes: StateSizes) -> dict[str, Part]:
        """See `StateSpec.parts`."""
        entries = max(sizes.decode_width, self.newest(sizes).start + 1)
        return {"state": Part((entries, *self.shape), sizes.state_dtype)}

    def make(self, tensors: dict[str, Tensor], sizes: StateSizes) -> Snapshot:
        """See `StateSpec.make`."""
        return Snapshot(tensors, self.newest(sizes))

    def counters(self, sizes: StateSizes) -> tuple[Counter, ...]:
        """See `StateSpec.counters`."""
        return (self.newest(sizes),)
