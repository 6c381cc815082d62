"""Named tensors that are read one at a time, whatever file or mapping they come from."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mtpkit.errors import UserError

Shape = tuple[int, ...]


class TensorInfo(NamedTuple):
    """What is known of a tensor before it is read."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorSource(Protocol):
    """A checkpoint, or a view of one under other names."""

    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> Tensor:
        """The whole tensor on the CPU, in its stored dtype.

        Raises:
            UserError: the file that holds it is damaged or missing.
        """
        ...


def require_same_names(
    where: str, found: Mapping[str, Shape], expected: Mapping[str, Shape], extra_ok: bool = False
) -> None:
    """Check that a checkpoint holds exactly the tensors that its config calls for.

    Raises:
        UserError: lists every missing, unexpected and differently shaped tensor at once.
    """
    missing = sorted(expected.keys() - found.keys())
    unexpected = [] if extra_ok else sorted(found.keys() - expected.keys())
    misshapen = sorted(
        f"{name} {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    )
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {', '.join(missing)}")
    if unexpected:
        problems.append(f"{len(unexpected)} unexpected: {', '.join(unexpected)}")
    if misshapen:
        problems.append(f"{len(misshapen)} of another shape: {', '.join(misshapen)}")
    if problems:
        raise UserError(f"{where}: tensors do not fit the model config; " + "; ".join(problems))


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bytes (NaN equals the same NaN, 0.0 differs from -0.0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
