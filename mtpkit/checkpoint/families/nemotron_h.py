"""Nemotron-H and Nemotron 3: config keys, as published and as transformers 5 saves them."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtpkit.checkpoint.families.nemotron_h_names import canonical_hf_name, table
from mtpkit.checkpoint.layouts.huggingface import as_token_ids
from mtpkit.config import LAYER_KINDS, ModelConfig, config_of_file
from mtpkit.errors import UserError, listed, raise_problems, shown

__all__ = ["canonical_hf_name", "config_from_hf", "config_to_hf", "table"]

BLOCK_TYPES = {
    "linear_attention": "M",
    "full_attention": "*",
    "moe": "E",
    "mlp": "-",
    "mamba": "M",
    "attention": "*",
}
"""Names in `layers_block_type`: transformers 5's and, last, the older ones."""

FIXED = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "mamba_proj_bias": False,
    "use_conv_bias": True,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "quantization_config": None,
}
"""Settings with one value that can be represented. Transformers never ties Nemotron-H's embeddings."""

COMMON_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "layer_norm_epsilon": "layernorm_epsilon",
    "initializer_range": "init_std",
    "bos_token_id": "bos_token_id",
    "pad_token_id": "pad_token_id",
}
LAYER_KEYS = {
    "*": {
        "num_attention_heads": "num_attention_heads",
        "num_key_value_heads": "num_query_groups",
        "head_dim": "kv_channels",
    },
    "-": {"intermediate_size": "ffn_hidden_size"},
    "M": {
        "mamba_num_heads": "mamba_num_heads",
        "mamba_head_dim": "mamba_head_dim",
        "ssm_state_size": "mamba_state_dim",
        "n_groups": "mamba_num_groups",
        "conv_kernel": "mamba_conv_kernel",
        "chunk_size": "mamba_chunk_size",
    },
    "E": {
        "n_routed_experts": "num_moe_experts",
        "num_experts_per_tok": "moe_router_topk",
        "moe_intermediate_size": "moe_ffn_hidden_size",
        "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
        "moe_latent_size": "moe_latent_size",
        "routed_scaling_factor": "moe_router_topk_scaling_factor",
        "n_group": "moe_router_num_groups",
        "topk_group": "moe_router_group_topk",
    },
}
"""Config key -> ModelConfig field, read only for the layer letters that the model has."""

DT_LIMIT = (0.0, math.inf)
"""The range of the step size dt where a config does not say."""

INFINITY = {"__float__": "Infinity"}
"""How transformers 5 writes infinity, which JSON lacks."""

