"""Shapes and types of the caches, and what they take."""

import math

import pytest
import torch

from mtpkit.engine.params import EngineConfig
from mtpkit.engine.states import CacheLayout
from mtpkit.kernels.ssm_update import ring_length
from mtpkit.model.inputs import AttentionCacheSpec, MambaCacheSpec

BF16, FP32 = torch.bfloat16, torch.float32
SPECS = {
    "decoder.0": MambaCacheSpec(num_heads=4, head_dim=8, state_dim=16, num_groups=2, conv_dim=96, conv_kernel=4),
    "decoder.1": AttentionCacheSpec(num_kv_heads=2, head_dim=32),
}


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_caches_have_what_their_kernels_ask_for(k, rollback):
    """Weights in bf16, state in fp32: step sizes are never rounded to the weights' type."""
    config = EngineConfig(max_model_len=64, block_size=8, num_speculative_tokens=k, state_rollback=rollback)
    layout = CacheLayout(SPECS, config, BF16, FP32)
    caches = layout.allocate(7, 5, torch.device("cpu"))
    have = {name: {f: (tuple(t.shape), t.dtype) for f, t in vars(cache).items()} for name, cache in caches.items()}
    ring = ring_length(1 + k)
    state = {
        "replay": {
            "state": ((5, 4, 8, 16), FP32),
            "x": ((5, ring, 4, 8), BF16),
            "B": ((5, ring, 2, 16), BF16),
            "dt": ((5, ring, 4), FP32),
        },
        "snapshot": {"state": ((5, 1 + k, 4, 8, 16), FP32)},
    }[rollback]
    assert have == {
        "decoder.0": {"conv": ((5, 3 + k, 96), BF16), **state},
        "decoder.1": {"key": ((7, 8, 2, 32), BF16), "value": ((7, 8, 2, 32), BF16)},
    }
    held = {name: sum(t.nbytes for t in vars(cache).values()) for name, cache in caches.items()}
    assert (5 * layout.slot_bytes, 7 * layout.block_bytes) == (held["decoder.0"], held["decoder.1"])
    rings = sum(math.prod(state[name][0]) * state[name][1].itemsize for name in ("x", "B", "dt") if name in state)
    assert 5 * layout.ring_bytes == rings
