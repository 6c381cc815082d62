"""What a quantisation format is: the tensors that a file stores for one matrix, and their meaning.

Shape legend: N rows (outputs) and K columns (inputs) of a matrix.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mtpkit.kernels.quantized import NOT_QUANTIZED, Inputs, Matrix
from mtpkit.kernels.quantized.reference import widen

Shape = tuple[int, ...]

_WIDENED_ROWS = 2048
"""Number of rows that are widened at once."""

_LEAST = 2.0**-100
_MOST = 2.0**100
"""Bounds for the largest scale of a matrix: beyond them elements vanish in fp32 or become infinite,
by a scale, by its reciprocal or by two scales together."""

INPUT_SCALE = "input_scale"
"""Name of the part with the scale of the inputs by the rule `static`."""


class Part(NamedTuple):
    """One of the tensors that stand for a matrix [N, K], seen as [ceil(N / rows), ceil(K /
    columns)]."""

    dtypes: tuple[torch.dtype, ...]
    """Types that files store it in."""
    rows: int | None = 1
    """Rows of the matrix per entry; None: all of them."""
    columns: int | None = 1
    """Columns of the matrix per entry; None: all of them."""
    scale: bool = True
    """Whether it holds scales, which must be positive and finite."""
    of_inputs: bool = False
    """Whether its scales are those of inputs, which no element of the matrix depends on."""

    def shape(self, matrix: Shape) -> Shape:
        """Its two sizes for a matrix [N, K]."""
        outputs, width = matrix
        return (
            1 if self.rows is None else -(-outputs // self.rows),
            1 if self.columns is None else -(-width // self.columns),
        )


@dataclass(frozen=True, kw_only=True)
class Format(ABC):
    """A way to store a quantised matrix.

    An instance also says what the companions of one tensor leave open or choose, such as the size
    of groups. Parts are named by the last piece of their names in files: `weight_scale` of
    `model.layers.0.mlp.up_proj.weight_scale`.
    """

    inputs: Inputs = NOT_QUANTIZED
    """How the inputs of a product are quantised."""

    name: ClassVar[str]
    """Name of the format in messages and results."""
    bits: ClassVar[int]
    """Bits of an element without its scales."""
    transposed: ClassVar[bool] = False
    """Whether files hold parts with columns before rows."""

    @abstractmethod
    def parts(self) -> Mapping[str, Part]:
        """The tensors by name, first the one with the codes."""

    @abstractmethod
    def matrix(self, parts: Mapping[str, Tensor]) -> Matrix:
        """What kernels multiply with, from parts in two dimensions; scales that stand for all rows
        may have an entry per row."""

    @abstractmethod
    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Quantise a matrix [N, K] to parts in two dimensions."""

    def by_row(self) -> "Format":
        """The same format where scales of blocks have an entry per row."""
        return self

    @property
    def codes(self) -> str:
        """Name of the part with the codes."""
        return next(iter(self.parts()))

    def shape_of(self, codes: Shape) -> Shape:
        """[N, K] of the matrix whose codes have a shape."""
        part = self.parts()[self.codes]
        return codes[0] * (part.rows or 1), codes[1] * (part.columns or 1)


