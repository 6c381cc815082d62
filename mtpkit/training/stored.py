"""The formats in which the files of a base hold its matrices, known before a model is built."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mtpkit.checkpoint import ModelDirectory
from mtpkit.checkpoint.run import stored_base
from mtpkit.errors import listed
from mtpkit.model.formats import Quantized


@dataclass(frozen=True)
class StoredFormats:
    """Quantised matrices of a model's files; by default none."""

    base: tuple[str, ...] = ()
    """Names of the formats of the base's matrices."""
    heads: tuple[str, ...] = ()
    """Names of the formats of the heads' matrices."""
    rounds_inputs: bool = False
    """Whether the inputs of some of the base's products are quantised."""
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Megatron's name of each matrix of the base -> (its elements, its bytes)."""

    @property
    def of_base(self) -> str:
        """The base's formats in words."""
        return listed(self.base)

    @property
    def of_heads(self) -> str:
        """The heads' formats in words."""
        return listed(self.heads)


def stored_formats(directory: ModelDirectory) -> StoredFormats:
    """Read which matrices of a directory are quantised.

    Raises:
        UserError: files are missing or damaged; or quantised matrices cannot be kept in Megatron's
            layout, and so not in the files of a run.
    """
    if not directory.is_quantized:
        return StoredFormats()
    stored_base(directory)
    matrices = directory.weights(expand_scales=True).matrices
    heads = {name: each for name, each in matrices.items() if name.startswith("mtp.")}
    base = {name: each for name, each in matrices.items() if name not in heads}
    return StoredFormats(
        _names(base),
        _names(heads),
        any(each.format.inputs.rule != "none" for each in base.values()),
        {name: (each.shape[0] * each.shape[1], each.nbytes) for name, each in base.items()},
    )


def _names(matrices: Mapping[str, Quantized]) -> tuple[str, ...]:
    return tuple(sorted({each.format.name for each in matrices.values()}))
