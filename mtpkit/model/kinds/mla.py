"""Layers of multi-head latent attention."""

import math
from collections.abc import Mapping, Sequence

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer import TransformerLayerSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from mtpkit.config import ModelConfig
from mtpkit.config.sections import MlaConfig
from mtpkit.model.kinds.attention import OUTPUT, SCORES
from mtpkit.model.kinds.base import Draw, LayerKind, Linear, Memory, Shape, Slot
from mtpkit.model.kinds.settings import Settings, UnfusedNorm
from mtpkit.model.layers.backend import Backend
from mtpkit.model.layers.mla import LatentAttention
from mtpkit.model.layers.residual import AttentionLayer
from mtpkit.model.state import PagedLatentSpec, StateSpec

_QUERIES = "self_attention.linear_q_up_proj"
_LATENT = "self_attention.linear_kv_up_proj"


class Mla(LayerKind):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""

    name = "mla"
    section = MlaConfig
    mixer = "self_attention"
    slot = Slot("+", "mla_layer")
    narrows = True
    writes_residual = ("linear_proj",)
    unfused_norms = (
        UnfusedNorm(
            "self_attention.q_layernorm.weight",
            f"{_QUERIES}.weight",
            f"{_QUERIES}.layer_norm_weight",
        ),
        UnfusedNorm(
            "self_attention.kv_layernorm.weight",
            f"{_LATENT}.weight",
            f"{_LATENT}.layer_norm_weight",
        ),
    )

    def spec(self, backend: Backend, config: ModelConfig) -> ModuleSpec:
        attention = ModuleSpec(LatentAttention, params={"backend": backend})
        parts = TransformerLayerSubmodules(
            input_layernorm=backend.norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
        )
        return ModuleSpec(module=AttentionLayer, submodules=parts)

    def settings(self, config: ModelConfig) -> dict[str, object]:
        # Each head has keys and values of its own, made from the latent that all heads share.
        return {"num_query_groups": config.attention.num_attention_heads}

    def fixed_settings(self, there: bool) -> Mapping[str, object]:
        if not there:
            return {"multi_latent_attention": False}
        return {
            "rotary_percent": 1.0,
            "multi_latent_attention": True,
            "attention_output_gate": False,
        }

    def derived_settings(self, settings: Settings, hidden_size: int) -> Mapping[str, object]:
        """Derive whether unfactored query projections are normed: with `qk_layernorm`, if there is
        no `q_lora_rank`."""
        normed = settings.typed("qk_layernorm", False)
        return {"q_proj_layernorm": normed and not settings.typed("q_lora_rank", 0)}

    def gpt_layers(self, settings: Settings) -> bool:
        return settings.typed("multi_latent_attention", False)

    def divided_sizes(self, config: ModelConfig, whole_experts: bool = False) -> Mapping[str, int]:
        return {"num_attention_heads": config.attention.num_attention_heads}

    def tensors(self, config: ModelConfig) -> dict[str, Shape]:
        sizes = config.mla
        hidden = config.hidden_size
        heads = config.attention.num_attention_heads
        norms = config.attention.qk_layernorm

        def linear(name: str, rows: int, columns: int, normed: bool = False) -> dict[str, Shape]:
            before: dict[str, Shape] = (
                {f"self_attention.{name}.layer_norm_weight": (columns,)} if normed else {}
            )
            return before | {f"self_attention.{name}.weight": (rows, columns)}

        if rank := sizes.q_lora_rank:
            queries = linear("linear_q_down_proj", rank, hidden)
            queries |= linear("linear_q_up_proj", heads * sizes.qk_width, rank, norms)
        else:
            queries = linear(
                "linear_q_proj", heads * sizes.qk_width, hidden, sizes.q_proj_layernorm
            )
        keys_and_values = heads * (sizes.qk_head_dim + sizes.v_head_dim)
        return {
            "input_layernorm.weight": (hidden,),
            **queries,
            **linear("linear_kv_down_proj", sizes.row, hidden),
            **linear("linear_kv_up_proj", keys_and_values, sizes.kv_lora_rank, norms),
            **linear("linear_proj", hidden, heads * sizes.v_head_dim),
        }

    def linears(self, config: ModelConfig) -> Sequence[Linear]:
        """Return all linears but the up projection of latents, which decoding absorbs into queries
        and outputs."""
        return [linear for linear in super().linears(config) if linear.name != "linear_kv_up_proj"]

    def activations(self, config: ModelConfig) -> int:
        """Count queries before and after absorption, and outputs in latent space."""
        sizes = config.mla
        return config.attention.num_attention_heads * (
            sizes.qk_width + sizes.row + sizes.kv_lora_rank
        )

    def states(self, config: ModelConfig, ranks: int = 1) -> tuple[StateSpec, ...]:
        return (PagedLatentSpec(config.mla.kv_lora_rank, config.mla.qk_pos_emb_head_dim),)

    def memory(self, config: ModelConfig) -> Memory:
        """Count scores of all heads with one cached row, and weighted sums of its latent. In
        prompts that are computed at once, each head has its own keys and values."""
        sizes = config.mla
        heads = config.attention.num_attention_heads
        return Memory(
            kv=sizes.row,
            score_flops=2 * heads * (sizes.row + sizes.kv_lora_rank),
            prompt_score_flops=2 * heads * (sizes.qk_width + sizes.v_head_dim),
        )

    def depend_on_context(self, layer: nn.Module, config: ModelConfig, draw: Draw) -> None:
        """Sharpen the scores, as in `Attention`: outputs of each projection get standard deviation
        1, and queries that of the scores."""
        sizes = config.mla
        module = getattr(layer, self.mixer)
        queries = module.linear_q_up_proj if sizes.q_lora_rank else module.linear_q_proj
        queries.weight *= SCORES / (
            config.init_std * math.sqrt(sizes.q_lora_rank or config.hidden_size)
        )
        module.linear_kv_down_proj.weight /= config.init_std * math.sqrt(config.hidden_size)
        module.linear_kv_up_proj.weight /= config.init_std * math.sqrt(sizes.kv_lora_rank)
        module.linear_proj.weight *= OUTPUT
