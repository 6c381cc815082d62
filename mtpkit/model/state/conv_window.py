"""Window of the inputs that a causal convolution still reads, K columns wider, so that rollback is
only an index."""

from dataclasses import dataclass

from torch import Tensor

from mtpkit.model.state.base import (
    Committed,
    Newest,
    Part,
    State,
    StateSizes,
    StateSpec,
    StepPlaces,
)


@dataclass(frozen=True)
class ConvWindow(State):
    """Inputs of the convolution of one layer."""

    newest: Newest
    """Counter that says where the committed window starts."""
    taps: int
    """Number of earlier inputs that the convolution reads for a token: the kernel's width - 1."""

    @property
    def columns(self) -> Tensor:
        """[slots, taps - 1 + decode width, channels]; `taps` more columns if the state is behind,
        see `Newest.of`. With count c of `newest`, the next token reads columns c .. c + taps -
        1."""
        return self.tensors["columns"]

    @property
    def folded(self) -> Tensor:
        """[slots, taps, channels], the window as a prefill chunk reads and leaves it."""
        return self.columns[:, self.newest.start :][:, : self.taps]

    def entries_of(self, step: StepPlaces, index: Tensor) -> Tensor:
        """See `State.entries_of`: a step's columns follow the window's columns, of which the first
        is dropped."""
        return self._at(step, self.taps - 1 + index)

    @property
    def chunk_end(self) -> dict[str, Tensor]:
        """See `State.chunk_end`."""
        return {"columns": self.folded}

    def settling(self, committed: Committed) -> tuple[Tensor, Tensor]:
        """See `State.settling`: the committed window."""
        return self.newest.places(committed.counts[self.newest], self.taps)


@dataclass(frozen=True)
class ConvWindowSpec(StateSpec):
    """Sizes of the convolution of one layer."""

    kernel: int
    channels: int

    def parts(self, sizes: StateSizes) -> dict[str, Part]:
        """See `StateSpec.parts`."""
        (newest,) = self.counters(sizes)
        columns = max(self.kernel - 2 + sizes.decode_width, newest.start + self.kernel - 1)
        return {"columns": Part((columns, self.channels))}

    def make(self, tensors: dict[str, Tensor], sizes: StateSizes) -> ConvWindow:
        """See `StateSpec.make`."""
        return ConvWindow(tensors, *self.counters(sizes), self.kernel - 1)

    def counters(self, sizes: StateSizes) -> tuple[Newest]:
        """See `StateSpec.counters`."""
        return (Newest.of(self.kernel - 2 + sizes.decode_width, sizes),)
