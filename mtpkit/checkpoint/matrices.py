"""Quantised matrices of a checkpoint: which of its tensors are their parts, and sources of weights
that give them as they are stored.

A matrix has the name of the tensor that it would be in bf16: `X.weight`. Its parts are named by
their formats (`mtpkit.model.formats`): `X.weight_packed`, `X.weight_scale`. In Megatron's layout
parts have Megatron's names in the same way: `in_proj.weight.z` has `in_proj.weight_scale.z`, expert
3 of a stack `linear_fc1.weight_scale[3]`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from mtpkit.checkpoint.quantized import FP8
from mtpkit.checkpoint.recipe import Recipe, Rule
from mtpkit.checkpoint.tensors import (
    ANOTHER_COPY,
    CheckedTensors,
    SeveralSources,
    Shape,
    TensorInfo,
    Tensors,
    TensorSource,
)
from mtpkit.errors import UserError, listed
from mtpkit.model.formats import (
    Awq,
    Format,
    Fp8,
    Gptq,
    Int4,
    Nvfp4,
    Part,
    Quantized,
    odd_values,
)

_COMPANIONS = (
    "weight_scale_inv",
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "input_scale",
    "input_global_scale",
    "qzeros",
    "scales",
    "g_idx",
)
"""Parts other than codes, as files name them."""
WIDENED = "widen them by --fp8-as of `convert import`"
"""Advice if matrices cannot be kept as they are stored."""
_CODES = ("weight_packed", "qweight", "weight")
_PART = re.compile(rf"(.*\.|.*_|)({'|'.join((*_COMPANIONS, *_CODES))})(\.\w+|\[\d+\])?")


def part_name(matrix: str, part: str) -> str:
    """The name of the tensor that holds a part of a matrix.

    Matrices of stacked experts have names that do not end in `weight`: their scales are
    `gate_up_proj_scale_inv`.
    """
    match = _PART.fullmatch(matrix)
    if match:
        return f"{match[1]}{part}{match[3] or ''}"
    return matrix if part == "weight" else f"{matrix}_{part.removeprefix('weight_')}"


def split_part(name: str) -> tuple[str, str]:
    """(matrix, part) of a tensor that has the name of a part; any other name is a matrix's own."""
    match = _PART.fullmatch(name)
    return (f"{match[1]}weight{match[3] or ''}", match[2]) if match else (name, "weight")


class Weights(ABC):
    """A checkpoint, or a view of one under other names, whose quantised matrices can be read as
    they are stored or widened."""

    tensors: dict[str, TensorInfo]
    """A quantised matrix has its own shape [N, K], and the dtype in which `read` gives it."""

    @property
    @abstractmethod
    def matrices(self) -> Mapping[str, Quantized]:
        """The quantised matrices by their names in `tensors`, on the meta device: their formats,
        and the shapes and dtypes of their parts, before anything is read.

        Raises:
            UserError: some cannot be kept as they are stored, see `Table.to_megatron`; the message
                names them. They can be read widened.
        """

    @property
    def formats(self) -> Mapping[str, Format]:
        """The formats of `matrices`; raises as they do."""
        return {name: matrix.format for name, matrix in self.matrices.items()}

    @abstractmethod
    def quantized(self, name: str) -> Quantized:
        """A matrix as it is stored, on the device that the source was opened for.

        Raises:
            UserError: as `matrices`, or a file is damaged or missing.
        """

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """As in `Tensors`; a quantised matrix is widened."""

    @abstractmethod
    def require_finite(self) -> None:
        """As in `TensorSource`, for scales too, which must also be positive."""


class SeveralWeights(SeveralSources, Weights):
    """As `SeveralSources`: weights, and sources without quantised matrices."""

    def __init__(self, weights: Weights, *others: TensorSource) -> None:
        super().__init__(weights, *others)
        self._weights = weights

    @property
    def matrices(self) -> Mapping[str, Quantized]:
        return self._weights.matrices

    def quantized(self, name: str) -> Quantized:
        return self._weights.quantized(name)


