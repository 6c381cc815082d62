"""`ModelConfig` from the fields of Megatron's `TransformerConfig`, or from the arguments that Megatron-LM saves."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from mtpkit.config import ModelConfig, config_of_file
from mtpkit.errors import UserError, listed, raise_problems, shown

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


WHOLE_KEYS = (
    "mtp_num_layers",
    "num_query_groups",
    "kv_channels",
    "hidden_size",
    "num_attention_heads",
    "mamba_head_dim",
)
SWITCHES = (
    "mtp_use_repeated_layer",
    "group_query_attention",
    "untie_embeddings_and_output_weights",
    "swiglu",
    "gated_linear_unit",
    "squared_relu",
    "disable_bias_linear",
)
PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern", "mtp_hybrid_override_pattern")
"""Keys that are read before a `ModelConfig` checks its fields: whole numbers, true or false, texts."""


def config_from_megatron(values: Any, where: Path | str = "Megatron config") -> ModelConfig:
    """Read a `TransformerConfig` as a dictionary, or the namespace `args` of a Megatron-LM checkpoint as one.

    Megatron's `mtp_num_layers` counts depths. Its vocabulary is taken with its padding: those rows are in the weights.

    Args:
        where: the file, for messages.

    Raises:
        UserError: it is no dictionary; or names every setting that is wrong or cannot be represented.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: {shown(values)} is not an object of Megatron's settings")
    values = {key: value for key, value in values.items() if value is not None}
    raise_problems(where, list(_wrong_types(values)))
    pattern, mtp_pattern, depths = _patterns(values, where)
    letters = pattern + mtp_pattern
    missing = [
        " or ".join(FIELDS[name]) for name in ("vocab_size", "hidden_size") if _first(values, FIELDS[name]) is None
    ]
    if missing:
        raise UserError(f"{where}: {listed(missing)} is missing")
    fixed = UNSUPPORTED | (MOE_FIXED if "E" in letters else {})
    problems = [
        f"{key} {shown(values[key])} is not supported, only {value!r}"
        for key, value in fixed.items()
        if key in values and (type(values[key]), values[key]) != (type(value), value)
    ]
    if values.get("disable_bias_linear") is False:
        problems.append("disable_bias_linear False is not supported, only True")
    raise_problems(where, problems)
    heads = values.get("num_attention_heads") or 1
    grouped = values.get("group_query_attention", True)
    fields = {field: value for field, names in FIELDS.items() if (value := _first(values, names)) is not None}
    if "M" in letters:  # as Megatron-LM derives it
        width = fields.get("mamba_head_dim", ModelConfig.mamba_head_dim)
        fields.setdefault("mamba_num_heads", MAMBA_EXPAND * fields["hidden_size"] // max(1, width))
    fields |= dict(
        family="nemotron_h",
        pattern=pattern,
        mtp_pattern=mtp_pattern,
        mtp_num_depths=depths,
        mtp_use_repeated_layer=values.get("mtp_use_repeated_layer", False) if depths else True,
        num_query_groups=(grouped and values.get("num_query_groups")) or heads,
        kv_channels=values.get("kv_channels") or values["hidden_size"] // heads,
        activation=_activation(values, where),
        tie_word_embeddings=not values.get("untie_embeddings_and_output_weights", True),
    )
    keys = {field: next((name for name in names if name in values), names[0]) for field, names in FIELDS.items()}
    keys |= dict(pattern="hybrid_layer_pattern", mtp_num_depths="mtp_num_layers")
    return config_of_file(where, keys, fields)


def _wrong_types(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield one clause for every value of another type, of those that `ModelConfig` does not see as they are."""
    kinds: list[tuple[type, str, tuple[str, ...]]] = [
        (int, "a whole number from 0", WHOLE_KEYS),
        (bool, "true or false", SWITCHES),
        (str, "a text", PATTERNS),
    ]
    for kind, expected, keys in kinds:
        for key in keys:
            value = values.get(key, kind())
            if type(value) is not kind or (type(value) is int and value < 0):
                yield f"{key} {shown(value)} is not {expected}"


def _first(values: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((values[name] for name in names if name in values), None)


def _patterns(values: Mapping[str, Any], where: Path | str) -> tuple[str, str, int]:
    """(base pattern, pattern of one MTP depth, depths), from `M-*-/*-/*-` or from separate settings."""
    text = _first(values, ("hybrid_layer_pattern", "hybrid_override_pattern"))
    if not text:
        raise UserError(f"{where}: hybrid_layer_pattern is missing; only hybrid models can be read")
    base, *heads = text.replace("|", "").split("/")  # | marks pipeline stages
    depths = values.get("mtp_num_layers") or len(heads)
    own = set(heads) or {values.get("mtp_hybrid_override_pattern", "")}
    if len(own) > 1 or len(heads) not in (0, depths):
        raise UserError(f"{where}: {shown(text)} must give one pattern to all {shown(depths)} depths")
    return base, own.pop() if depths else "", depths


def _activation(values: Mapping[str, Any], where: Path | str) -> Literal["relu2", "swiglu"]:
    gated = values.get("swiglu") or values.get("gated_linear_unit")
    function = values.get("activation_func", "")
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    if gated and ("silu" in name or values.get("swiglu")):
        return "swiglu"
    if not gated and ("squared_relu" in name or values.get("squared_relu")):
        return "relu2"
    raise UserError(f"{where}: activation_func {shown(function or 'gelu')}: only squared ReLU and SwiGLU are supported")
