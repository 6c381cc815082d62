"""The tensors of two checkpoints under names that both have, as they are stored."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from functools import cache

import torch
from torch import Tensor

from mtpkit.checkpoint.directory import HFDirectory, ModelDirectory
from mtpkit.checkpoint.ignored import module_of
from mtpkit.checkpoint.layouts.huggingface import CarriedTensors
from mtpkit.checkpoint.matrices import DERIVED, StoredMatrices, Weights, part_name
from mtpkit.checkpoint.recipe import Recipe
from mtpkit.checkpoint.tensors import Tensors
from mtpkit.errors import UserError, listed
from mtpkit.model.formats import Format


class Compared(ABC):
    """The tensors of a checkpoint, in which all parts of a quantised matrix have one name."""

    formats: dict[str, Format | None]
    """Name of each tensor -> format of the matrix; None: it is not quantised."""
    heads: Set[str]
    """Names that belong to heads."""
    apart: Set[str]
    """Names of the tensors outside the text model, which may hold any values."""

    @abstractmethod
    def stored(self, name: str) -> dict[str, Tensor]:
        """What is stored of a tensor: itself, or all parts of a matrix by their own names."""

    @abstractmethod
    def read(self, name: str, widen: torch.dtype) -> Tensor:
        """A tensor; a quantised matrix is widened to a dtype."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor that is not quantised."""


