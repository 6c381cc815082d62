"""The caches of all layers: paged keys and values, and recurrent state with either rollback, accounted in bytes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mtpkit.engine.params import EngineConfig
from mtpkit.kernels.ssm_update import ring_length
from mtpkit.model.inputs import (
    AttentionCache,
    AttentionCacheSpec,
    CacheSpec,
    LayerCache,
    MambaCacheSpec,
    ReplayCache,
    SnapshotCache,
)

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
RINGS = ("x", "B", "dt")
"""Names of the replay rings."""


@dataclass(frozen=True)
class CacheLayout:
    """Shapes of the caches of every layer; one unit is a block of keys and values or a slot of recurrent state."""

    specs: Mapping[str, CacheSpec]
    config: EngineConfig
    dtype: torch.dtype
    state_dtype: torch.dtype = torch.float32

    @property
    def ring_length(self) -> int:
        """Places of the replay rings."""
        return ring_length(self.config.decode_width)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self._bytes(AttentionCacheSpec)

    @property
    def slot_bytes(self) -> int:
        """Bytes of recurrent state of one request over all layers."""
        return self._bytes(MambaCacheSpec)

    @property
    def ring_bytes(self) -> int:
        """What the replay rings take of `slot_bytes`."""
        return self._bytes(MambaCacheSpec, RINGS)

    def _bytes(self, kind: type, names: Sequence[str] | None = None) -> int:
        """Of one unit over all layers of a kind, of all tensors or of some."""
        units = [self._unit(spec) for spec in self.specs.values() if isinstance(spec, kind)]
        shapes = [entry for unit in units for name, entry in unit.items() if names is None or name in names]
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)

    def _unit(self, spec: CacheSpec) -> Shapes:
        """Shape and type of one unit of each tensor of a layer's cache."""
        if isinstance(spec, AttentionCacheSpec):
            page = (self.config.block_size, spec.num_kv_heads, spec.head_dim)
            return {"key": (page, self.dtype), "value": (page, self.dtype)}
        window = (spec.conv_kernel - 1 + self.config.num_speculative_tokens, spec.conv_dim)
        state = (spec.num_heads, spec.head_dim, spec.state_dim)
        if self.config.state_rollback == "snapshot":
            return {"conv": (window, self.dtype), "state": ((self.config.decode_width, *state), self.state_dtype)}
        ring = self.ring_length
        return {
            "conv": (window, self.dtype),
            "state": (state, self.state_dtype),
            "x": ((ring, spec.num_heads, spec.head_dim), self.dtype),
            "B": ((ring, spec.num_groups, spec.state_dim), self.dtype),
            "dt": ((ring, spec.num_heads), torch.float32),
        }

    def allocate(self, num_blocks: int, num_slots: int, device: torch.device) -> dict[str, LayerCache]:
        """The cache of each layer, uninitialised: a layer reads only what was written for the request."""
        caches: dict[str, LayerCache] = {}
        for name, spec in self.specs.items():
            units = num_blocks if isinstance(spec, AttentionCacheSpec) else num_slots
            tensors = {
                field: torch.empty(units, *shape, dtype=dtype, device=device)
                for field, (shape, dtype) in self._unit(spec).items()
            }
            caches[name] = self._cache_type(spec)(**tensors)
        return caches

    def _cache_type(self, spec: CacheSpec) -> type[LayerCache]:
        if isinstance(spec, AttentionCacheSpec):
            return AttentionCache
        return SnapshotCache if self.config.state_rollback == "snapshot" else ReplayCache