class SomeWeights(Weights):
    """A subset of the tensors of weights under Megatron's names; quantised matrices stay so."""

    def __init__(self, source: Weights, names: Set[str]) -> None:
        self._source = source
        self.tensors = {name: info for name, info in source.tensors.items() if name in names}

    @property
    def matrices(self) -> Mapping[str, Quantized]:
        found = self._source.matrices
        return {name: matrix for name, matrix in found.items() if name in self.tensors}

    def quantized(self, name: str) -> Quantized:
        return self._source.quantized(name)

    def read(self, name: str) -> Tensor:
        return self._source.read(name)

    def require_finite(self) -> None:
        self._source.require_finite()


class WidenedHeads(SomeWeights):
    """All tensors of weights under Megatron's names, of which those of heads are widened."""

    def __init__(self, source: Weights) -> None:
        super().__init__(source, source.tensors.keys())

    @property
    def matrices(self) -> Mapping[str, Quantized]:
        found = super().matrices
        return {name: each for name, each in found.items() if not name.startswith("mtp.")}


@dataclass(frozen=True)
class Found:
    """A quantised matrix among the tensors of a checkpoint."""

    format: Format
    shape: Shape
    """[N, K], or [E, N, K] for a stack of experts in one tensor."""
    parts: Mapping[str, str]
    """Part -> name of its tensor."""


def find_matrices(
    tensors: Mapping[str, TensorInfo], recipe: Recipe | None, where: object, in_file: bool = True
) -> dict[str, Found]:
    """Find the quantised matrices of a checkpoint by the dtypes and companions of its tensors.

    Args:
        recipe: what its settings say; None: nothing, and no tensor counts as quantised.
        in_file: whether names are those of a file that the settings are about, and not Megatron's.

    Raises:
        UserError: parts are missing or of another shape or dtype, or the settings contradict the
            tensors; the message names them all.
    """
    if recipe is None:
        return {}
    finder = _Finder(tensors, recipe, in_file)
    found = {}
    for name, info in tensors.items():
        kind = finder.kind(name, info)
        if kind is not None:
            matrix = split_part(name)[0]
            found[matrix] = finder.find(matrix, kind)
    problems = [*finder.problems()]
    if problems:
        raise UserError(f"{where}: {listed(problems, width=240, separator='; ')}")
    return {name: each for name, each in found.items() if each is not None}