OPTIONAL_KEYS = {
    "max_position_embeddings": 4096,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "pad_token_id": None,
    "conv_kernel": 4,
    "chunk_size": 128,
    "moe_latent_size": 0,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
"""Keys that may be absent, with transformers' defaults."""


def _keys(letters: str) -> dict[str, str]:
    """The config keys that a model with these layer letters needs."""
    keys = dict(COMMON_KEYS)
    for letter in sorted(set(letters)):
        keys |= LAYER_KEYS[letter]
    return keys


def config_from_hf(hf: dict[str, Any], where: Path | str = "config.json") -> ModelConfig:
    """Read a `config.json`, with the published keys or those that transformers 5 saves.

    `num_nextn_predict_layers` counts physical layers. How many depths a repeated head was trained for is kept under
    the key `mtpkit`; without it one physical layer counts as a repeated head of unknown depths, several as distinct
    heads. A key whose value is null counts as absent.

    Args:
        where: the file, for messages.

    Raises:
        UserError: names every missing key, unknown layer, and setting that is wrong or cannot be represented.
    """
    hf = {key: value for key, value in hf.items() if value is not None}
    raise_problems(where, list(_wrong_types(hf)))
    physical, own = hf.get("num_nextn_predict_layers", 0), hf.get("mtpkit", {})
    pattern = _read_pattern(hf, where, "hybrid_override_pattern", "layers_block_type")
    mtp_pattern = _read_pattern(hf, where, "mtp_hybrid_override_pattern", "mtp_layers_block_type") if physical else ""
    if "attention_head_dim" in hf:  # the name in the first Nemotron-H releases
        hf = {"head_dim": hf["attention_head_dim"]} | hf
    keys = _keys(pattern + mtp_pattern)
    problems = [f"missing key {key}" for key in keys if key not in OPTIONAL_KEYS and key not in hf]
    problems += _unsupported(hf, pattern, pattern + mtp_pattern)
    dt_limit = _read_dt_limit(hf)
    if dt_limit is None:
        problems.append(f"time_step_limit {shown(hf['time_step_limit'])} is not a list of two numbers, 0 <= low < high")
    depths, repeated = _read_depths(own, where, physical)
    if physical and physical != (1 if repeated else depths):
        problems.append(f"num_nextn_predict_layers {shown(physical)} contradicts mtpkit {shown(own)}")
    raise_problems(where, problems)
    fields: dict[str, Any] = {name: hf.get(key, OPTIONAL_KEYS.get(key)) for key, name in keys.items()}
    fields |= dict(
        family="nemotron_h",
        pattern=pattern,
        mtp_pattern=mtp_pattern,
        mtp_num_depths=1 if depths is None else depths,
        mtp_depths_known=depths is not None,
        mtp_use_repeated_layer=repeated,
        mamba_dt_limit=dt_limit or DT_LIMIT,
        eos_token_ids=as_token_ids(hf.get("eos_token_id")),
    )
    own_keys = dict(pattern="hybrid_override_pattern", mtp_pattern="mtp_hybrid_override_pattern")
    own_keys |= dict(mtp_num_depths="mtpkit.mtp_num_depths", eos_token_ids="eos_token_id")
    return config_of_file(where, own_keys | {name: key for key, name in keys.items()}, fields)


WHOLE_KEYS = (
    "num_nextn_predict_layers",
    "num_hidden_layers",
    "num_experts_per_tok",
    "n_shared_experts",
    "n_group",
    "topk_group",
)
"""Keys that are counted with before a `ModelConfig` checks its fields."""


def _wrong_types(hf: dict[str, Any]) -> Iterator[str]:
    """Yield one clause for every value of another type, of those that `ModelConfig` does not see as they are."""
    for key in WHOLE_KEYS:
        if type(hf.get(key, 0)) is not int or hf.get(key, 0) < 0:
            yield f"{key} {shown(hf[key])} is not a whole number from 0"
    if type(hf.get("norm_topk_prob", True)) is not bool:
        yield f"norm_topk_prob {shown(hf['norm_topk_prob'])} is not true or false"
    if not isinstance(hf.get("mtpkit", {}), dict):
        yield f"mtpkit {shown(hf['mtpkit'])} is not an object"


def _read_pattern(hf: dict[str, Any], where: Path | str, letters_key: str, blocks_key: str) -> str:
    """A layer pattern as letters, from whichever of its two keys is there."""
    if letters_key in hf:
        pattern = hf[letters_key]
        if not isinstance(pattern, str):
            raise UserError(f"{where}: {letters_key} {shown(pattern)} is not a text of layer letters")
        unknown = sorted(set(pattern) - set(LAYER_KINDS))
        if unknown:
            odd = listed(map(repr, unknown), width=60)
            raise UserError(f"{where}: {letters_key} has unknown layer letter(s) {odd}; known: M * - E")
        return pattern
    blocks = hf.get(blocks_key)
    if blocks is None:
        raise UserError(f"{where}: missing key {letters_key} (or {blocks_key})")
    if not isinstance(blocks, list):
        raise UserError(f"{where}: {blocks_key} {shown(blocks)} is not a list of layers")
    unknown = [shown(block) for block in blocks if not isinstance(block, str) or block not in BLOCK_TYPES]
    if unknown:
        odd = listed(dict.fromkeys(unknown), width=120)
        raise UserError(f"{where}: {blocks_key} has unknown layers {odd}; known: {listed(BLOCK_TYPES)}")
    return "".join(BLOCK_TYPES[block] for block in blocks)


def _read_dt_limit(hf: dict[str, Any]) -> tuple[float, float] | None:
    """(low, high) that clamp the step size dt after its softplus; None where `time_step_limit` is not such a pair.

    Megatron-LM, vLLM and the published code use `time_step_limit`, by default (0, inf): no clamp. The weights were
    trained so. Transformers clamps at `time_step_min` instead (seen up to 5.23), a bound that is meant for initial
    values of dt's bias alone; on Nemotron 3 Nano that moves the output by a mean KL of 0.03.
    """
    limit = hf.get("time_step_limit")
    if limit is None:
        return DT_LIMIT
    if not isinstance(limit, list) or len(limit) != 2:
        return None
    low, high = (math.inf if bound == INFINITY else bound for bound in limit)
    if any(type(bound) not in (int, float) for bound in (low, high)) or not 0 <= low < high:
        return None
    try:
        return float(low), float(high)
    except OverflowError:  # an integer that no float holds
        return None


def _read_depths(own: dict[str, Any], where: Path | str, physical: int) -> tuple[int | None, bool]:
    """(depths the heads were trained for, None where nothing says so; whether they share one layer).

    Args:
        own: what the file has under `mtpkit`.
    """
    repeated = own.get("mtp_use_repeated_layer", physical <= 1)
    depths = own.get("mtp_num_depths", None if repeated else physical)
    unknown = sorted(own.keys() - {"mtp_num_depths", "mtp_use_repeated_layer"})
    problems = [f"mtpkit.{key} is unknown" for key in unknown]
    if type(repeated) is not bool:
        problems.append(f"mtpkit.mtp_use_repeated_layer {shown(repeated)} is not true or false")
    if type(depths) is not int and "mtp_num_depths" in own:
        problems.append(f"mtpkit.mtp_num_depths {shown(depths)} is not a whole number")
    raise_problems(where, problems)
    return (depths, repeated) if physical else (0, True)


def _unsupported(hf: dict[str, Any], pattern: str, letters: str) -> list[str]:
    """Clauses for settings that would change what the model computes and that it cannot represent."""
    problems = [
        f"{key} {shown(hf[key])} is not supported, only {value!r}"
        for key, value in FIXED.items()
        if key in hf and (type(hf[key]), hf[key]) != (type(value), value)
    ]
    if hf.get("num_hidden_layers", len(pattern)) != len(pattern):
        problems.append(f"num_hidden_layers {shown(hf['num_hidden_layers'])} but the pattern has {len(pattern)} layers")
    if "E" not in letters:
        return problems
    topk = hf.get("num_experts_per_tok", 0)
    if hf.get("n_shared_experts", 1) != 1:
        problems.append(f"n_shared_experts {shown(hf['n_shared_experts'])} is not supported, only 1")
    if hf.get("norm_topk_prob", True) != (topk > 1):
        problems.append("norm_topk_prob must be true with num_experts_per_tok above 1 and false with 1, as in Megatron")
    if hf.get("n_group", 1) > 1 and topk != 2 * hf.get("topk_group", 1):
        # Transformers ranks a group by its two best experts, Megatron by its topk / topk_group best.
        problems.append("n_group above 1 needs num_experts_per_tok equal to twice topk_group")
    return problems


def config_to_hf(config: ModelConfig, original: dict[str, Any] | None = None) -> dict[str, Any]:
    """A `config.json` that transformers 5 and vLLM both read, with the published keys.

    `original` is the config that the base came with; its other keys are kept.

    Raises:
        UserError: settings that Nemotron-H has no key for, all of them named.
    """
    _require_representable(config)
    hf = dict(original or {})
    for key in ("layers_block_type", "layer_types", "mtp_layers_block_type", "mtp_hybrid_override_pattern", "mtpkit"):
        hf.pop(key, None)
    letters = config.pattern + config.mtp_pattern
    hf |= {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h"}
    hf |= {key: value for key, value in FIXED.items() if value is not None}
    hf |= {key: getattr(config, name) for key, name in _keys(letters).items()}
    hf |= {"num_hidden_layers": len(config.pattern), "hybrid_override_pattern": config.pattern}
    if "M" in letters:
        hf |= _dt_keys(config, original)
    if "E" in letters:
        normalised = config.moe_router_topk > 1
        hf |= {"n_shared_experts": 1, "norm_topk_prob": normalised, "moe_latent_size": config.moe_latent_size or None}
    eos = list(config.eos_token_ids)
    hf["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
    hf["num_nextn_predict_layers"] = config.num_mtp_layers
    if config.mtp_num_depths:
        hf["mtp_hybrid_override_pattern"] = config.mtp_pattern
    if config.mtp_num_depths and config.mtp_depths_known:
        depths, repeated = config.mtp_num_depths, config.mtp_use_repeated_layer
        hf["mtpkit"] = {"mtp_num_depths": depths, "mtp_use_repeated_layer": repeated}
    return hf


def _dt_keys(config: ModelConfig, original: dict[str, Any] | None) -> dict[str, Any]:
    """The config keys of dt's range: none where `original` says the same, so that its own keys stay.

    Transformers clamps at `time_step_min`, so where the original does not have it, it is the low end of the range.
    """
    if original is not None and _read_dt_limit(original) == config.mamba_dt_limit:
        return {}
    low, high = config.mamba_dt_limit
    return {"time_step_limit": [low, INFINITY if high == math.inf else high], "time_step_min": low}


def _require_representable(config: ModelConfig) -> None:
    problems = []
    if config.position_embedding_type != "none":
        problems.append(f"position_embedding_type {config.position_embedding_type}")
    if config.activation != "relu2":
        problems.append(f"activation {config.activation}")
    if config.qk_layernorm:
        problems.append("qk_layernorm")
    if config.tie_word_embeddings:
        problems.append("tie_word_embeddings")
    if "E" in config.pattern + config.mtp_pattern and not config.moe_shared_expert_intermediate_size:
        problems.append("experts without a shared expert")
    if problems:
        raise UserError(f"a nemotron_h config.json cannot express: {listed(problems)}")
