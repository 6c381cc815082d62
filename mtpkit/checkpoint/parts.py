"""Weights to be written, with the parts of quantised matrices as tensors of their own."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mtpkit.checkpoint.layouts.megatron import split_slice
from mtpkit.checkpoint.matrices import (
    DERIVED,
    WIDENED,
    Found,
    Weights,
    derived_part,
    find_matrices,
    part_name,
    shapes_of,
)
from mtpkit.checkpoint.recipe import Recipe
from mtpkit.checkpoint.tensors import Shape, TensorInfo
from mtpkit.errors import UserError, listed
from mtpkit.model.formats import CutGroup, Format, Fp8, Quantized


class _Place(NamedTuple):
    """What a tensor to be written holds."""

    matrices: tuple[str, ...]
    """The matrix, or all of a stack."""
    part: str
    shape: Shape


class Parts:
    """Weights in which each quantised matrix is replaced by its parts, as Megatron's layout holds
    them: in two dimensions.

    Several threads may read from it; each caches a matrix.

    Raises:
        UserError: matrices of one stack of experts are not stored alike; the message names them.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._held = _Held()
        self._matrices = weights.matrices
        self._places: dict[str, _Place] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for name, info in weights.tensors.items():
            names = self._of_tensor(name)
            if not names:
                self.tensors[name] = info
                continue
            for part, tensor in self._parts(names[0]).items():
                stored = part_name(name, part)
                lead = info.shape[:-2]
                shape = (*lead, *self._shape(name, part, tensor))
                self._places[stored] = _Place(names, part, shape)
                self.tensors[stored] = TensorInfo(shape, tensor.dtype)
        self._check()

    def _of_tensor(self, name: str) -> tuple[str, ...]:
        """The matrices of a tensor; none if it is not quantised."""
        if name in self._matrices:
            return (name,)
        count = self._weights.tensors[name].shape[0] if f"{name}[0]" in self._matrices else 0
        return tuple(f"{name}[{at}]" for at in range(count))

    def _parts(self, name: str) -> Mapping[str, Tensor]:
        """The parts of a matrix on the meta device, as they are written."""
        return self._matrices[name].parts

    def _shape(self, name: str, part: str, tensor: Tensor) -> Shape:
        return tuple(tensor.shape)

    def _check(self) -> None:
        # A stack is one tensor on disk.
        stacks: dict[str, list[TensorInfo]] = {}
        experts: dict[str, int] = {}
        for name, info in self.tensors.items():
            stacks.setdefault(split_slice(name)[0], []).append(info)
        names = [name for name in self._weights.tensors if split_slice(name)[1] is not None]
        for name in names:
            key = split_slice(name)[0]
            experts[key] = experts.get(key, 0) + 1
        odd = set()
        for name in names:
            key = split_slice(name)[0]
            stored = [stacks[split_slice(each)[0]] for each in self._stored_names(name)]
            if any(len(infos) != experts[key] or len({*infos}) > 1 for infos in stored):
                odd.add(key)
        if odd:
            raise UserError(
                f"{listed(sorted(odd))}: experts of one layer are stored in different formats, but"
                f" Megatron's layout stacks them: {WIDENED}"
            )

    def _stored_names(self, name: str) -> Iterator[str]:
        """Names of the tensors that hold a tensor of the weights."""
        names = self._of_tensor(name)
        if not names:
            yield name
        for part in self._parts(names[0]) if names else ():
            yield part_name(name, part)

    def read(self, name: str) -> Tensor:
        place = self._places.get(name)
        if place is None:
            return self._weights.read(name)
        parts = [self._matrix(each).parts[place.part] for each in place.matrices]
        whole = parts[0] if len(parts) == 1 else torch.stack(parts)
        return whole.reshape(place.shape)

    def _matrix(self, name: str) -> Quantized:
        if self._held.name != name:
            self._held.matrix = None
            self._held.matrix = self._written(name, self._weights.quantized(name))
            self._held.name = name
        assert self._held.matrix is not None
        return self._held.matrix

    def _written(self, name: str, matrix: Quantized) -> Quantized:
        return matrix

    def require_finite(self) -> None:
        self._weights.require_finite()


class _Held(threading.local):
    """The cached matrix of each thread."""

    def __init__(self) -> None:
        self.name = ""
        self.matrix: Quantized | None = None


