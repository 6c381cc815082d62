"""MiMo-7B (arXiv:2505.07608): config keys and weight names. The base has Qwen2's names; the heads
have their own."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpkit.checkpoint.families import blocks
from mtpkit.checkpoint.families.family import Family
from mtpkit.checkpoint.families.keys import EndTokens, Fixed, Heads, Key, Quantization
from mtpkit.checkpoint.families.serving import Need, Serving, Unquantized, renaming
from mtpkit.checkpoint.families.table import Entry, OfColumns, one
from mtpkit.checkpoint.layouts import megatron
from mtpkit.config import ModelConfig

LAYERS = blocks.Layers()


@dataclass(frozen=True)
class SwapHalves(OfColumns):
    """Swaps the halves of a matrix: Hugging Face has the columns for the hidden state first,
    Megatron has them last."""

    def to_megatron(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1) for tensor in tensors]

    to_hf = to_megatron


def _prefix(config: ModelConfig, depth: int, number: int = 0) -> str:
    return f"model.mtp_layers.{depth}."


def _mtp_outside(config: ModelConfig, depth: int) -> Iterator[Entry]:
    hf = _prefix(config, depth)
    own = megatron.mtp_depth(depth)
    yield one(f"{hf}token_layernorm.weight", f"{own}enorm.weight")
    yield one(f"{hf}hidden_layernorm.weight", f"{own}hnorm.weight")
    yield one(f"{hf}input_proj.weight", f"{own}eh_proj.weight", SwapHalves())
    yield one(f"{hf}final_layernorm.weight", f"{own}final_layernorm.weight")


def _after_base(name: str, letters: int) -> str:
    """vLLM numbers the heads as layers after the base's last."""
    layers = letters // 2
    return re.sub(
        r"^model\.mtp_layers\.(\d+)\.",
        lambda found: f"model.layers.{layers + int(found[1])}.",
        name,
    )


# Read in mimo_mtp.py of both servers.
SERVING = Serving(
    head_patterns=("*-",),
    ties=("vllm", "sglang"),
    unquantized=(Unquantized(r"input_proj$"),),
    called={"vllm": _after_base, "sglang": renaming(r"^model\.mtp_layers\.\d+\.", "")},
    no_table={"sglang": ("qkv_proj", "gate_up_proj")},
    feeds={
        "vllm": {"mtp_reads_of_base": "before_final_norm", "mtp_zero_first_embedding": True},
        "sglang": {"mtp_zero_first_embedding": True},
    },
    needs=(
        Need(
            "auto_map.AutoConfig",
            "neither transformers nor a server has this class: its code lies beside the weights",
        ),
    ),
)

MIMO = Family(
    model_type="mimo",
    architecture="MiMoForCausalLM",
    read_patterns=LAYERS.patterns,
    lines=(
        Fixed("attention_bias", True, "add_qkv_bias", True),
        Fixed("hidden_act", "silu", "activation", "swiglu"),
        Fixed("use_sliding_window", False),
        Fixed("", None, "qk_layernorm", False),
        Quantization(),
        Key("vocab_size", "vocab_size"),
        Key("hidden_size", "hidden_size"),
        Key("max_position_embeddings", "max_position_embeddings", default=32768),
        Key("rms_norm_eps", "layernorm_epsilon", default=1e-6),
        Key("initializer_range", "init_std", default=0.02),
        Key("tie_word_embeddings", "tie_word_embeddings", default=False),
        Key("bos_token_id", "bos_token_id", default=None),
        Key("pad_token_id", "pad_token_id", default=None),
        Key("num_attention_heads", "num_attention_heads", "attention"),
        Key("num_key_value_heads", "num_query_groups", "attention"),
        blocks.HeadDim(),
        blocks.Rotary(),
        Key("intermediate_size", "ffn_hidden_size", "mlp"),
        LAYERS,
        EndTokens(),
        Heads(),
    ),
    replaced=("mtpkit",),
    outside=blocks.OUTSIDE,
    layers={"attention": blocks.attention, "mlp": blocks.mlp},
    base_layer=blocks.base_layer,
    mtp_outside=_mtp_outside,
    mtp_layer=_prefix,
    head_rules={"mtp_reads_of_base": "before_final_norm"},
    serving=SERVING,
)
"""Defaults are those of transformers' Qwen2. The heads read the base's state before the final norm,
as in vLLM, whose code came from MiMo's makers; SGLang feeds them the state after the final norm."""
