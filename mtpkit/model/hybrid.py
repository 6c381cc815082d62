"""megatron-core's hybrid model, with its configuration and layer specs and what the rest of mtpkit asks of a model."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.hybrid.hybrid_block import HybridStack as MegatronHybridStack
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel as MegatronHybridModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from mtpkit.config import ModelConfig
from mtpkit.kernels.activation import relu2
from mtpkit.model.backends import Backend
from mtpkit.model.kinds import KINDS, kinds_in

_SLOTS = {
    "M": "mamba_layer",
    "G": "gdn_layer",
    "*": "attention_layer",
    "D": "dsa_layer",
    "+": "mla_layer",
    "-": "mlp_layer",
    "E": "moe_layer",
}
"""Letters of megatron-core's patterns, and what its stack calls the layers that they stand for."""


def megatron_pattern(pattern: str) -> str:
    """The pattern for megatron-core, whose own letters stand for the layers that `stack_spec` puts in their place."""
    return "".join(KINDS[letter].slot if letter in KINDS else letter for letter in pattern)


def transformer_config(
    config: ModelConfig,
    dtype: torch.dtype,
    tensor_parallel: int,
    pipeline_parallel: int,
    expert_parallel: int,
    sequence_parallel: bool,
) -> TransformerConfig:
    """megatron-core's view of a model; the `ModelConfig` itself is its attribute `mtpkit`."""
    settings: dict[str, Any] = dict(
        num_layers=len(config.pattern),
        hidden_size=config.hidden_size,
        num_attention_heads=config.attention.num_attention_heads,
        num_query_groups=config.attention.num_query_groups,
        kv_channels=config.attention.kv_channels,
        ffn_hidden_size=config.mlp.ffn_hidden_size or config.hidden_size,
        activation_func=relu2 if config.mlp.activation == "relu2" else F.silu,
        gated_linear_unit=config.mlp.activation == "swiglu",
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=config.layernorm_epsilon,
        qk_layernorm=config.attention.qk_layernorm,
        apply_rope_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        is_hybrid_model=True,
        mtp_num_layers=config.mtp.num_depths or None,
        mtp_use_repeated_layer=config.mtp.repeated,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        expert_model_parallel_size=expert_parallel,
        sequence_parallel=sequence_parallel,
    )
    for kind in kinds_in(config.letters):
        settings |= kind.settings(config)
    result = TransformerConfig(**settings)
    result.mtpkit = config
    return result


class HybridModel(MegatronHybridModel):
    """The base and its MTP heads; made by `build_model` alone."""

    base_context: Callable[[], AbstractContextManager[None]]
    """What the base runs in, see `use_fp8_base`."""

    def __init__(self, model_config: ModelConfig, backend: str, stage_patterns: list[str], **megatron: Any) -> None:
        """Build megatron-core's model from its own arguments.

        Args:
            model_config: the model's description, kept as `mtpkit_config`.
            backend: name of the modules that it is made of.
            stage_patterns: the base's layers on each pipeline stage.
        """
        super().__init__(**megatron)
        self.mtpkit_config, self.backend, self.stage_patterns = model_config, backend, stage_patterns
        self.base_context = nullcontext


class HybridStack(MegatronHybridStack):
    """megatron-core's stack with the final norm of the backend; the original hard-wires Transformer Engine's."""

    def __init__(self, config: Any, submodules: Any, *args: Any, norm: type, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, post_layer_norm=False, **kwargs)
        if self.post_process:
            self.post_layer_norm = True
            self.final_norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)


def stack_spec(backend: Backend, config: ModelConfig) -> ModuleSpec:
    """Spec of the decoder stack and, within it, of the model's layer kinds and of the MTP block."""
    submodules = HybridStackSubmodules(
        **{_SLOTS[kind.slot]: kind.spec(backend, config) for kind in kinds_in(config.letters)},
        mtp_block_spec=ModuleSpec(
            module=MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[_mtp_layer(backend)]),
        ),
    )
    return ModuleSpec(module=HybridStack, submodules=submodules, params={"norm": backend.norm})


def _mtp_layer(backend: Backend) -> ModuleSpec:
    return ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=backend.norm,
            hnorm=backend.norm,
            eh_proj=backend.column_linear,
            mtp_model_layer=None,  # megatron-core builds it from the pattern
            layer_norm=backend.norm,
        ),
    )
