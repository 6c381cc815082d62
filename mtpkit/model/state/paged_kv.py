"""Paged keys and values."""

from dataclasses import dataclass

from torch import Tensor

from mtpkit.model.state.base import PagedState, Part, StateSizes, StateSpec


@dataclass(frozen=True)
class PagedKV(PagedState):
    """Keys and values of one layer, each [num_blocks, block_size, kv_heads, head_dim]."""

    @property
    def key(self) -> Tensor:
        """Keys."""
        return self.tensors["key"]

    @property
    def value(self) -> Tensor:
        """Values."""
        return self.tensors["value"]


@dataclass(frozen=True)
class PagedKVSpec(StateSpec):
    """Sizes of the keys and values that one layer keeps for a token."""

    unit = "block"
    kind = PagedKV
    num_kv_heads: int
    head_dim: int

    def parts(self, sizes: StateSizes) -> dict[str, Part]:
        """See `StateSpec.parts`."""
        page = Part((sizes.block_size, self.num_kv_heads, self.head_dim), sizes.kv_dtype)
        return {"key": page, "value": page}
