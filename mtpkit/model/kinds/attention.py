"""Attention layers."""

import math

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer import TransformerLayerSubmodules
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from mtpkit.config import ModelConfig
from mtpkit.config.sections import AttentionConfig
from mtpkit.model.kinds.base import Draw, LayerKind, Memory, Shape, Slot
from mtpkit.model.kinds.settings import Settings, UnfusedNorm
from mtpkit.model.layers.attention import SelfAttention
from mtpkit.model.layers.backend import Backend
from mtpkit.model.layers.residual import AttentionLayer
from mtpkit.model.state import PagedKVSpec, StateSpec

SCORES = 3.5
OUTPUT = 8.0
"""For `depend_on_context`: the standard deviation of scores, with which each query attends to a few
keys; and a factor for the output projection, because a model has few such layers."""
_INPUT = "self_attention.linear_qkv"


class Attention(LayerKind):
    """Grouped-query attention."""

    name = "attention"
    section = AttentionConfig
    mixer = "self_attention"
    slot = Slot("*", "attention_layer")
    narrows = True
    writes_residual = ("linear_proj",)
    unfused_norms = (
        UnfusedNorm("input_layernorm.weight", f"{_INPUT}.weight", f"{_INPUT}.layer_norm_weight"),
    )
    divided = ("num_attention_heads",)
    divided_or_shared = ("num_query_groups",)

    def spec(self, backend: Backend, config: ModelConfig) -> ModuleSpec:
        qk_norm = (
            dict(q_layernorm=backend.norm, k_layernorm=backend.norm)
            if config.attention.qk_layernorm
            else {}
        )
        modules = SelfAttentionSubmodules(
            linear_qkv=backend.norm_column_linear,
            core_attention=backend.core_attention,
            linear_proj=backend.row_linear,
            **qk_norm,
        )
        attention = ModuleSpec(
            SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=modules
        )
        parts = TransformerLayerSubmodules(
            self_attention=attention, self_attn_bda=get_bias_dropout_add
        )
        return ModuleSpec(module=AttentionLayer, submodules=parts)

    def settings(self, config: ModelConfig) -> dict[str, object]:
        return {
            name: getattr(config.attention, name)
            for name in ("attention_output_gate", "add_qkv_bias")
        }

    def gpt_layers(self, settings: Settings) -> bool:
        return True

    def tensors(self, config: ModelConfig) -> dict[str, Shape]:
        sizes = config.attention
        hidden = config.hidden_size
        norms = ("q_layernorm", "k_layernorm") if sizes.qk_layernorm else ()
        return {
            "self_attention.linear_qkv.layer_norm_weight": (hidden,),
            "self_attention.linear_qkv.weight": (sizes.projected, hidden),
            **(
                {"self_attention.linear_qkv.bias": (sizes.projected,)} if sizes.add_qkv_bias else {}
            ),
            **{f"self_attention.{norm}.weight": (sizes.kv_channels,) for norm in norms},
            "self_attention.linear_proj.weight": (
                hidden,
                sizes.num_attention_heads * sizes.kv_channels,
            ),
        }

    def activations(self, config: ModelConfig) -> int:
        widths = 3 if config.attention.attention_output_gate else 2
        return widths * config.attention.num_attention_heads * config.attention.kv_channels

    def states(self, config: ModelConfig, ranks: int = 1) -> tuple[StateSpec, ...]:
        # With more ranks than groups, several ranks hold the same one.
        return (
            PagedKVSpec(
                max(1, config.attention.num_query_groups // ranks), config.attention.kv_channels
            ),
        )

    def memory(self, config: ModelConfig) -> Memory:
        """Count the FLOPs of scores for q k^T and for their product with v."""
        sizes = config.attention
        scores = 4 * sizes.num_attention_heads * sizes.kv_channels
        return Memory(kv=2 * sizes.num_query_groups * sizes.kv_channels, score_flops=scores)

    def depend_on_context(self, layer: nn.Module, config: ModelConfig, draw: Draw) -> None:
        """Sharpen the scores: with the usual initial weights, attention averages away nearly all
        values."""
        module = getattr(layer, self.mixer)
        # standard deviation of queries, keys and values
        projected = config.init_std * math.sqrt(config.hidden_size)
        groups = module.num_query_groups_per_partition
        heads = module.num_attention_heads_per_partition
        by_group = module.linear_qkv.weight.unflatten(
            0, (groups, -1, module.hidden_size_per_attention_head)
        )
        sharper = math.sqrt(SCORES) / projected
        by_group[:, : heads // groups] *= sharper  # gates lie between queries and keys
        by_group[:, -2] *= sharper
        by_group[:, -1] /= projected
        module.linear_proj.weight *= OUTPUT