class _AsMegatron(Compared):
    """A directory of either layout under Megatron's names."""

    def __init__(self, directory: ModelDirectory) -> None:
        self._weights = directory.weights(expand_scales=True)
        # Opened once per dtype: it holds the tensors of the entry that was read last.
        self._widened = cache(lambda dtype: directory.weights(widen=dtype, expand_scales=True))
        others: list[Tensors] = [directory.kv_scales]
        self.apart = frozenset()
        if directory.carried is not None:
            others.append(directory.carried)
            self.apart = directory.carried.tensors.keys()
        self._others = {name: source for source in others for name in source.tensors}
        found = _formats(self._weights)
        names = [*self._weights.tensors, *self._others]
        self.formats = {name: found.get(name) for name in names}
        self.heads = {name for name in names if name.startswith("mtp.") and name not in self.apart}

    def stored(self, name: str) -> dict[str, Tensor]:
        if self.formats[name] is None:
            return {name: self.read(name, torch.bfloat16)}
        parts = self._weights.quantized(name).parts
        return {part_name(name, part): tensor for part, tensor in parts.items()}

    def read(self, name: str, widen: torch.dtype) -> Tensor:
        return self._others.get(name, self._widened(widen)).read(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._others.get(name, self._weights).tensors[name].dtype


def _formats(weights: Weights) -> Mapping[str, Format]:
    """The formats of matrices; none if some cannot be kept in Megatron's layout, where a checkpoint
    can hold them only widened."""
    try:
        return weights.formats
    except UserError:
        return {}


class _AsPublished(Compared):
    """A Hugging Face directory under its own names."""

    def __init__(self, directory: HFDirectory) -> None:
        directory.weights()  # refuses files that do not fit their config
        self._reader = directory.reader
        self._matrices = directory.matrices
        carried = self._reader.carried
        self.apart = carried.tensors.keys()
        scales = CarriedTensors(self._reader, self._reader.kv_scales)
        weights = StoredMatrices(self._reader, self._matrices, torch.bfloat16)
        names = [*weights.tensors, *scales.tensors, *carried.tensors]
        self.formats = {
            name: self._matrices[name].format if name in self._matrices else None for name in names
        }
        self.heads = directory.table.mtp_names(directory.stored)

    def stored(self, name: str) -> dict[str, Tensor]:
        found = self._matrices.get(name)
        if found is None:
            return {name: self._reader.read(name)}
        derived = (part_name(name, part) for part in DERIVED.get(found.format.name, ()))
        parts = (*found.parts.values(), *(part for part in derived if part in self._reader.tensors))
        return {part: self._reader.read(part) for part in parts}

    def read(self, name: str, widen: torch.dtype) -> Tensor:
        if name not in self._matrices:
            return self._reader.read(name)
        return StoredMatrices(self._reader, self._matrices, widen).read(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.info(name).dtype


def compared(directories: Sequence[ModelDirectory]) -> list[Compared]:
    """The tensors of directories under common names: Hugging Face's if all have that layout and
    store their tensors alike, else Megatron's.

    Raises:
        UserError: a directory is damaged.
    """
    return _as_published(directories) or [_AsMegatron(directory) for directory in directories]


def _as_published(directories: Sequence[ModelDirectory]) -> list[Compared] | None:
    """The directories under their own names; None if one has another layout, or if they have other
    families, or store tensors in different ways.

    Heads' copies of the base's tensors that not all directories have are left out, as in Megatron's
    layout.
    """
    in_hf = [directory for directory in directories if isinstance(directory, HFDirectory)]
    if len(in_hf) < len(directories):
        return None
    views = [_AsPublished(directory) for directory in in_hf]
    # Packed and single experts have different names on disk, and the same ones in Megatron's
    # layout.
    ways = [(directory.family.model_type, directory.stored.ways) for directory in in_hf]
    if any(way != ways[0] for way in ways):
        return None
    # A copy that one side leaves out says nothing: it is equal to the base's own tensor.
    copies = [
        {copy for copy in directory.table.copies if copy in view.formats}
        for directory, view in zip(in_hf, views, strict=True)
    ]
    counts = Counter(name for names in copies for name in names)
    for name in (name for name, count in counts.items() if count < len(directories)):
        for view in views:
            view.formats.pop(name, None)
    return [*views]


def differing_settings(first: ModelDirectory, second: ModelDirectory) -> list[str]:
    """Clauses about what two directories say differently of their quantisation, beside the formats
    of matrices: modules of the base that only one lists as not quantised, keys and values.

    Lists are compared if a directory has the Hugging Face layout, whose names they have. They are
    not compared for heads, which an export or `stitch` may list anew. A checkpoint without
    quantised matrices says nothing: it may be another one, widened.
    """
    found = []
    recipes = [_told(directory) for directory in (first, second)]
    one, other = recipes
    kv_caches = [recipe.kv_cache if recipe else "" for recipe in recipes]
    # Settings about keys and values alone stay where matrices are plain.
    alike = all(recipes) or all(recipe is None or recipe.only_kv for recipe in recipes)
    if alike and len({*kv_caches}) > 1:
        told = " and ".join(kind or "nothing" for kind in kv_caches)
        found.append(f"of the type of keys and values they say {told}")
    if one is None or other is None or _reads_dtypes(one) or _reads_dtypes(other):
        return found
    named = next((each for each in (first, second) if isinstance(each, HFDirectory)), None)
    modules = [] if named is None else _base_modules(named)
    odd = [module for module in modules if one.ignores(module) != other.ignores(module)]
    if odd:
        found.append(f"only one lists as not quantised {listed(odd)}")
    return found


def _told(directory: ModelDirectory) -> Recipe | None:
    """What settings say of a directory's quantisation; None also if its matrices are plain, as
    those of a run on a quantised base that was widened."""
    recipe = directory.recipe
    if recipe is None or recipe.only_kv:
        return recipe
    return recipe if directory.is_quantized else None


def _reads_dtypes(recipe: Recipe) -> bool:
    """Whether dtypes alone say what is quantised, which a list of all plain matrices repeats."""
    return recipe.name.startswith(("awq", "gptq")) and not recipe.ignored


def _base_modules(directory: HFDirectory) -> list[str]:
    """The base's modules with a matrix, by their names."""
    heads = directory.table.mtp_names(directory.stored)
    shapes = directory.table.hf_shapes(directory.stored)
    return sorted(
        module_of(name)
        for name, shape in shapes.items()
        if name not in heads and shape is not None and len(shape) > 1
    )
