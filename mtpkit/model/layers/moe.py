"""Mixture of experts with latent projections that need no Transformer Engine."""

import copy
import functools
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer as MegatronMoELayer
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn


class DuplicatedLinear(nn.Linear):
    """A linear held whole by every tensor-parallel rank; returns (output, bias) as megatron-core's linears do."""

    def __init__(self, input_size: int, output_size: int, config: Any) -> None:
        super().__init__(
            input_size, output_size, bias=False, dtype=config.params_dtype, device=torch.cuda.current_device()
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """x [..., input_size] to ([..., output_size], None)."""
        return super().forward(x), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The weight, replicated over tensor-parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )

    def get_extra_state(self) -> None:
        """Nothing; present so that checkpoints have the keys that Transformer Engine's linears write."""

    def set_extra_state(self, state: Any) -> None:
        """Ignored."""


class Router(TopKRouter):
    """megatron-core's router on the device where its weights are; the original moves CPU weights to the GPU."""

    def gating(self, input: Tensor) -> Tensor:
        """input [..., hidden] to fp32 logits [..., experts]."""
        return router_gating_linear(input, self.weight, self.bias, torch.float32)


class MoELayer(MegatronMoELayer):
    """megatron-core's routed and shared experts; the routed ones may work in `moe_latent_size` (Nemotron 3)."""

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        submodules = copy.copy(submodules)
        submodules.router = Router
        latent = config.moe_latent_size
        if not latent:
            super().__init__(config, submodules, *args, **kwargs)
            return
        # megatron-core builds latent projections from Transformer Engine only: build the rest without them, but the
        # experts at their latent width.
        plain = copy.copy(config)
        plain.moe_latent_size = None
        build_experts = submodules.experts
        submodules.experts = lambda num_experts, _config, **kw: build_experts(num_experts, config, **kw)
        super().__init__(plain, submodules, *args, **kwargs)
        self.config = config
        self.fc1_latent_proj = DuplicatedLinear(config.hidden_size, latent, config)
        self.fc2_latent_proj = DuplicatedLinear(latent, config.hidden_size, config)


def moe_spec(megatron_spec: functools.partial) -> functools.partial:
    """megatron-core's MoE spec with this module's layer in it."""
    return functools.partial(MoELayer, *megatron_spec.args, **megatron_spec.keywords)
