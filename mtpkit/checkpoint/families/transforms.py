"""Changes between the tensors of the Hugging Face layout and Megatron's, each with its inverse."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor


class Transform(Protocol):
    """A change of layout and its inverse. Both also work on meta tensors, from which shapes are derived."""

    def to_megatron(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...


@dataclass(frozen=True)
class Same:
    """Equal on both sides."""

    def to_megatron(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)


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
