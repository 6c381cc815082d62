"""Paged keys and values. Rejected tokens are taken back by forgetting their positions, which later tokens overwrite."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from mtpkit.model.state.base import Part, State, StateSizes, StateSpec


@dataclass(frozen=True)
class PagedKV(State):
    """Keys and values of one layer, each [num_blocks, block_size, kv_heads, head_dim]."""

    unit = "block"

    @property
    def key(self) -> Tensor:
        """Keys."""
        return self.tensors["key"]

    @property
    def value(self) -> Tensor:
        """Values."""
        return self.tensors["value"]

    def fork(self, slots: Tensor) -> Self:
        """Itself: what a depth writes beyond the committed positions is overwritten before anything reads it."""
        return self


@dataclass(frozen=True)
class PagedKVSpec(StateSpec):
    """Sizes of the keys and values that one layer keeps for a token."""

    unit, kind = "block", PagedKV
    num_kv_heads: int
    head_dim: int

    def parts(self, sizes: StateSizes) -> dict[str, Part]:
        """See `StateSpec.parts`."""
        page = Part((sizes.block_size, self.num_kv_heads, self.head_dim))
        return {"key": page, "value": page}
