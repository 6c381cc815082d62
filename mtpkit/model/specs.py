"""megatron-core's configuration and layer specs of a model."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid.hybrid_block import HybridStack as MegatronHybridStack
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.transformer import TransformerConfig, TransformerLayerSubmodules
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
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
from mtpkit.model.layers.attention import SelfAttention
from mtpkit.model.layers.mamba import MambaMixer
from mtpkit.model.layers.mlp import MLP
from mtpkit.model.layers.moe import moe_spec
from mtpkit.model.layers.residual import AttentionLayer, MambaLayer, MixtureLayer, MLPLayer


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
    if "M" in config.letters:
        settings |= dict(
            mamba_num_heads=config.mamba2.num_heads,
            mamba_head_dim=config.mamba2.head_dim,
            mamba_state_dim=config.mamba2.state_dim,
            mamba_num_groups=config.mamba2.num_groups,
        )
    if config.moe.num_experts:
        settings |= dict(
            num_moe_experts=config.moe.num_experts,
            moe_router_topk=config.moe.router_topk,
            moe_ffn_hidden_size=config.moe.ffn_hidden_size,
            moe_shared_expert_intermediate_size=config.moe.shared_expert_intermediate_size or None,
            moe_latent_size=config.moe.latent_size or None,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=0.0,
            moe_router_load_balancing_type="none",
            moe_router_dtype="fp32",
            moe_router_topk_scaling_factor=config.moe.router_topk_scaling_factor,
            moe_router_num_groups=config.moe.router_num_groups if config.moe.router_num_groups > 1 else None,
            moe_router_group_topk=config.moe.router_group_topk if config.moe.router_num_groups > 1 else None,
            moe_token_dispatcher_type="allgather",
        )
    result = TransformerConfig(**settings)
    result.mtpkit = config
    return result


class HybridStack(MegatronHybridStack):
    """megatron-core's stack with the final norm of the backend; the original hard-wires Transformer Engine's."""

    def __init__(self, config: Any, submodules: Any, *args: Any, norm: type, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, post_layer_norm=False, **kwargs)
        if self.post_process:
            self.post_layer_norm = True
            self.final_norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)


def stack_spec(backend: Backend, config: ModelConfig) -> ModuleSpec:
    """Spec of the decoder stack and, within it, of every layer kind and of the MTP block."""
    mlp = MLPSubmodules(linear_fc1=backend.norm_column_linear, linear_fc2=backend.row_linear)
    qk_norm = dict(q_layernorm=backend.norm, k_layernorm=backend.norm) if config.attention.qk_layernorm else {}
    submodules = HybridStackSubmodules(
        mamba_layer=ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                mixer=ModuleSpec(
                    module=MambaMixer,
                    submodules=MambaMixerSubmodules(in_proj=backend.norm_column_linear, out_proj=backend.row_linear),
                ),
                mamba_bda=get_bias_dropout_add,
            ),
        ),
        attention_layer=ModuleSpec(
            module=AttentionLayer,
            submodules=TransformerLayerSubmodules(
                self_attention=ModuleSpec(
                    module=SelfAttention,
                    params={"attn_mask_type": AttnMaskType.causal},
                    submodules=SelfAttentionSubmodules(
                        linear_qkv=backend.norm_column_linear,
                        core_attention=backend.core_attention,
                        linear_proj=backend.row_linear,
                        **qk_norm,
                    ),
                ),
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                mlp=partial(MLP.as_mlp_submodule, submodules=mlp), mlp_bda=get_bias_dropout_add
            ),
        ),
        moe_layer=_moe_layer(backend, config),
        mtp_block_spec=ModuleSpec(
            module=MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[_mtp_layer(backend)]),
        ),
    )
    return ModuleSpec(module=HybridStack, submodules=submodules, params={"norm": backend.norm})


def _moe_layer(backend: Backend, config: ModelConfig) -> ModuleSpec:
    experts = get_moe_module_spec_for_backend(backend.moe_provider, num_experts=config.moe.num_experts or 1)
    return ModuleSpec(
        module=MixtureLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=backend.norm, mlp=moe_spec(experts), mlp_bda=get_bias_dropout_add
        ),
    )


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