class _Finder:
    """Finds the matrices of a checkpoint, and notes what does not fit."""

    def __init__(self, tensors: Mapping[str, TensorInfo], recipe: Recipe, in_file: bool) -> None:
        self._tensors = tensors
        self._recipe = recipe
        self._in_file = in_file
        self._missing: list[str] = []
        self._odd: list[str] = []

    def problems(self) -> Iterator[str]:
        if self._missing:
            kinds = {rule.codes for rule in self._recipe.rules}
            what = "fp8" if kinds == {"fp8"} else "quantised"
            yield (
                f"{len(self._missing)} missing, without which {what} weights cannot be read:"
                f" {listed(sorted(self._missing))}"
            )
        yield from self._odd

    def kind(self, name: str, info: TensorInfo) -> str | None:
        """The format of the matrix whose codes a tensor holds; None if it holds none."""
        matrix, part = split_part(name)
        if part == "weight_packed":
            return {torch.uint8: "nvfp4", torch.int32: "int4"}.get(info.dtype)
        if part == "qweight" and len(info.shape) == 2:
            return self._columnwise(matrix, info.shape)
        if part != "weight":
            return None
        if info.dtype == FP8 and len(info.shape) > 1:
            return "fp8"
        # Either of them shows that these are codes; the other may be missing.
        scaled = self._has(matrix, "weight_scale") or self._has(matrix, "weight_scale_2")
        return "nvfp4" if info.dtype == torch.uint8 and scaled else None

    def _columnwise(self, matrix: str, codes: Shape) -> str:
        """The format of codes in int32 that lie beside `scales`."""
        scales = self._tensors.get(part_name(matrix, "scales"))
        if scales is None or len(scales.shape) != 2:
            return self._recipe.rules[0].codes if self._recipe.rules else "gptq"
        rows = 1 if self._in_file else 0
        return "gptq" if codes[rows] == scales.shape[rows] else "awq"

    def find(self, matrix: str, kind: str) -> Found | None:
        """The matrix of a name; None if there are problems, which are noted."""
        formats = [self._format(matrix, rule) for rule in self._rules(matrix, kind)]
        if not formats:
            return None
        # The shapes of scales tell which of several rules is meant.
        problems = {each: self._misfits(matrix, each) for each in formats}
        fitting = [each for each, (missing, odd) in problems.items() if not missing and not odd]
        if len(fitting) > 1:
            self._odd.append(
                f"{matrix} fits several rules of {self._recipe.name}, which differ in how inputs"
                f" are quantised: {WIDENED}"
            )
            return None
        if not fitting:
            missing, odd = problems[formats[0]]
            self._missing += missing
            self._odd += odd
            return None
        (found,) = fitting
        names = {part: part_name(matrix, part) for part in found.parts()}
        codes = self._codes(matrix, found)
        return Found(found, (*codes[:-2], *found.shape_of(codes[-2:])), names)

    def _rules(self, matrix: str, kind: str) -> list[Rule]:
        """The rules that may be about a matrix."""
        rules = [rule for rule in self._recipe.rules if rule.codes == kind]
        module = matrix.removesuffix(".weight")
        said = ""
        if not rules:
            said = f"{self._recipe.name} has no {kind}"
        elif self._in_file and self._recipe.ignores(module):
            said = f"{self._recipe.name} lists it as not quantised"
        elif self._in_file:
            rules = [rule for rule in rules if rule.is_about(module)]
            said = "" if rules else f"{self._recipe.name} does not say so"
        if said:
            self._odd.append(f"{matrix} is stored as {kind}, but {said}")
            return []
        return rules

    def _format(self, matrix: str, rule: Rule) -> Format:
        if rule.codes == "fp8":
            inverse = "weight_scale_inv"
            # Of a file with both names, `_misfits` refuses the one that the format does not know.
            usual = inverse if self._recipe.name.startswith("fp8") else "weight_scale"
            other = "weight_scale" if usual == inverse else inverse
            scale = usual if self._has(matrix, usual) or not self._has(matrix, other) else other
            by_row = not self._in_file and self._is_by_row(matrix, scale, rule)
            rows = 1 if by_row else rule.rows
            return Fp8(rows=rows, columns=rule.columns, scale=scale, inputs=rule.inputs)
        packed = self._has(matrix, "weight_packed")
        if rule.codes == "nvfp4":
            whole = "weight_global_scale" if packed else "weight_scale_2"
            inputs = "input_global_scale" if packed else "input_scale"
            return Nvfp4(
                packed="weight_packed" if packed else "weight",
                whole=whole,
                input_scale=inputs if self._has(matrix, inputs) else "",
            )
        columns = rule.columns
        if rule.codes in ("gptq", "awq"):
            kind: Format = Gptq(zero_offset=rule.zero_offset) if rule.codes == "gptq" else Awq()
            width = kind.shape_of(self._codes(matrix, kind))[1]
            return replace(kind, columns=columns or width)  # type: ignore[call-arg]
        if columns is None:
            columns = 8 * self._info(matrix, "weight_packed").shape[-1]
        return Int4(columns=columns, asymmetric=self._has(matrix, "weight_zero_point"))

    def _codes(self, matrix: str, kind: Format) -> Shape:
        """The shape of the codes, rows first."""
        shape = self._info(matrix, kind.codes).shape
        return shape[::-1] if self._in_file and kind.transposed else shape

    def _has(self, matrix: str, part: str) -> bool:
        return part_name(matrix, part) in self._tensors

    def _info(self, matrix: str, part: str) -> TensorInfo:
        return self._tensors[part_name(matrix, part)]

    def _is_by_row(self, matrix: str, scale: str, rule: Rule) -> bool:
        """Whether the scales of blocks were expanded to rows when the checkpoint was imported."""
        if not self._has(matrix, scale) or rule.rows is None or rule.rows == 1:
            return False
        return self._info(matrix, scale).shape[0] == self._info(matrix, "weight").shape[0]

    def _misfits(self, matrix: str, kind: Format) -> tuple[list[str], list[str]]:
        """Names of the parts of a matrix that are missing, and clauses about those that are not as
        its format says."""
        declared = kind.parts()
        codes = self._codes(matrix, kind)
        shape = kind.shape_of(codes[-2:])
        needed = (*declared, *(DERIVED.get(kind.name, ()) if self._in_file else ()))
        missing = [part_name(matrix, part) for part in needed if not self._has(matrix, part)]
        odd = []
        for part, each in declared.items():
            name = part_name(matrix, part)
            size = each.shape(shape)
            found = self._tensors.get(name)
            if found is None:
                continue
            shaped = found.shape[::-1] if self._in_file and kind.transposed else found.shape
            if found.dtype not in each.dtypes or not self._is_shape(shaped, codes, size, each):
                have = f"{list(found.shape)} {found.dtype}".replace("torch.", "")
                want = str(each.dtypes[0]).removeprefix("torch.")
                odd.append(f"{name} {have} instead of {[*codes[:-2], *size]} {want}")
        known = {*declared, *DERIVED.get(kind.name, ())}
        odd += [
            f"{part_name(matrix, part)} is unknown to {kind.name} of {self._recipe.name}"
            for part in (*_COMPANIONS, *_CODES)
            if part not in known and self._has(matrix, part)
        ]
        return missing, odd

    def _is_shape(self, found: Shape, codes: Shape, size: Shape, part: Part) -> bool:
        if len(codes) > 2:
            return found == (*codes[:-2], *size)
        if found in shapes_of(size):
            return True
        # After matrices with different scales were joined, see `Quantized`.
        return not self._in_file and part.rows is None and found == (codes[0], size[1])


