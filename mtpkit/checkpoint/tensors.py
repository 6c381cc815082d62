"""Named tensors that are read one at a time, from whatever file or mapping."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mtpkit.checkpoint.upload import Uploader
from mtpkit.errors import UserError, listed

Shape = tuple[int, ...]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of weights: every tensor of a model has one of them."""

_CPU = torch.device("cpu")
_MOST_CHARACTERS = 255
"""Length of the longest file name that any file system allows."""
_LARGEST = torch.finfo(torch.bfloat16).max
"""Largest finite value in bf16. Models run in bf16, where a larger weight is infinite."""


class TensorInfo(NamedTuple):
    """Shape and dtype of a tensor, known before it is read."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Tensors(Protocol):
    """Named tensors, whose values are not checked."""

    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> Tensor:
        """The whole tensor in its stored dtype, on the CPU unless the source was opened for another
        device.

        Raises:
            UserError: the file that holds it is damaged or missing.
        """
        ...


class TensorSource(Tensors, Protocol):
    """A checkpoint, or a view of one under other names, that checks the values of tensors as they
    are read."""

    def require_finite(self) -> None:
        """Check the values of all tensors that were read so far.

        Raises:
            UserError: some hold NaN or infinity, see `is_finite`; the message names them.
        """
        ...


class CheckedTensors:
    """Tensors whose values are checked as they are read; on a GPU, reading does not wait for the
    result.

    Several threads may read from it on the CPU, but only one on a GPU.

    Args:
        where: file, directory or description of the weights, for the message.
        device: device that tensors are read to and checked on.
    """

    def __init__(self, source: Tensors, where: Path | str, device: torch.device = _CPU) -> None:
        self._source = source
        self._where = where
        self.tensors = source.tensors
        self._upload = Uploader(device) if device.type == "cuda" else None
        self._finite: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_finite": {}}

    def read(self, name: str) -> Tensor:
        tensor = self._source.read(name)
        if self._upload is not None:
            tensor = self._upload(tensor)
        # The flag stays on the device: waiting for it here would stop the upload of the next
        # tensor.
        self._finite[name] = _is_finite(tensor)
        return tensor

    def require_finite(self) -> None:
        names = [*self._finite]
        flags = [*self._finite.values()]
        finite = torch.stack(flags).tolist() if flags else []
        refuse_not_finite(
            self._where, [name for name, whole in zip(names, finite, strict=True) if not whole]
        )


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite and within the range of bf16.

    Takes one pass without a copy, and waits for the tensor's device.
    """
    return bool(_is_finite(tensor))


def _is_finite(tensor: Tensor) -> Tensor:
    """[] bool on the tensor's device, see `is_finite`."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    if tensor.dtype not in FLOATS:  # not a weight, but bitwise comparisons read such tensors, too
        tensor = tensor.to(torch.float64)
    # aminmax passes NaN on, and infinity is beyond the bound, so one pass sees both.
    low, high = (bound.double() for bound in tensor.aminmax())
    return (low >= -_LARGEST) & (high <= _LARGEST)


ANOTHER_COPY = "download the files again, or take those of an earlier step"
"""Advice if weights that were read are not finite."""


def refuse_not_finite(where: Path | str, names: Sequence[str], advice: str = ANOTHER_COPY) -> None:
    """Refuse the named tensors, for which `is_finite` is false.

    Raises:
        UserError: `names` is not empty; the message lists them.
    """
    if names:
        raise UserError(
            f"{where}: NaN or infinity (beyond {_LARGEST:.1e}) in {listed(names)}; {advice}"
        )


class SeveralSources:
    """Several sources as one; no name may be in two of them."""

    def __init__(self, *sources: TensorSource) -> None:
        self._sources = sources
        self.tensors = {name: info for source in sources for name, info in source.tensors.items()}
        self._owners = {name: source for source in sources for name in source.tensors}
        assert len(self.tensors) == sum(len(source.tensors) for source in sources)

    def read(self, name: str) -> Tensor:
        return self._owners[name].read(name)

    def require_finite(self) -> None:
        for source in self._sources:
            source.require_finite()


def is_file_name(value: object) -> bool:
    """Whether a value is a file name without a directory; an index of a checkpoint may name only
    such files."""
    if not isinstance(value, str) or value in ("", ".", "..") or {"/", "\\", "\0"} & set(value):
        return False
    return len(value) <= _MOST_CHARACTERS


def require_same_names(
    where: Path | str,
    found: Mapping[str, TensorInfo],
    expected: Mapping[str, Shape],
    extra_ok: bool = False,
) -> None:
    """Check that a checkpoint holds exactly the tensors that its config calls for, as
    floating-point numbers.

    Raises:
        UserError: lists the missing, unexpected, differently shaped and differently stored tensors
            at once.
    """
    missing = sorted(expected.keys() - found.keys())
    unexpected = [] if extra_ok else sorted(found.keys() - expected.keys())
    both = sorted(expected.keys() & found.keys())
    misshapen = [
        f"{name} {list(found[name].shape)} instead of {list(expected[name])}"
        for name in both
        if tuple(found[name].shape) != tuple(expected[name])
    ]
    stored = [
        f"{name} {found[name].dtype}".replace("torch.", "")
        for name in both
        if found[name].dtype not in FLOATS
    ]
    kinds = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": misshapen,
        "not stored as fp64, fp32, fp16 or bf16": stored,
    }
    # Each kind of problem gets an equal part of the line, so that none hides the others.
    width = 240 // (sum(map(bool, kinds.values())) or 1)
    problems = [
        f"{len(names)} {kind}: {listed(names, width=width)}"
        for kind, names in kinds.items()
        if names
    ]
    if problems:
        raise UserError(
            f"{where}: tensors do not fit the model config; "
            + listed(problems, width=400, separator="; ")
        )


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bytes (NaN equals the same NaN, 0.0
    differs from -0.0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )
