"""`ModelConfig` from the fields of Megatron's `TransformerConfig`, or from the arguments that Megatron-LM saves."""

from collections.abc import Mapping
from typing import Any, Literal

from mtpkit.config import ModelConfig
from mtpkit.errors import UserError, raise_problems

FIELDS: dict[str, tuple[str, ...]] = {
    "vocab_size": ("padded_vocab_size", "vocab_size"),
    "hidden_size": ("hidden_size",),
    "max_position_embeddings": ("max_position_embeddings",),
    "num_attention_heads": ("num_attention_heads",),
    "position_embedding_type": ("position_embedding_type",),
    "rotary_base": ("rotary_base",),
    "rotary_percent": ("rotary_percent",),
    "qk_layernorm": ("qk_layernorm",),
    "ffn_hidden_size": ("ffn_hidden_size",),
    "mamba_num_heads": ("mamba_num_heads",),
    "mamba_head_dim": ("mamba_head_dim",),
    "mamba_state_dim": ("mamba_state_dim",),
    "mamba_num_groups": ("mamba_num_groups",),
    "num_moe_experts": ("num_moe_experts", "num_experts"),
    "moe_router_topk": ("moe_router_topk",),
    "moe_ffn_hidden_size": ("moe_ffn_hidden_size",),
    "moe_shared_expert_intermediate_size": ("moe_shared_expert_intermediate_size",),
    "moe_latent_size": ("moe_latent_size",),
    "moe_router_topk_scaling_factor": ("moe_router_topk_scaling_factor",),
    "moe_router_num_groups": ("moe_router_num_groups",),
    "moe_router_group_topk": ("moe_router_group_topk",),
    "layernorm_epsilon": ("layernorm_epsilon", "norm_epsilon"),
    "init_std": ("init_method_std",),
}
"""ModelConfig field -> Megatron's names for it, the first that is set wins."""

UNSUPPORTED = {
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "apply_layernorm_1p": False,
    "attention_output_gate": False,
    "layernorm_zero_centered_gamma": False,
    "multi_latent_attention": False,
    "normalization": "RMSNorm",
    "window_size": None,
    "rotary_interleaved": False,
}
"""Settings with one value that can be represented."""

MAMBA_EXPAND = 2
"""Inner width of a Mamba layer in hidden sizes, where the number of its heads is not given."""

MOE_FIXED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_gate": False,
}
"""The same, for models with experts."""


def config_from_megatron(values: Mapping[str, Any]) -> ModelConfig:
    """Read a `TransformerConfig` as a dictionary, or the namespace `args` of a Megatron-LM checkpoint as one.

    Megatron's `mtp_num_layers` counts depths. Its vocabulary is taken with its padding: those rows are in the weights.

    Raises:
        UserError: names every setting that cannot be represented.
    """
    pattern, mtp_pattern, depths = _patterns(values)
    letters = pattern + mtp_pattern
    missing = [
        " or ".join(FIELDS[name]) for name in ("vocab_size", "hidden_size") if _first(values, FIELDS[name]) is None
    ]
    if missing:
        raise UserError(f"Megatron config: {', '.join(missing)} is missing")
    fixed = UNSUPPORTED | (MOE_FIXED if "E" in letters else {})
    problems = [
        f"{key} {values[key]!r} is not supported, only {value!r}"
        for key, value in fixed.items()
        if values.get(key, value) not in (value, None)
    ]
    if values.get("disable_bias_linear") is False:
        problems.append("disable_bias_linear False is not supported, only True")
    raise_problems("Megatron config", problems)
    heads = values.get("num_attention_heads") or 1
    grouped = values.get("group_query_attention", True)
    fields = {field: value for field, names in FIELDS.items() if (value := _first(values, names)) is not None}
    if "M" in letters:  # as Megatron-LM derives it
        width = fields.get("mamba_head_dim", ModelConfig.mamba_head_dim)
        fields.setdefault("mamba_num_heads", MAMBA_EXPAND * fields["hidden_size"] // max(1, width))
    return ModelConfig(
        family="nemotron_h",
        pattern=pattern,
        mtp_pattern=mtp_pattern,
        mtp_num_depths=depths,
        mtp_use_repeated_layer=bool(values.get("mtp_use_repeated_layer", False)) if depths else True,
        num_query_groups=(grouped and values.get("num_query_groups")) or heads,
        kv_channels=values.get("kv_channels") or values["hidden_size"] // heads,
        activation=_activation(values),
        tie_word_embeddings=not values.get("untie_embeddings_and_output_weights", True),
        **fields,
    )


def _first(values: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _patterns(values: Mapping[str, Any]) -> tuple[str, str, int]:
    """(base pattern, pattern of one MTP depth, depths), from `M-*-/*-/*-` or from separate settings."""
    text = _first(values, ("hybrid_layer_pattern", "hybrid_override_pattern"))
    if not text:
        raise UserError("Megatron config: hybrid_layer_pattern is missing; only hybrid models can be read")
    base, *heads = text.replace("|", "").split("/")  # | marks pipeline stages
    depths = values.get("mtp_num_layers") or len(heads)
    heads = heads or [values.get("mtp_hybrid_override_pattern") or ""] * depths
    if len(set(heads)) > 1 or len(heads) != depths:
        raise UserError(f"Megatron config: {text!r} must give one pattern to all {depths} depths")
    return base, heads[0] if heads else "", depths


def _activation(values: Mapping[str, Any]) -> Literal["relu2", "swiglu"]:
    gated = values.get("swiglu") or values.get("gated_linear_unit")
    name = str(values.get("activation_func", ""))
    if gated and ("silu" in name or values.get("swiglu")):
        return "swiglu"
    if not gated and ("squared_relu" in name or values.get("squared_relu")):
        return "relu2"
    raise UserError(f"Megatron config: activation_func {name or 'gelu'!r}: only squared ReLU and SwiGLU are supported")