DERIVED: Mapping[str, Sequence[str]] = {"int4": ("weight_shape",), "gptq": ("g_idx",)}
"""Parts of files that follow from the others, by format."""


_CONTRADICTS = {
    "weight_shape": "contradicts the codes",
    "g_idx": "orders columns by activation, which is not supported",
}


def derived_part(part: str, kind: Format, shape: Shape) -> Tensor:
    """A part of `DERIVED` of a matrix [N, K]."""
    if part == "weight_shape":
        return torch.tensor(shape, dtype=torch.int64)
    assert part == "g_idx" and isinstance(kind, Gptq), part
    return (torch.arange(shape[1]) // kind.columns).to(torch.int32)


def shapes_of(size: Shape) -> dict[Shape, str]:
    """Shapes that files give to a part of two sizes, each with a name: the usual one first."""
    rows, columns = size
    shapes = {(rows, columns): "matrix", (rows, 1, columns, 1): "blocks"}
    if columns == 1:
        shapes[(rows,)] = "flat"
    if rows == columns == 1:
        shapes[()] = "scalar"
    return shapes


class StoredMatrices:
    """A checkpoint with its quantised matrices under their names, whose values are not checked.

    A stack of experts in one tensor is a tensor [E, N, K], and the matrices `name[0]`, `name[1]`...

    Args:
        found: the matrices among the tensors of `source`.
        dtype: dtype in which `read` gives them.
        in_file: see `find_matrices`.
    """

    def __init__(
        self,
        source: Tensors,
        found: Mapping[str, Found],
        dtype: torch.dtype,
        in_file: bool = True,
    ) -> None:
        self._source = source
        self._transposed = in_file
        self._dtype = dtype
        self._found = found
        parts = {
            part_name(name, part)
            for name, each in found.items()
            for part in (*each.parts, *DERIVED.get(each.format.name, ()))
        }
        codes = {each.parts[each.format.codes]: name for name, each in found.items()}
        self.tensors = {
            codes.get(name, name): TensorInfo(found[codes[name]].shape, dtype)
            if name in codes
            else info
            for name, info in source.tensors.items()
            if name in codes or name not in parts
        }
        self._places = dict(self._places_of_all())

    def _places_of_all(self) -> Iterator[tuple[str, tuple[str, int | None]]]:
        """Name of a matrix -> (name of its tensor, its place in a stack)."""
        for name, each in self._found.items():
            if len(each.shape) == 2:
                yield name, (name, None)
            else:
                yield from ((f"{name}[{at}]", (name, at)) for at in range(each.shape[0]))

    @cached_property
    def matrices(self) -> Mapping[str, Quantized]:
        """As in `Weights`."""
        # Of many thousand experts, all have the same format and shapes.
        made: dict[object, Quantized] = {}
        matrices = {}
        for name, (stack, _) in self._places.items():
            found = self._found[stack]
            infos = tuple(self._source.tensors[part] for part in found.parts.values())
            key = found.format, found.shape, infos
            if key not in made:
                made[key] = self._assembled(found, self._blank)
            matrices[name] = made[key]
        return matrices

    def _blank(self, part: str) -> Tensor:
        info = self._source.tensors[part]
        return torch.empty(info.shape, dtype=info.dtype, device="meta")

    def _assembled(
        self, found: Found, read: Callable[[str], Tensor], at: int | None = None
    ) -> Quantized:
        shape = found.shape[-2:]
        parts = {}
        for part, name in found.parts.items():
            tensor = read(name)
            if len(found.shape) > 2:
                tensor = tensor[at or 0]
            if found.format.transposed and self._transposed:
                tensor = tensor.t().contiguous()
            # Whatever shape a file gives to scales, they are in order of rows, then columns.
            columns = found.format.parts()[part].shape(shape)[1]
            parts[part] = tensor.reshape(-1, columns)
        return Quantized(found.format, shape, parts)

    def quantized(self, name: str) -> Quantized:
        stack, at = self._places[name]
        return self._assembled(self._found[stack], self._source.read, at)

    def contradictions(self, name: str) -> Iterator[str]:
        """Yield a clause for each further part of a matrix that does not follow from the others."""
        found = self._found[self._places[name][0]]
        for part in DERIVED.get(found.format.name, ()):
            stored = part_name(name, part)
            if stored in self._source.tensors:
                told = self._source.read(stored)
                if not torch.equal(told, derived_part(part, found.format, found.shape)):
                    yield f"{part} {_CONTRADICTS[part]}"

    def read(self, name: str) -> Tensor:
        if name not in self._found:
            return self._source.read(name)
        names = self.of_tensor(name)
        wide = [self.quantized(each).widen(self._dtype) for each in names]
        return torch.stack(wide) if len(self._found[name].shape) > 2 else wide[0]

    def of_tensor(self, name: str) -> list[str]:
        """The matrices in a tensor: none if it is not quantised."""
        found = self._found.get(name)
        if found is None:
            return []
        if len(found.shape) == 2:
            return [name]
        return [f"{name}[{at}]" for at in range(found.shape[0])]


class CheckedWeights(CheckedTensors, Weights):
    """As `CheckedTensors`; the scales of quantised matrices are checked as well, for values that no
    quantiser writes."""

    def __init__(
        self, source: StoredMatrices, where: Path | str, device: torch.device | None = None
    ) -> None:
        super().__init__(source, where, torch.device("cpu") if device is None else device)
        self._stored = source
        self._odd: dict[str, list[str]] = {}

    def __getstate__(self) -> dict[str, object]:
        return super().__getstate__() | {"_odd": {}}

    @property
    def matrices(self) -> Mapping[str, Quantized]:
        return self._stored.matrices

    def quantized(self, name: str) -> Quantized:
        matrix = self._checked(name)
        codes = matrix.parts[matrix.format.codes]
        if self._upload is not None:
            parts = {part: self._upload(tensor) for part, tensor in matrix.parts.items()}
            matrix = Quantized(matrix.format, matrix.shape, parts)
            codes = parts[matrix.format.codes]
        if codes.dtype == FP8:
            # As bytes: the codes of NaN are 127 and 255.
            self._finite[name] = (codes.view(torch.uint8) & 127).amax() < 127
        return matrix

    def _checked(self, name: str) -> Quantized:
        matrix = self._stored.quantized(name)
        odd = [*odd_values(matrix), *self._stored.contradictions(name)]
        if odd:
            self._odd[name] = odd
        return matrix

    def read(self, name: str) -> Tensor:
        for matrix in self._stored.of_tensor(name):
            self._checked(matrix)
        return super().read(name)

    def require_finite(self) -> None:
        super().require_finite()
        if self._odd:
            clauses = [f"{name}: {', '.join(odd)}" for name, odd in sorted(self._odd.items())]
            raise UserError(
                f"{self._where}: {listed(clauses, width=240, separator='; ')}; {ANOTHER_COPY}"
            )
