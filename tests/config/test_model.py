"""ModelConfig: every message names its field; dictionaries round-trip; errors carry exit codes."""

import json

import pytest

from mtpkit.config import ModelConfig
from mtpkit.errors import MtpkitError, StorageError, UserError
from tests.toy_config import toy_config

VALUES = vars(toy_config(pattern="M*-E", mtp_num_depths=2, num_moe_experts=4, moe_ffn_hidden_size=16))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(pattern="MX*Q"), ["pattern", "'Q'", "'X'", "M (Mamba2)"]),
        (dict(mtp_pattern="*?"), ["mtp_pattern", "'?'"]),
        (dict(pattern=""), ["pattern is empty"]),
        (dict(mtp_pattern=""), ["mtp_pattern", "mtp_num_depths"]),
        (dict(mtp_num_depths=0), ["mtp_pattern", "mtp_num_depths"]),
        (dict(mtp_num_depths=-1), ["mtp_num_depths"]),
        (dict(mtp_depths_known=False), ["mtp_depths_known", "mtp_num_depths 1"]),
        (dict(mtp_depths_known=False, mtp_num_depths=1, mtp_use_repeated_layer=False), ["mtp_depths_known"]),
        (dict(vocab_size=0), ["vocab_size"]),
        (dict(hidden_size=-4), ["hidden_size"]),
        (dict(max_position_embeddings=0), ["max_position_embeddings"]),
        (dict(num_attention_heads=0), ["num_attention_heads"]),
        (dict(num_query_groups=0), ["num_query_groups"]),
        (dict(kv_channels=0), ["kv_channels"]),
        (dict(ffn_hidden_size=0), ["ffn_hidden_size"]),
        (dict(mamba_num_heads=0), ["mamba_num_heads"]),
        (dict(mamba_head_dim=0), ["mamba_head_dim"]),
        (dict(mamba_state_dim=0), ["mamba_state_dim"]),
        (dict(mamba_num_groups=0), ["mamba_num_groups"]),
        (dict(mamba_conv_kernel=0), ["mamba_conv_kernel"]),
        (dict(mamba_chunk_size=0), ["mamba_chunk_size"]),
        (dict(num_moe_experts=0), ["num_moe_experts"]),
        (dict(moe_ffn_hidden_size=0), ["moe_ffn_hidden_size"]),
        (dict(moe_router_topk=0), ["moe_router_topk"]),
        (dict(num_query_groups=3), ["num_attention_heads 4", "num_query_groups 3"]),
        (dict(mamba_num_groups=3), ["mamba_num_heads 4", "mamba_num_groups 3"]),
        (dict(moe_router_topk=5), ["moe_router_topk 5", "num_moe_experts 4"]),
        (dict(moe_router_num_groups=3), ["num_moe_experts 4", "moe_router_num_groups 3"]),
        (dict(moe_router_group_topk=2), ["moe_router_group_topk 2", "moe_router_num_groups 1"]),
        (dict(position_embedding_type="yarn"), ["position_embedding_type", "'yarn'", "none", "rope"]),
        (dict(activation="gelu"), ["activation", "'gelu'", "relu2", "swiglu"]),
        (dict(hidden_size="32"), ["hidden_size", "'32'"]),
        (dict(vocab_size=None), ["vocab_size", "None"]),
        (dict(vocab_size=64.5), ["vocab_size", "64.5"]),
        (dict(layernorm_epsilon="x"), ["layernorm_epsilon 'x' is not a number"]),
        (dict(init_std=float("nan")), ["init_std nan is not a number"]),
        (dict(rotary_base=10**30), ["rotary_base 1000000000000000000000000000000 is not a number"]),
        (dict(tie_word_embeddings=1), ["tie_word_embeddings 1 is not true or false"]),
        (dict(bos_token_id="<s>"), ["bos_token_id '<s>' is not a whole number, or nothing"]),
        (dict(eos_token_ids=("</s>",)), ["eos_token_ids ('</s>',) is not whole numbers"]),
        (dict(mamba_dt_limit=(0.1, None)), ["mamba_dt_limit (0.1, None) is not two numbers"]),
    ],
    ids=str,
)
def test_messages_name_the_field(changes, named):
    with pytest.raises(UserError) as error:
        ModelConfig(**VALUES | changes)
    message = str(error.value)
    assert message.startswith("model config: ") and "\n" not in message
    assert all(part in message for part in named), message


def test_all_problems_at_once():
    with pytest.raises(UserError) as error:
        ModelConfig(**VALUES | dict(pattern="Z", vocab_size=0, hidden_size=0, mtp_num_depths=0))
    assert all(part in str(error.value) for part in ("'Z'", "mtp_num_depths", "vocab_size", "hidden_size"))


def test_sizes_of_absent_layers_are_not_asked_for():
    config = ModelConfig(family="nemotron_h", vocab_size=8, hidden_size=8, pattern="*")
    assert (config.num_mtp_layers, config.hybrid_layer_pattern) == (0, "*")


@pytest.mark.parametrize(
    ("changes", "physical", "pattern"),
    [
        ({}, 1, "M*-E/*-/*-"),
        (dict(mtp_use_repeated_layer=False), 2, "M*-E/*-/*-"),
        (dict(mtp_pattern="", mtp_num_depths=0), 0, "M*-E"),
        (dict(mtp_pattern="", mtp_num_depths=0, mtp_use_repeated_layer=False), 0, "M*-E"),
    ],
)
def test_physical_layers_and_depths(changes, physical, pattern):
    config = ModelConfig(**VALUES | changes)
    assert (config.num_mtp_layers, config.hybrid_layer_pattern) == (physical, pattern)


@pytest.mark.parametrize(
    "changes", [{}, dict(mamba_dt_limit=(0.01, 0.5)), dict(eos_token_ids=(1, 2), bos_token_id=0)], ids=str
)
def test_round_trip_through_json(changes):
    config = ModelConfig(**VALUES | changes)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_and_missing_keys_are_all_named():
    values = {key: value for key, value in VALUES.items() if key not in ("vocab_size", "pattern")}
    with pytest.raises(UserError) as error:
        ModelConfig.from_dict(values | {"hidden_sizes": 3, "experts": 4})
    assert all(name in str(error.value) for name in ("hidden_sizes", "experts", "vocab_size", "pattern"))


@pytest.mark.parametrize(
    ("changes", "default", "adaptive"),
    [
        ({}, 2, 2),
        (dict(mtp_num_depths=1, mtp_depths_known=False), 3, 7),
        (dict(mtp_pattern="", mtp_num_depths=0), 0, 0),
    ],
)
def test_how_many_drafts_a_head_makes(changes, default, adaptive):
    config = ModelConfig(**VALUES | changes)
    assert (config.default_num_speculative_tokens, config.max_adaptive_tokens) == (default, adaptive)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_replace_checks_again():
    config = ModelConfig(**VALUES)
    assert config.replace(hidden_size=64).hidden_size == 64
    with pytest.raises(UserError, match="hidden_size"):
        config.replace(hidden_size=0)


@pytest.mark.parametrize(
    ("kind", "code", "also"), [(MtpkitError, 1, Exception), (UserError, 2, ValueError), (StorageError, 1, OSError)]
)
def test_exit_codes(kind, code, also):
    error = kind("what is wrong")
    assert isinstance(error, MtpkitError) and isinstance(error, also)
    assert error.exit_code == code and str(error) == "what is wrong"