def stored_parts(weights: Weights, recipe: Recipe | None, where: Path) -> Parts:
    """Weights to be written in Megatron's layout with quantised matrices as they are stored.

    Args:
        recipe: the settings that will lie beside them.
        where: the directory of the weights, for messages.

    Raises:
        UserError: some cannot be kept, or would not be told apart later, without the names of
            modules that the settings speak of; the message names them.
    """
    parts = Parts(weights)
    again = find_matrices(parts.tensors, recipe, where, in_file=False)
    assert all(again[name].format == kind for name, kind in weights.formats.items())
    return parts


class FileParts(Parts):
    """As `Parts`, as a file of the Hugging Face layout holds them: one entry where a whole matrix
    has one, blocks where it has blocks, and scales in the shapes of the original.

    Args:
        weights: under Hugging Face names.
        recipe: the settings that the file will have.
        scale_shapes: see `scale_shapes_of`.

    Raises:
        UserError: `scale_shapes` do not fit.
    """

    def __init__(
        self, weights: Weights, recipe: Recipe | None, scale_shapes: Mapping[str, str]
    ) -> None:
        self._recipe = recipe
        self._scale_shapes = scale_shapes
        super().__init__(weights)

    def _kind(self, kind: Format) -> Format:
        """The format in the file."""
        if not isinstance(kind, Fp8) or kind.rows != 1 or self._recipe is None:
            return kind
        blocks = {
            rule.rows
            for rule in self._recipe.rules
            if rule.codes == kind.name and rule.columns == kind.columns
        }
        return replace(kind, rows=blocks.pop()) if len(blocks) == 1 else kind

    def _parts(self, name: str) -> Mapping[str, Tensor]:
        matrix = self._written(name, self._matrices[name])
        derived = DERIVED.get(matrix.format.name, ())
        others = {part: derived_part(part, matrix.format, matrix.shape) for part in derived}
        return {**matrix.parts, **{part: other.to("meta") for part, other in others.items()}}

    def _shape(self, name: str, part: str, tensor: Tensor) -> Shape:
        kind = self._matrices[self._of_tensor(name)[0]].format
        if part not in kind.parts():
            return tuple(tensor.shape)
        if kind.transposed:
            return tuple(tensor.shape[::-1])
        way = self._scale_shapes.get(part_name(name, part))
        way = way or self._scale_shapes.get(f"{kind.name} {part}", "matrix")
        shapes = {each: shape for shape, each in shapes_of(tuple(tensor.shape)).items()}
        if way not in shapes:
            raise UserError(
                f"{part_name(name, part)} {list(tensor.shape)} cannot be written as {way!r}; import"
                " the checkpoint again"
            )
        return shapes[way]

    def _written(self, name: str, matrix: Quantized) -> Quantized:
        try:
            return matrix.gathered(self._kind(matrix.format))
        except CutGroup as cut:
            raise UserError(
                f"{name} cannot be written as {self._recipe.name if self._recipe else 'before'}:"
                f" {cut}"
            ) from cut

    def read(self, name: str) -> Tensor:
        place = self._places.get(name)
        if place is not None and place.part in DERIVED.get(self._kind_of(place).name, ()):
            matrix = self._matrices[place.matrices[0]]
            return derived_part(place.part, matrix.format, matrix.shape)
        if place is not None and self._kind_of(place).transposed:
            return self._matrix(place.matrices[0]).parts[place.part].t()
        return super().read(name)

    def _kind_of(self, place: _Place) -> Format:
        return self._matrices[place.matrices[0]].format


def scale_shapes_of(
    matrices: Mapping[str, Found], tensors: Mapping[str, TensorInfo]
) -> dict[str, str]:
    """Names of the shapes that a file gives to parts, see `shapes_of`, where they are unusual.

    Keys are `format part`, such as `fp8 weight_scale`, and names of tensors that differ from that.
    """
    usual: dict[str, str] = {}
    others: dict[str, str] = {}
    for found in matrices.values():
        if len(found.shape) > 2 or found.format.transposed:
            continue
        for part, name in found.parts.items():
            shape = tensors[name].shape
            way = shapes_of(found.format.parts()[part].shape(found.shape))[shape]
            if usual.setdefault(f"{found.format.name} {part}", way) != way:
                others[name] = way
    return {key: way for key, way in usual.items() if way != "matrix"} | others
