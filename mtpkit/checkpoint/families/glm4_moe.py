"""GLM-4-MoE (GLM-4.5 to 4.7, arXiv:2508.06471): config keys and weight names. Heads lie after the
base's last layer."""

from mtpkit.checkpoint.families import blocks
from mtpkit.checkpoint.families.family import Family
from mtpkit.checkpoint.families.keys import EndTokens, Fixed, Heads, Key, Quantization
from mtpkit.checkpoint.families.routers import SigmoidRouter
from mtpkit.checkpoint.families.serving import (
    OUTPUT_COPY,
    WITH_NVFP4,
    Serving,
    Unquantized,
    renaming,
)

LAYERS = blocks.Layers(dense_key="first_k_dense_replace")

GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    read_patterns=LAYERS.patterns,
    lines=(
        Fixed("hidden_act", "silu", "activation", "swiglu"),
        Fixed("tie_word_embeddings", False, "tie_word_embeddings", False),
        Fixed("", None, "moe_latent_size", 0, kind="moe"),
        Quantization(),
        Key("vocab_size", "vocab_size"),
        Key("hidden_size", "hidden_size"),
        Key("max_position_embeddings", "max_position_embeddings", default=131072),
        Key("rms_norm_eps", "layernorm_epsilon", default=1e-5),
        Key("initializer_range", "init_std", default=0.02),
        Key("bos_token_id", "bos_token_id", default=None),
        Key("pad_token_id", "pad_token_id", default=None),
        Key("num_attention_heads", "num_attention_heads", "attention"),
        Key("num_key_value_heads", "num_query_groups", "attention"),
        blocks.HeadDim(),
        Key("attention_bias", "add_qkv_bias", "attention", default=False),
        Key("use_qk_norm", "qk_layernorm", "attention", default=False),
        blocks.Rotary(percent=0.5),
        Key("intermediate_size", "ffn_hidden_size", "mlp"),
        Key("n_routed_experts", "num_moe_experts", "moe"),
        Key("num_experts_per_tok", "moe_router_topk", "moe"),
        Key("moe_intermediate_size", "moe_ffn_hidden_size", "moe"),
        blocks.SharedExperts(),
        SigmoidRouter(),
        LAYERS,
        EndTokens(),
        Heads(),
    ),
    replaced=("mtpkit",),
    outside=blocks.OUTSIDE,
    layers={"attention": blocks.attention, "mlp": blocks.mlp, "moe": blocks.moe},
    base_layer=blocks.base_layer,
    mtp_outside=blocks.heads_after_base,
    mtp_layer=blocks.after_base,
    copies=blocks.shared_with_base,
    serving=Serving(  # read in vLLM's glm4_moe_mtp.py and SGLang's glm4_moe_nextn.py
        head_patterns=("*E",),
        fp32=(r"e_score_correction_bias$",),
        unquantized=(Unquantized(r"eh_proj$"), WITH_NVFP4),
        called={
            "vllm": renaming(OUTPUT_COPY, ".head"),
            "sglang": renaming(r"^model\.layers\.\d+\.", "model.decoder."),
        },
        no_table={"sglang": ("qkv_proj", "gate_up_proj")},
        depths=("vllm",),
        feeds={
            "vllm": {"mtp_reads_of_depth": "before_final_norm", "mtp_zero_first_embedding": True}
        },
    ),
)
"""Defaults are those of transformers, which never ties the embeddings."""
