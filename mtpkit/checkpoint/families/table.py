"""Tables of weight names, and of the changes between the tensors of the two layouts, that are read in both directions.

An `Entry` ties one or more Hugging Face tensors to one or more of Megatron's, see `mtpkit.checkpoint.layouts.megatron`.
Shapes are stated on Megatron's side alone; those of the Hugging Face tensors follow from them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from mtpkit.checkpoint.tensors import Shape, TensorInfo, TensorSource, require_same_names
from mtpkit.errors import MtpkitError, UserError, listed


class Transform(Protocol):
    """A change of layout and its inverse. Both also work on meta tensors, from which shapes are derived."""

    def to_megatron(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...


@dataclass(frozen=True)
class Same:
    """Equal on both sides."""

    def to_megatron(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    to_hf = to_megatron


SAME: Final = Same()


@dataclass(frozen=True)
class Split:
    """One Hugging Face tensor whose rows Megatron stores as several tensors of `sizes` rows."""

    sizes: tuple[int, ...]

    def to_megatron(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (fused,) = tensors
        return list(fused.split(self.sizes))

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(tensors))]


@dataclass(frozen=True)
class FuseQKV:
    """q, k, v apart in Hugging Face; in Megatron one tensor whose rows go [queries of the group, k, v] group by group.

    Example, 4 heads in 2 groups: rows [q0 q1 k0 v0 q2 q3 k1 v1], each of `head_dim` rows.
    """

    groups: int
    heads_per_group: int
    head_dim: int

    def to_megatron(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        columns = tensors[0].shape[1:]
        grouped = [t.reshape(self.groups, -1, *columns) for t in tensors]
        return [torch.cat(grouped, dim=1).reshape(-1, *columns)]

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (fused,) = tensors
        columns = fused.shape[1:]
        parts = (self.heads_per_group * self.head_dim, self.head_dim, self.head_dim)
        grouped = fused.reshape(self.groups, -1, *columns).split(parts, dim=1)
        return [t.reshape(-1, *columns) for t in grouped]


@dataclass(frozen=True)
class Entry:
    """One line of a table: Hugging Face names, Megatron names, and the change between them."""

    hf: tuple[str, ...]
    megatron: tuple[str, ...]
    transform: Transform = SAME

    def under(self, hf: str, megatron: str) -> "Entry":
        """The same line with a prefix on either side."""
        return Entry(tuple(hf + n for n in self.hf), tuple(megatron + n for n in self.megatron), self.transform)


def one(hf: str, megatron: str, transform: Transform = SAME) -> Entry:
    """A line with one tensor on each side."""
    return Entry((hf,), (megatron,), transform)


class Table:
    """All entries of one model; every tensor of a checkpoint belongs to exactly one.

    Args:
        entries: in the order in which tensors are written; those of tensors that the model lacks are left out.
        shapes: Megatron's names of all tensors of the model, with their shapes.

    Raises:
        MtpkitError: the family has no name for a tensor of the model.
    """

    def __init__(self, entries: Iterable[Entry], shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes
        self._entries = [entry for entry in entries if all(name in shapes for name in entry.megatron)]
        nameless = shapes.keys() - {name for entry in self._entries for name in entry.megatron}
        if nameless:
            raise MtpkitError(f"no Hugging Face name for {listed(sorted(nameless))}")

    def hf_shapes(self) -> dict[str, Shape]:
        return {name: shape for entry in self._entries for name, shape in self._hf_shapes(entry)}

    def _hf_shapes(self, entry: Entry) -> Iterator[tuple[str, Shape]]:
        shapes = [self._shapes[name] for name in entry.megatron]
        if entry.transform is not SAME:  # the many experts need no tensor each
            blanks = [torch.empty(shape, device="meta") for shape in shapes]
            shapes = [tuple(blank.shape) for blank in entry.transform.to_hf(blanks)]
        return zip(entry.hf, shapes, strict=True)

    def to_megatron(self, source: TensorSource, where: Path) -> "MappedTensors":
        """View a Hugging Face checkpoint under Megatron names.

        Raises:
            UserError: the checkpoint's tensors are not exactly the table's; lists them all.
        """
        require_same_names(where, source.tensors, self.hf_shapes())
        return MappedTensors(source, [_Step(e.hf, e.megatron, e.transform.to_megatron) for e in self._entries])

    def to_hf(self, source: TensorSource, where: Path) -> "MappedTensors":
        """View a Megatron checkpoint under Hugging Face names. Raises as `to_megatron` does."""
        require_same_names(where, source.tensors, self._shapes)
        return MappedTensors(source, [_Step(e.megatron, e.hf, e.transform.to_hf) for e in self._entries])


@dataclass(frozen=True)
class _Step:
    """An entry read in one direction."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    convert: Callable[[Sequence[Tensor]], list[Tensor]]


class MappedTensors:
    """A source seen through a table. Holds the tensors of one entry at a time, so reading in order reads all once.

    Several threads may read from it; a copy that is pickled reads in another process.
    """

    def __init__(self, source: TensorSource, steps: Sequence[_Step]) -> None:
        self._source = source
        self._steps = {name: step for step in steps for name in step.outputs}
        self._current: tuple[_Step | None, dict[str, Tensor]] = (None, {})
        self.tensors: dict[str, TensorInfo] = dict(info for step in steps for info in self._outputs(step))

    def _outputs(self, step: _Step) -> Iterator[tuple[str, TensorInfo]]:
        inputs = [self._source.tensors[name] for name in step.inputs]
        dtypes = {info.dtype for info in inputs}
        if len(dtypes) > 1:
            raise UserError(f"{listed(step.inputs)}: must be of one dtype to be joined, found {dtypes}")
        blanks = [torch.empty(info.shape, dtype=info.dtype, device="meta") for info in inputs]
        for name, blank in zip(step.outputs, step.convert(blanks), strict=True):
            yield name, TensorInfo(tuple(blank.shape), blank.dtype)

    def read(self, name: str) -> Tensor:
        step = self._steps[name]
        current = self._current  # once: other threads may read other entries meanwhile
        if current[0] is not step:
            del current
            self._current = (None, {})
            inputs = [self._source.read(n) for n in step.inputs]
            current = self._current = (step, dict(zip(step.outputs, step.convert(inputs), strict=True)))
        return current[1][name]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_current": (None, {})}

    def require_finite(self) -> None:
        self._source.require_finite()
