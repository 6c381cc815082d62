"""Tables of weight names that are read in both directions.

An `Entry` ties one or more Hugging Face tensors to one or more Megatron tensors. Megatron names are those of its
distributed checkpoints (`torch_dist`): `mixer.in_proj.weight.z`, and `experts.linear_fc1.weight[3]` for slice 3 of the
stacked experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mtpkit.checkpoint.tensors import Shape, TensorInfo, TensorSource, require_same_names
from mtpkit.errors import UserError, listed


class Transform(Protocol):
    """A change of layout and its inverse. Both also work on meta tensors, which is how shapes are derived."""

    def to_megatron(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...


class Same:
    """Equal on both sides."""

    def to_megatron(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)


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
    """One line of a table: Hugging Face names with their shapes, the Megatron names, and what lies between."""

    hf: Mapping[str, Shape]
    megatron: tuple[str, ...]
    transform: Transform = field(default_factory=Same)

    def megatron_shapes(self) -> dict[str, Shape]:
        if isinstance(self.transform, Same):  # the many experts, without a tensor for each
            return dict(zip(self.megatron, self.hf.values(), strict=True))
        blanks = [torch.empty(shape, device="meta") for shape in self.hf.values()]
        return {n: tuple(t.shape) for n, t in zip(self.megatron, self.transform.to_megatron(blanks), strict=True)}


@dataclass(frozen=True)
class Table:
    """All entries of one model; every tensor of a checkpoint belongs to exactly one."""

    entries: tuple[Entry, ...]

    def hf_shapes(self) -> dict[str, Shape]:
        return {name: shape for entry in self.entries for name, shape in entry.hf.items()}

    def megatron_shapes(self) -> dict[str, Shape]:
        return {name: shape for entry in self.entries for name, shape in entry.megatron_shapes().items()}

    def to_megatron(self, source: TensorSource, where: Path) -> "MappedTensors":
        """View a Hugging Face checkpoint under Megatron names.

        Raises:
            UserError: the checkpoint's tensors are not exactly the table's; lists them all.
        """
        require_same_names(where, source.tensors, self.hf_shapes())
        return MappedTensors(source, [_Step(tuple(e.hf), e.megatron, e.transform.to_megatron) for e in self.entries])

    def to_hf(self, source: TensorSource, where: Path) -> "MappedTensors":
        """View a Megatron checkpoint under Hugging Face names. Raises as `to_megatron` does."""
        require_same_names(where, source.tensors, self.megatron_shapes())
        return MappedTensors(source, [_Step(e.megatron, tuple(e.hf), e.transform.to_hf) for e in self.entries])


class _Convert(Protocol):
    def __call__(self, tensors: Sequence[Tensor], /) -> list[Tensor]: ...


@dataclass(frozen=True)
class _Step:
    """An entry read in one direction."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    convert: _Convert


class MappedTensors:
    """A source seen through a table. Holds the tensors of one entry at a time, so reading in order reads all once."""

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

    def require_finite(self) -> None:
        self._source.require_finite()