@dataclass(frozen=True)
class Quantized:
    """A quantised matrix [N, K] as a file stores it, with every part in two dimensions.

    A part with one entry for all rows may have an entry per row instead, as it has after matrices
    with different scales were joined.
    """

    format: Format
    shape: Shape
    parts: Mapping[str, Tensor]

    def matrix(self) -> Matrix:
        """What kernels multiply with."""
        return self.format.matrix(self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    def input_scale(self) -> Tensor | None:
        """The scale [] fp32 of the inputs by the rule `static`, of several joined matrices the
        largest; None by other rules."""
        if self.format.inputs.rule != "static":
            return None
        return self.parts[INPUT_SCALE].float().amax()

    def rows_per_entry(self, name: str) -> int:
        """Number of rows that an entry of a part stands for."""
        part = self.format.parts()[name]
        if part.rows is None:
            return 1 if len(self.parts[name]) == self.shape[0] > 1 else self.shape[0]
        return part.rows

    def by_row(self) -> "Quantized":
        """The same matrix, with an entry per row in the parts that have one for all rows."""
        spread = {
            name: part.expand(self.shape[0], -1).contiguous()
            if self.format.parts()[name].rows is None
            else part
            for name, part in self.parts.items()
        }
        return Quantized(self.format, self.shape, spread)

    def expanded(self) -> "Quantized":
        """The same matrix in `Format.by_row`: each row has the scales of its block."""
        kind = self.format.by_row()
        after = kind.parts()
        parts = {}
        for name, part in self.parts.items():
            rows = self.format.parts()[name].rows
            if rows is not None and rows != after[name].rows:
                part = part.repeat_interleave(rows, 0)[: self.shape[0]]
            parts[name] = part
        return Quantized(kind, self.shape, parts)

    def gathered(self, kind: Format) -> "Quantized":
        """The same matrix in a format that differs in the rows per entry: the inverse of `by_row`
        and `expanded`.

        Raises:
            CutGroup: rows that would share an entry have different ones.
        """
        parts = {}
        for name, part in self.parts.items():
            size = kind.parts()[name].rows or self.shape[0]
            if size != self.rows_per_entry(name):
                first = part[::size].contiguous()
                again = first.repeat_interleave(size, 0)[: len(part)]
                # Scales compare as bytes, since NaN would differ from itself.
                if not part.is_meta and not torch.equal(_bytes(again), _bytes(part)):
                    raise CutGroup(name, "different values", size)
                part = first
            parts[name] = part
        return Quantized(kind, self.shape, parts)

    def to(self, device: torch.device | str) -> "Quantized":
        """The same matrix on a device."""
        parts = {name: part.to(device) for name, part in self.parts.items()}
        return Quantized(self.format, self.shape, parts)

    def widen(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Restore the elements [N, K]: multiply in fp32, then round once to `dtype`."""
        return widened_rows(self.matrix(), dtype)

    def narrow_rows(self, start: int, stop: int) -> "Quantized":
        """The rows from `start`, where a group begins, to before `stop`, as views."""
        taken = {}
        for name, part in self.parts.items():
            size = self.rows_per_entry(name)
            whole = size == self.shape[0] and len(part) == 1
            assert whole or start % size == 0, f"row {start} is inside a group of {name}"
            taken[name] = part if whole else part[start // size : -(-stop // size)]
        return Quantized(self.format, (stop - start, self.shape[1]), taken)

    def take_rows(self, rows: Tensor) -> "Quantized":
        """The given rows of the matrix, in that order.

        Args:
            rows: [n] int64.

        Raises:
            CutGroup: rows that share an entry of a part would come apart.
        """
        taken = {}
        for name, part in self.parts.items():
            size = self.rows_per_entry(name)
            # One entry for all rows stays that, whichever are taken.
            if size == self.shape[0] and len(part) == 1:
                taken[name] = part
            else:
                taken[name] = part[_entries(rows, size, self.shape[0], name)]
        return Quantized(self.format, (len(rows), self.shape[1]), taken)

    def take_columns(self, start: int, stop: int) -> "Quantized":
        """The columns from `start` to before `stop`.

        Raises:
            CutGroup: a group of columns would be cut.
        """
        taken = {}
        for name, part in self.parts.items():
            size = self.format.parts()[name].columns
            if size is None:
                taken[name] = part
                continue
            if start % size or (stop % size and stop != self.shape[1]):
                raise CutGroup(name, f"columns {start} to {stop}", size)
            taken[name] = part[:, start // size : -(-stop // size)].contiguous()
        return Quantized(self.format, (self.shape[0], stop - start), taken)


def widened_rows(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """Restore the elements [N, K] of a matrix: multiply in fp32, then round once to `dtype`."""
    whole = torch.empty(matrix.shape, dtype=dtype, device=matrix.values.device)
    # A few rows at a time: a whole matrix in fp32 would need eight times the bytes of 4 bits, and
    # as much again for the scale of each element.
    for start, rows in _pieces_of(matrix):
        whole[start : start + len(rows.values)] = widen(rows, dtype)
    return whole


def _pieces_of(matrix: Matrix) -> Iterator[tuple[int, Matrix]]:
    """Yield a matrix [N, K] a few rows at a time, each piece with the number of its first row."""
    height = len(matrix.values)
    size = matrix.group[0]
    one_scale = size >= height
    step = _WIDENED_ROWS if one_scale else size * max(1, _WIDENED_ROWS // size)
    for start in range(0, height, step):
        stop = min(start + step, height)
        rows = slice(start, stop)
        piece = matrix._replace(values=matrix.values[rows])
        if one_scale:
            piece = piece._replace(group=(stop - start, matrix.group[1]))
        else:
            piece = piece._replace(scales=matrix.scales[start // size : -(-stop // size)])
        if matrix.row_scales is not None:
            piece = piece._replace(row_scales=matrix.row_scales[rows])
        if matrix.zeros is not None:
            piece = piece._replace(zeros=matrix.zeros[rows])
        yield start, piece


def _bytes(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.uint8)


class CutGroup(Exception):
    """A permutation or a split would cut a group of elements that share a scale."""

    def __init__(self, part: str, cut: str, size: int) -> None:
        super().__init__(f"{cut} cut groups of {size} that share an entry of {part}")


def _entries(rows: Tensor, size: int, total: int, name: str) -> Tensor:
    """The entries [ceil(n / size)] of a part for rows [n] of a matrix of `total` rows.

    Raises:
        CutGroup: some group of rows does not stay whole.
    """
    if size == 1:
        return rows
    starts = rows[::size]
    within = torch.arange(len(rows)) % size
    whole = bool((starts % size == 0).all()) and torch.equal(
        rows, starts.repeat_interleave(size)[: len(rows)] + within
    )
    # A partial group is whole only if it is the last one on both sides.
    ends = rows[-1] + 1
    if not whole or (len(rows) % size and ends != total):
        raise CutGroup(name, "rows", size)
    return starts // size


def join(matrices: Sequence[Quantized]) -> Quantized:
    """Put matrices of one format below each other.

    Raises:
        CutGroup: a matrix other than the last ends within a group of rows.
    """
    if len(matrices) == 1:
        return matrices[0]
    rows = [each.by_row() for each in matrices]
    kind = rows[0].format
    for name, part in kind.parts().items():
        size = part.rows or 1
        if any(each.shape[0] % size for each in rows[:-1]):
            raise CutGroup(name, "joined matrices", size)
    parts = {name: torch.cat([each.parts[name] for each in rows]) for name in rows[0].parts}
    return Quantized(kind, (sum(each.shape[0] for each in rows), rows[0].shape[1]), parts)


def odd_values(matrix: Quantized) -> Iterator[str]:
    """Yield a clause for each part with scales that no quantiser writes: NaN, infinite, negative,
    zero where codes are not zero or inputs are scaled, too small or too large to compute with."""
    for name, part in matrix.format.parts().items():
        if not part.scale:
            continue
        values = matrix.parts[name].float()
        largest = values.amax().item()
        if not bool(torch.isfinite(values).all()):
            yield f"{name} holds NaN or infinity"
        elif bool((values < 0).any()):
            yield f"{name} is negative"
        elif part.of_inputs and largest == 0:
            yield f"{name} is 0"
        elif not bool(values.all()) and _scales_away(matrix, name):
            yield f"{name} is 0 for elements that are not"
        # Scales of a few rows may be tiny, as those rows are.
        elif largest != 0 and not _LEAST <= largest <= _MOST:
            yield f"{name} is {largest:.3g} at most, not from {_LEAST:.3g} to {_MOST:.3g}"


def _scales_away(matrix: Quantized, name: str) -> bool:
    """Whether zeros in a part turn codes that are not zero into zeros."""
    part = matrix.parts[name]
    ones = {other: torch.ones_like(values) for other, values in matrix.parts.items()}
    codes = matrix.format.codes
    zeros = {
        other: values
        for other, values in matrix.parts.items()
        if other == codes or not matrix.format.parts()[other].scale
    }
    unscaled = Quantized(matrix.format, matrix.shape, ones | zeros)
    alone = Quantized(
        matrix.format, matrix.shape, ones | zeros | {name: (part != 0).to(part.dtype)}
    )
    return not torch.equal(widen(unscaled.matrix()), widen(alone.matrix()))
