"""Models of megatron-core's `GPTModel`, which has attention and MLP in one layer, and checkpoints
as it saves them."""

import contextlib
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn

from mtpkit.platform import CpuInsteadOfCuda, ensure_distributed, save_checkpoints_in_threads

VOCAB = 64
LENGTH = 32
PLAIN = dict(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    ffn_hidden_size=48,
    mtp_num_layers=2,
    layernorm_epsilon=1e-5,
)
EXPERTS = dict(
    num_moe_experts=6,
    moe_router_topk=2,
    moe_ffn_hidden_size=24,
    moe_shared_expert_intermediate_size=16,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_topk_scaling_factor=2.5,
    moe_router_dtype="fp32",
)
LATENT = dict(
    multi_latent_attention=True,
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=8,
    qk_layernorm=True,
    rope_type="rope",
)
CASES = {
    "qkv bias": (PLAIN | dict(add_qkv_bias=True), "*-*-*-/*-"),
    "experts everywhere": (PLAIN | EXPERTS, "*E*E*E/*E"),
    "some experts": (PLAIN | EXPERTS | dict(moe_layer_freq=2), "*E*-*E/*E"),
    "latent attention": (PLAIN | EXPERTS | LATENT | dict(moe_layer_freq=[0, 1, 1]), "+-+E+E/+E"),
}
"""Settings of a model, and the pattern that they make."""


class CausalAttention(nn.Module):
    """The attention between linear_qkv and linear_proj, which megatron-core itself computes on a
    GPU alone."""

    def __init__(
        self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """[s, b, heads, d] to [s, b, heads * d of values]."""
        q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def gpt_model(settings: dict[str, Any], tensor: int = 1, pipeline: int = 1) -> GPTModel:
    """With random weights, the same ones however it is split; this rank's part of it."""
    ensure_distributed(tensor, pipeline)
    first = parallel_state.is_pipeline_first_stage()
    last = parallel_state.is_pipeline_last_stage()
    kind = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    config = kind(
        **{key: value for key, value in settings.items() if key != "rotary_percent"},
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        hidden_dropout=0,
        attention_dropout=0,
        moe_token_dispatcher_type="allgather",
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
    )
    with CpuInsteadOfCuda():
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm"
        )
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = CausalAttention
        heads = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        model = GPTModel(
            config,
            spec,
            vocab_size=VOCAB,
            max_sequence_length=LENGTH,
            position_embedding_type="rope",
            rotary_percent=settings.get("rotary_percent", 1.0),
            share_embeddings_and_output_weights=False,
            mtp_block_spec=heads,
            pre_process=first,
            post_process=last,
        )
    fill(model)
    return model.eval()


@torch.no_grad()
def fill(model: GPTModel) -> None:
    """Give every tensor random values that depend on its key on disk alone, of which this rank
    takes its part."""
    for shard in nested_values(load_preprocess(model.sharded_state_dict())[0]):
        if isinstance(shard, ShardedTensor):
            generator = torch.Generator().manual_seed(zlib.crc32(shard.key.encode()))
            whole = torch.randn(shard.global_shape, generator=generator)
            whole = 1 + 0.3 * whole if "norm" in shard.key else 0.2 * whole
            layers = shard.global_offset[: shard.prepend_axis_num]
            rest = shard.global_offset[shard.prepend_axis_num :]
            own = tuple(
                slice(start, start + size)
                for start, size in zip(rest, shard.local_shape, strict=True)
            )
            shard.data.copy_(whole[(*layers, *own)])


@torch.no_grad()
def gpt_states(model: GPTModel, ids: Tensor) -> list[Tensor]:
    """[s, b, h] hidden states after the final norm, then those of each depth, for token ids [b,
    s]."""
    found = []

    def keep(module: nn.Module, arguments: object, output: Tensor) -> None:
        found.extend(output.chunk(1 + model.config.mtp_num_layers))
        raise StopIteration  # before a loss is computed, which takes a GPU

    handle = model.mtp.register_forward_hook(keep)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    with CpuInsteadOfCuda(), contextlib.suppress(StopIteration):
        model(ids, positions, None)
    handle.remove()
    return found


def save_gpt(model: GPTModel, settings: dict[str, Any], path: Path) -> None:
    """Save a model as Megatron-LM does, with its arguments beside the weights."""
    save_checkpoints_in_threads()
    args = Namespace(
        **{
            key: value
            for key, value in settings.items()
            if key not in ("num_moe_experts", "qk_head_dim")
        },
        num_experts=settings.get("num_moe_experts"),
        qk_head_dim=settings.get("qk_head_dim"),
        padded_vocab_size=VOCAB,
        max_position_embeddings=LENGTH,
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        group_query_attention=True,
        untie_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        rotary_base=10000,
    )
    path.mkdir(parents=True, exist_ok=True)  # by whichever rank comes first
    dist_checkpointing.save(model.sharded_state_dict() | {"args": args}, str(path))
