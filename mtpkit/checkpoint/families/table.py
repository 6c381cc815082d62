"""Tables that map weight names between the two layouts and convert the tensors, in both directions.

An `Entry` ties one or more Hugging Face tensors to one or more of Megatron's, see
`mtpkit.checkpoint.layouts.megatron`. Only the shapes of Megatron's tensors are stated; those of the
Hugging Face tensors are derived from them.
"""

import math
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from mtpkit.checkpoint.matrices import WIDENED, SeveralWeights, Weights
from mtpkit.checkpoint.tensors import (
    SeveralSources,
    Shape,
    TensorInfo,
    Tensors,
    TensorSource,
    bits_equal,
    require_same_names,
)
from mtpkit.errors import MtpkitError, UserError, listed, shown
from mtpkit.model.formats import CutGroup, Format, Quantized, join


class Transform(Protocol):
    """A conversion between layouts and its inverse, which moves whole rows unless it is a
    `Rounding` or `OfColumns`. Both also work on meta tensors, which serve to derive shapes."""

    def to_megatron(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...


@dataclass(frozen=True)
class Same:
    """Leaves tensors unchanged, since they are equal in both layouts."""

    def to_megatron(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    to_hf = to_megatron


SAME: Final = Same()


class Rounding:
    """Base class of one-to-one transforms that may round, so that a round trip does not restore
    every value."""


class OfColumns:
    """Base class of transforms that move columns of a matrix, and not whole rows."""


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
    """Fuses q, k and v into Megatron's one tensor, whose rows are [queries of the group, k, v] for
    each group in turn.

    Example with 4 heads in 2 groups: blocks [q0 q1 k0 v0 q2 q3 k1 v1], each of `head_dim` rows.
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
class Join:
    """Hugging Face tensors of equal shape that Megatron joins along the rows, such as gate and up
    projections."""

    parts: int = 2

    def to_megatron(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(tensors))]

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (joined,) = tensors
        return list(joined.chunk(self.parts))


@dataclass(frozen=True)
class Stack:
    """One Hugging Face tensor whose slices of dimension 0 are separate tensors in Megatron, such as
    packed experts."""

    count: int

    def to_megatron(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (stacked,) = tensors
        return list(stacked.unbind())

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        assert len(tensors) == self.count
        return [torch.stack(list(tensors))]


@dataclass(frozen=True)
class Entry:
    """One line of a table: Hugging Face names, Megatron names, and the conversion between the
    tensors."""

    hf: tuple[str, ...]
    megatron: tuple[str, ...]
    transform: Transform = SAME

    def under(self, hf: str, megatron: str) -> "Entry":
        """The same entry with a prefix on the names of each side."""
        return Entry(
            tuple(hf + n for n in self.hf),
            tuple(megatron + n for n in self.megatron),
            self.transform,
        )


def one(hf: str, megatron: str, transform: Transform = SAME) -> Entry:
    """An entry with one tensor on each side."""
    return Entry((hf,), (megatron,), transform)


@dataclass(frozen=True)
class Ways:
    """Tensors that files store in one of several ways, each a list of entries for the same tensors
    of Megatron.

    Example: the experts of a layer are stored one by one or packed into one tensor. Files of every
    way are read. An export uses the way of the original file, or the first way if there is no
    original.
    """

    key: str
    """Identifies these tensors in a record of the original, with the prefix of their layer before
    it."""
    ways: Mapping[str, tuple[Entry, ...]]
    """Name of a way -> its entries."""

    def under(self, hf: str, megatron: str) -> "Ways":
        """The same ways with a prefix on the names of each side."""
        ways = {
            way: tuple(entry.under(hf, megatron) for entry in entries)
            for way, entries in self.ways.items()
        }
        return Ways(hf + self.key, ways)

    def chosen(self, stored: "Stored") -> tuple[Entry, ...]:
        """The entries of the way that the original used, or of the first way if none is
        recorded."""
        return self.ways[stored.ways.get(self.key, next(iter(self.ways)))]

    def found(self, names: Container[str]) -> str:
        """The way whose tensor names a file has most of; in a tie, the first."""
        return max(
            self.ways,
            key=lambda way: sum(name in names for entry in self.ways[way] for name in entry.hf),
        )


@dataclass(frozen=True)
class Stored:
    """The storage choices of an original Hugging Face file, and its values that Megatron's layout
    rounds. The record is kept so that exports have the original's names and values."""

    ways: Mapping[str, str] = field(default_factory=dict)
    """Key of `Ways` -> name of the way, if it is not the first."""
    lacking: tuple[str, ...] = ()
    """Names of copies (see `Family.copies`) that the file did not contain."""
    rounded: Mapping[str, Tensor] = field(default_factory=dict)
    """Name of a tensor whose values or dtype cannot be restored exactly from its Megatron form ->
    the original tensor, flattened."""
    scale_shapes: Mapping[str, str] = field(default_factory=dict)
    """Unusual shapes of parts of quantised matrices, see `mtpkit.checkpoint.parts`."""


def expert_ways(count: int, hf: str, megatron: str, one_by_one: Sequence[Entry]) -> Ways:
    """The ways to store a matrix of all experts of a layer: one by one, or packed as [experts,
    rows, columns].

    Args:
        hf: name of the packed tensor.
        megatron: name of the stacked tensor, without the index of an expert.
        one_by_one: entries of the same tensors in files that do not pack them.
    """
    packed = Entry((hf,), tuple(f"{megatron}[{expert}]" for expert in range(count)), Stack(count))
    return Ways(hf, {"one by one": tuple(one_by_one), "packed": (packed,)})


class Table:
    """All entries of one model; every tensor of a checkpoint belongs to exactly one entry.

    Args:
        entries: in the order in which tensors are written; entries of tensors that the model lacks
            are ignored.
        shapes: Megatron's names of all tensors of the model, with their shapes.
        copies: Hugging Face name of a copy -> name of the tensor that it duplicates.

    Raises:
        MtpkitError: the family has no name for a tensor of the model.
    """

    def __init__(
        self,
        entries: Iterable[Entry | Ways],
        shapes: Mapping[str, Shape],
        copies: Mapping[str, str] | None = None,
    ) -> None:
        self._shapes = shapes
        self._ways = [
            entry if isinstance(entry, Ways) else Ways("", {"": (entry,)}) for entry in entries
        ]
        self.copies = copies or {}
        self._check()

    def _check(self) -> None:
        # A tensor without a name would be left out of a file, in one of the ways to store it.
        for choice in dict.fromkeys(way for ways in self._ways for way in ways.ways):
            stored = Stored({ways.key: choice for ways in self._ways if choice in ways.ways})
            nameless = self._shapes.keys() - {
                name for entry in self._entries(stored) for name in entry.megatron
            }
            if nameless:
                raise MtpkitError(f"no Hugging Face name for {listed(sorted(nameless))}")

    def _entries(self, stored: Stored) -> list[Entry]:
        entries = (entry for ways in self._ways for entry in ways.chosen(stored))
        return [entry for entry in entries if all(name in self._shapes for name in entry.megatron)]

    def _copies(self, stored: Stored) -> dict[str, str]:
        return {copy: name for copy, name in self.copies.items() if copy not in stored.lacking}

    def stored_in(self, names: Container[str]) -> Stored:
        """The storage choices of a file with these tensor names."""
        found = {ways.key: ways.found(names) for ways in self._ways if len(ways.ways) > 1}
        firsts = {ways.key: next(iter(ways.ways)) for ways in self._ways}
        others = {key: way for key, way in found.items() if way != firsts[key]}
        return Stored(others, tuple(copy for copy in self.copies if copy not in names))

    def rounded_in(self, source: Tensors) -> dict[str, Tensor]:
        """The tensors of a file that cannot be restored exactly from their Megatron form,
        flattened."""
        entries = [
            entry for entry in self._entries(Stored()) if isinstance(entry.transform, Rounding)
        ]
        tensors = {entry.hf[0]: (source.read(entry.hf[0]), entry.transform) for entry in entries}
        return {
            name: tensor.flatten()
            for name, (tensor, transform) in tensors.items()
            if not bits_equal(tensor, transform.to_hf(transform.to_megatron([tensor]))[0])
        }

    def check(self, stored: Stored, where: object) -> None:
        """Check that this table can apply a record; entries of the record for other tensors are
        ignored.

        Raises:
            UserError: the record has unknown ways or tensors of another size; the message names
                them.
        """
        odd = [
            f"{ways.key} is stored {shown(way)}, not {listed(map(repr, ways.ways))}"
            for ways in self._ways
            if (way := stored.ways.get(ways.key)) is not None and way not in ways.ways
        ]
        for entry in self._entries(Stored()) if stored.rounded else ():
            name = entry.hf[0]
            size = math.prod(self._shapes[entry.megatron[0]])
            if name in stored.rounded and len(stored.rounded[name]) != size:
                odd.append(f"{name} has {len(stored.rounded[name])} values, not {size}")
        if odd:
            raise UserError(
                f"{where}: {listed(odd, width=240, separator='; ')}; import the checkpoint again"
            )

    def hf_shapes(self, stored: Stored | None = None) -> dict[str, Shape]:
        """Hugging Face names and shapes of all tensors of a file."""
        stored = stored or Stored()
        shapes = {
            name: shape for entry in self._entries(stored) for name, shape in self._hf_shapes(entry)
        }
        return shapes | {copy: shapes[name] for copy, name in self._copies(stored).items()}

    @property
    def attentions(self) -> dict[str, str]:
        """Hugging Face name of each layer's attention -> Megatron's."""
        names = (
            (entry.hf[0], entry.megatron[0].partition(f".{_ATTENTION}.linear_"))
            for entry in self._entries(Stored())
        )
        # The norm before an attention may be a tensor of its linear, but has another place there.
        return {
            theirs.rsplit(".", 2)[0]: f"{layer}.{_ATTENTION}"
            for theirs, (layer, found, rest) in names
            if found and rest.endswith(".weight")
        }

    def mtp_names(self, stored: Stored | None = None) -> set[str]:
        """Hugging Face names of the heads' tensors, including copies of the base's tensors."""
        stored = stored or Stored()
        heads = (entry.hf for entry in self._entries(stored) if _is_head(entry.megatron[0]))
        return {name for names in heads for name in names} | self._copies(stored).keys()

    def _hf_shapes(self, entry: Entry) -> Iterator[tuple[str, Shape]]:
        shapes = [self._shapes[name] for name in entry.megatron]
        if entry.transform is not SAME:  # avoids a meta tensor for each of the many experts
            blanks = [torch.empty(shape, device="meta") for shape in shapes]
            shapes = [tuple(blank.shape) for blank in entry.transform.to_hf(blanks)]
        return zip(entry.hf, shapes, strict=True)

    def to_megatron(
        self, source: TensorSource, where: Path, expand_scales: bool = False
    ) -> "MappedTensors":
        """View a Hugging Face checkpoint under Megatron names.

        Quantised matrices stay so: their parts are moved as their rows are. Matrices of one format
        that Megatron joins get the scales of each, if need be a scale per row. Those of which that
        is not possible are named when `Weights.matrices` is asked for, and can be read widened.

        Args:
            expand_scales: give each row the scales of its block where rows of one block come apart.

        Raises:
            UserError: the checkpoint's tensors are not exactly the table's; the message lists all
                differences.
        """
        stored = self.stored_in(source.tensors)
        require_same_names(where, source.tensors, self.hf_shapes(stored))
        steps = [_Step(e.hf, e.megatron, e.transform.to_megatron) for e in self._entries(stored)]
        return MappedTensors(source, steps, where, expand_scales)

    def to_hf(
        self, source: TensorSource, where: Path, stored: Stored | None = None
    ) -> "MappedTensors":
        """View a Megatron checkpoint under Hugging Face names. Raises as `to_megatron` does.

        Args:
            stored: how the original stored its tensors.
        """
        stored = stored or Stored()
        require_same_names(where, source.tensors, self._shapes)
        entries = self._entries(stored)
        steps = [_Step(entry.megatron, entry.hf, _to_hf(entry, stored)) for entry in entries]
        whole = {entry.hf: entry for entry in entries if len(entry.hf) == 1}
        for copy, name in self._copies(stored).items():
            entry = whole[(name,)]
            steps.append(_Step(entry.megatron, (copy,), entry.transform.to_hf))
        return MappedTensors(source, steps, where)

    def heads_to_hf(
        self, heads: TensorSource, base: TensorSource, where: Path, stored: Stored
    ) -> "MappedTensors":
        """View heads, given under Megatron's names, and their copies of the base's tensors under
        Hugging Face names.

        Args:
            base: source of the copied tensors, under Hugging Face names.

        Raises:
            UserError: `heads` are not exactly the table's heads; the message lists all differences.
        """
        require_same_names(
            where, heads.tensors, {n: shape for n, shape in self._shapes.items() if _is_head(n)}
        )
        entries = [entry for entry in self._entries(stored) if _is_head(entry.megatron[0])]
        steps = [_Step(entry.megatron, entry.hf, entry.transform.to_hf) for entry in entries]
        steps += [
            _Step((name,), (copy,), SAME.to_hf) for copy, name in self._copies(stored).items()
        ]
        source = SeveralWeights(heads, base) if isinstance(heads, Weights) else None
        return MappedTensors(source or SeveralSources(heads, base), steps, where)


_ATTENTION = "self_attention"
"""Megatron's name of the attention in a layer."""


def _is_head(name: str) -> bool:
    return name.startswith("mtp.")


def _to_hf(entry: Entry, stored: Stored) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    original = stored.rounded.get(entry.hf[0])
    if original is None or not isinstance(entry.transform, Rounding):
        return entry.transform.to_hf
    return _Unrounded(entry.transform, original).to_hf


@dataclass(frozen=True)
class _Unrounded:
    """A transform that restores the original tensor, as long as Megatron's tensor is still the one
    from the import, and otherwise the original's dtype."""

    transform: Transform
    original: Tensor
    """The original tensor, flattened, in its own dtype."""

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (tensor,) = tensors
        if not tensor.is_meta:
            original = self.original.to(tensor.device).view(tensor.shape)
            (imported,) = self.transform.to_megatron([original])
            if torch.equal(imported.to(tensor.dtype), tensor):
                return [original]
        return [changed.to(self.original.dtype) for changed in self.transform.to_hf(tensors)]


@dataclass(frozen=True)
class _Step:
    """An entry applied in one direction."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    convert: Callable[[Sequence[Tensor]], list[Tensor]]

    @property
    def _transform(self) -> Transform:
        return self.convert.__self__  # type: ignore[attr-defined]

    def matrices(self, names: Sequence[str]) -> list[str]:
        """Names of the matrices in some inputs or outputs: several where one tensor is a stack."""
        if isinstance(self._transform, Stack) and not names[0].endswith("]"):
            return [f"{names[0]}[{at}]" for at in range(self._transform.count)]
        return [*names]

    def move(self, matrices: Sequence[Quantized], expand: bool) -> list[Quantized]:
        """Convert quantised matrices of one format.

        Raises:
            CutGroup: a group of rows or columns would come apart.
        """
        if isinstance(self._transform, OfColumns):
            raise CutGroup("columns", "the transform", matrices[0].shape[1])
        if self._transform is SAME or isinstance(self._transform, Stack):
            return [*matrices]
        # Two matrices of an entry have few sizes in a model, and many layers and experts.
        places = _moved_rows(self.convert, tuple(matrix.shape[0] for matrix in matrices))
        try:
            return _placed(matrices, places)
        except CutGroup:
            if not expand:
                raise
            return _placed([matrix.expanded() for matrix in matrices], places)


@cache
def _moved_rows(
    convert: Callable[[Sequence[Tensor]], list[Tensor]], sizes: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """Row numbers [n] of each output of a transform, in its inputs with `sizes` rows below each
    other."""
    rows = torch.arange(sum(sizes))[:, None].split(sizes)
    return tuple(numbers[:, 0] for numbers in convert(rows))


def _placed(matrices: Sequence[Quantized], places: Sequence[Tensor]) -> list[Quantized]:
    whole = join(matrices)
    if len(places) == 1 and torch.equal(places[0], torch.arange(whole.shape[0])):
        return [whole]
    return [whole.take_rows(rows) for rows in places]


_EXPANDED = f"give each row its own scale by --expand-scales, or {WIDENED}"


class MappedTensors(Weights):
    """A source seen through a table. It caches the tensors of one entry, so reading in order reads
    each input once.

    Several threads may read from it; each caches an entry. It can be pickled to read in another
    process.

    Args:
        where: the checkpoint, for messages.
        expand_scales: see `Table.to_megatron`.
    """

    def __init__(
        self,
        source: TensorSource,
        steps: Sequence[_Step],
        where: object,
        expand_scales: bool = False,
    ) -> None:
        self._source = source
        self._where = where
        self._expand = expand_scales
        self._steps = {name: step for step in steps for name in step.outputs}
        self._held = _Held()
        self.tensors: dict[str, TensorInfo] = dict(
            info for step in steps for info in self._outputs(step)
        )

    def _outputs(self, step: _Step) -> Iterator[tuple[str, TensorInfo]]:
        inputs = [self._source.tensors[name] for name in step.inputs]
        dtypes = {info.dtype for info in inputs}
        if len(dtypes) > 1:
            raise UserError(
                f"{listed(step.inputs)}: must be of one dtype to be joined, found {dtypes}"
            )
        blanks = [torch.empty(info.shape, dtype=info.dtype, device="meta") for info in inputs]
        for name, blank in zip(step.outputs, step.convert(blanks), strict=True):
            yield name, TensorInfo(tuple(blank.shape), blank.dtype)

    @cached_property
    def matrices(self) -> Mapping[str, Quantized]:
        if not isinstance(self._source, Weights):
            return {}
        found = self._source.matrices
        matrices: dict[str, Quantized] = {}
        problems: dict[str, list[str]] = {}
        moved: dict[object, list[Quantized]] = {}
        for step in dict.fromkeys(self._steps.values()):
            inputs = step.matrices(step.inputs)
            kept = [found[name] for name in inputs if name in found]
            if not kept:
                continue
            formats = {matrix.format for matrix in kept}
            if len(kept) < len(inputs) or len(formats) > 1:
                told = " and ".join(_formats_of(inputs, found))
                problems.setdefault(
                    f"are stored as {told}, but Megatron's layout joins them: {WIDENED}", []
                ).append(listed(inputs))
                continue
            # Sources give equal matrices as one object.
            key = step.convert, tuple(map(id, kept))
            try:
                if key not in moved:
                    moved[key] = step.move(kept, self._expand)
            except CutGroup as cut:
                advice = WIDENED if "columns" in str(cut) else _EXPANDED
                problems.setdefault(f"{cut} in Megatron's layout: {advice}", []).append(
                    listed(inputs)
                )
                continue
            matrices |= zip(step.matrices(step.outputs), moved[key], strict=True)
        if problems:
            clauses = [f"{listed(names)}: {text}" for text, names in problems.items()]
            raise UserError(f"{self._where}: {listed(clauses, width=400, separator='; ')}")
        return matrices

    def quantized(self, name: str) -> Quantized:
        step = self._steps[name if name in self._steps else name.rpartition("[")[0]]
        if self._held.step is not step or name not in self._held.matrices:
            assert isinstance(self._source, Weights)
            self._held.drop()
            outputs = step.matrices(step.outputs)
            if isinstance(step._transform, Stack) or step._transform is SAME:
                # One matrix of a stack needs no other.
                place = outputs.index(name)
                return self._source.quantized(step.matrices(step.inputs)[place])
            inputs = [self._source.quantized(each) for each in step.matrices(step.inputs)]
            moved = step.move(inputs, self._expand)
            self._held.matrices = dict(zip(outputs, moved, strict=True))
            self._held.step = step
        return self._held.matrices[name]

    def read(self, name: str) -> Tensor:
        step = self._steps[name]
        if len(step.outputs) == 1:
            (output,) = step.convert([self._source.read(n) for n in step.inputs])
            return output
        if self._held.step is not step or name not in self._held.tensors:
            self._held.drop()
            inputs = [self._source.read(n) for n in step.inputs]
            self._held.tensors = dict(zip(step.outputs, step.convert(inputs), strict=True))
            self._held.step = step
        return self._held.tensors[name]

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_held"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _held=_Held())

    def require_finite(self) -> None:
        self._source.require_finite()


def _formats_of(names: Sequence[str], found: Mapping[str, Quantized]) -> list[str]:
    """The formats of tensors, in words, each once."""
    kinds: dict[str, Format | None] = {}
    for name in names:
        kind = found[name].format if name in found else None
        kinds[kind.name if kind else "plain numbers"] = kind
    return [*kinds] if len(kinds) > 1 else [f"{next(iter(kinds))} of several kinds"]


class _Held(threading.local):
    """The cached outputs of one entry, separate for each thread."""

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Release the outputs."""
        self.step: _Step | None = None
        self.tensors: dict[str, Tensor] = {}
        self.matrices: dict[str, Quantized] = {}
