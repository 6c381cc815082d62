"""ModelConfig: every message names its field; dictionaries round-trip; errors carry exit codes."""

import dataclasses
import json

import pytest

from mtpkit.config import ModelConfig
from mtpkit.config.sections import MoeConfig
from mtpkit.errors import MtpkitError, StorageError, UserError
from tests.shared import each
from tests.toy_config import toy_config

VALUES = toy_config(
    pattern="M*-E", mtp_num_depths=2, num_moe_experts=4, moe_ffn_hidden_size=16
).values()

SOFTMAX = dict(moe_router_score_function="softmax", moe_router_enable_expert_bias=False)

ORDER = [
    *("family", "vocab_size", "hidden_size", "pattern", "max_position_embeddings"),
    *("mtp_pattern", "mtp_num_depths", "mtp_depths_known", "mtp_use_repeated_layer"),
    *("num_attention_heads", "num_query_groups", "kv_channels", "position_embedding_type"),
    *("rotary_base", "rotary_percent", "qk_layernorm", "ffn_hidden_size", "activation"),
    *(
        "mamba_num_heads",
        "mamba_head_dim",
        "mamba_state_dim",
        "mamba_num_groups",
        "mamba_conv_kernel",
    ),
    *(
        "mamba_chunk_size",
        "mamba_dt_limit",
        "num_moe_experts",
        "moe_router_topk",
        "moe_ffn_hidden_size",
    ),
    *("moe_shared_expert_intermediate_size", "moe_latent_size", "moe_router_topk_scaling_factor"),
    *(
        "moe_router_num_groups",
        "moe_router_group_topk",
        "layernorm_epsilon",
        "tie_word_embeddings",
        "init_std",
    ),
    *("bos_token_id", "eos_token_ids", "pad_token_id"),
]
"""Some keys of `mtpkit.json`, in their order."""


def test_files_have_the_keys_of_the_models_layers():
    values = ModelConfig.of(**VALUES).to_dict()
    assert [key for key in values if key in ORDER] == ORDER
    assert "attention_output_gate" in values and "mtp_reads_of_base" in values
    assert not [key for key in values if key.startswith("linear_")]
    plain = toy_config(
        pattern="*", mtp_pattern="", mtp_num_depths=0, mamba_num_heads=0, ffn_hidden_size=0
    ).to_dict()
    assert "num_attention_heads" in plain and "num_moe_experts" not in plain


def test_sizes_of_layers_that_are_not_there_are_kept():
    config = toy_config(pattern="*", mtp_pattern="*")
    assert config.to_dict()["mamba_num_heads"] == 4
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_files_may_lack_settings_that_have_their_defaults():
    """As files of earlier versions do."""
    config = ModelConfig.of(**VALUES)
    values = config.to_dict()
    assert values.keys() > set(ORDER)
    assert ModelConfig.from_dict({key: values[key] for key in ORDER}) == config


def test_departures_are_settings_of_the_layers_asked_for():
    later = dict(layernorm_zero_centered_gamma=True, attention_output_gate=True)
    config = ModelConfig.of(**VALUES | later)
    assert config.departures("*").items() >= later.items()
    assert "mamba_num_heads" not in config.departures("*")
    assert "mamba_num_heads" in config.departures("M*")
    others = config.replace(pattern="-", mtp_pattern="-").departures("*-")
    assert "attention_output_gate" not in others and "layernorm_zero_centered_gamma" in others


@each(
    ("changes", "named"),
    [
        (
            dict(position_embedding_type="rope", rotary_percent=0.4),
            ["rotary_percent 0.4", "kv_channels 8", "3 channels"],
        ),
        (dict(moe_router_score_function="softmax"), ["moe_router_enable_expert_bias", "'softmax'"]),
        (dict(moe_router_pre_softmax=True), ["moe_router_pre_softmax", "'softmax'"]),
        (
            dict(SOFTMAX, moe_router_normalize=True),
            ["moe_router_normalize", "moe_router_pre_softmax"],
        ),
        (dict(SOFTMAX, moe_router_num_groups=2), ["moe_router_num_groups 2", "'softmax'"]),
        (
            dict(moe_shared_expert_gate=True),
            ["moe_shared_expert_gate", "moe_shared_expert_intermediate_size"],
        ),
        (
            dict(moe_router_num_groups=2, moe_router_group_best=3),
            ["best 3", "group of 2", "moe_router_group_best"],
        ),
        (dict(moe_router_num_groups=2, moe_router_topk=3), ["moe_router_topk 3", "groups of 2"]),
        (dict(pattern="MX*Q"), ["pattern", "'Q'", "'X'", "M (Mamba2)"]),
        (dict(mtp_pattern="*?"), ["mtp_pattern", "'?'"]),
        (dict(pattern=""), ["pattern is empty"]),
        (dict(mtp_pattern=""), ["mtp_pattern", "mtp_num_depths"]),
        (dict(mtp_num_depths=0), ["mtp_pattern", "mtp_num_depths"]),
        (dict(mtp_num_depths=-1), ["mtp_num_depths"]),
        (dict(mtp_depths_known=False), ["mtp_depths_known", "mtp_num_depths 1"]),
        (
            dict(mtp_depths_known=False, mtp_num_depths=1, mtp_use_repeated_layer=False),
            ["mtp_depths_known"],
        ),
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
        (
            dict(position_embedding_type="yarn"),
            ["position_embedding_type", "'yarn'", "none", "rope"],
        ),
        (dict(activation="gelu"), ["activation", "'gelu'", "relu2", "swiglu"]),
        (dict(hidden_size="32"), ["hidden_size", "'32'"]),
        (dict(vocab_size=None), ["vocab_size", "None"]),
        (dict(vocab_size=64.5), ["vocab_size", "64.5"]),
        (dict(layernorm_epsilon="x"), ["layernorm_epsilon is 'x', must be a finite number"]),
        (dict(init_std=float("nan")), ["init_std is nan, must be a finite number"]),
        (
            dict(pattern="+-", mtp_pattern="*"),
            ["multi-head latent attention and attention (+, *)", "one model"],
        ),
        (
            dict(pattern="+", mtp_pattern="+", kv_lora_rank=0, v_head_dim=0),
            ["kv_lora_rank, v_head_dim"],
        ),
        (
            dict(pattern="+", mtp_pattern="+", qk_pos_emb_head_dim=5),
            ["qk_pos_emb_head_dim 5 is odd"],
        ),
        (
            dict(pattern="+", mtp_pattern="+", q_lora_rank=4, q_proj_layernorm=True),
            ["q_proj_layernorm", "q_lora_rank 0"],
        ),
        (
            dict(pattern="+", mtp_pattern="+", beta_slow=40),
            ["beta_slow 40 must be below beta_fast 32"],
        ),
        (
            dict(rotary_base=10**30),
            ["rotary_base is 1000000000000000000000000000000, must be from 1 to 1e+15"],
        ),
        (dict(tie_word_embeddings=1), ["tie_word_embeddings is 1, must be True or False"]),
        (dict(bos_token_id="<s>"), ["bos_token_id is '<s>', must be a whole number or None"]),
        (dict(vocab_size=64, eos_token_ids=(63, 64)), ["eos_token_ids 64 is not in the"]),
        (dict(pattern="E" * 9, num_moe_experts=2**14), ["in all layers are 147456"]),
        (
            dict(eos_token_ids=("</s>",)),
            ["eos_token_ids is ('</s>',), must be a list of whole numbers"],
        ),
        (
            dict(mamba_dt_limit=(0.1, None)),
            ["mamba_dt_limit is (0.1, None), must be a list of 2 finite numbers"],
        ),
    ],
)
def test_messages_name_the_field(changes, named):
    with pytest.raises(UserError) as error:
        ModelConfig.of(**VALUES | changes)
    message = str(error.value)
    assert message.startswith("model config: ") and "\n" not in message
    assert all(part in message for part in named), message


def test_all_problems_at_once():
    with pytest.raises(UserError) as error:
        ModelConfig.of(**VALUES | dict(pattern="Z", vocab_size=0, hidden_size=0, mtp_num_depths=0))
    assert all(
        part in str(error.value) for part in ("'Z'", "mtp_num_depths", "vocab_size", "hidden_size")
    )


def test_sizes_of_absent_layers_are_not_asked_for():
    config = ModelConfig.of(family="nemotron_h", vocab_size=8, hidden_size=8, pattern="*")
    assert (config.mtp.num_layers, config.hybrid_layer_pattern) == (0, "*")


@each(
    ("changes", "physical", "pattern"),
    [
        ({}, 1, "M*-E/*-/*-"),
        (dict(mtp_use_repeated_layer=False), 2, "M*-E/*-/*-"),
        (dict(mtp_pattern="", mtp_num_depths=0), 0, "M*-E"),
        (dict(mtp_pattern="", mtp_num_depths=0, mtp_use_repeated_layer=False), 0, "M*-E"),
    ],
)
def test_physical_layers_and_depths(changes, physical, pattern):
    config = ModelConfig.of(**VALUES | changes)
    assert (config.mtp.num_layers, config.hybrid_layer_pattern) == (physical, pattern)


@pytest.mark.parametrize(
    "changes",
    [{}, dict(mamba_dt_limit=(0.01, 0.5)), dict(eos_token_ids=(1, 2), bos_token_id=0)],
    ids=str,
)
def test_round_trip_through_json(changes):
    config = ModelConfig.of(**VALUES | changes)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@each(
    ("changes", "says"),
    [
        (
            dict(mtp_reads_of_depth="before_norm"),
            "mtp_reads_of_depth is 'before_norm', must be 'after_final_norm' or",
        ),
        (
            dict(mtp_reads_of_base="logits"),
            "mtp_reads_of_base is 'logits', must be 'after_final_norm' or",
        ),
        (
            dict(mtp_zero_first_embedding="no"),
            "mtp_zero_first_embedding is 'no', must be True or False",
        ),
        (dict(mtp={}), "mtp is unknown"),
        (dict(sections=[], pattern=3), "sections is unknown; pattern is 3, must be a text"),
        (
            dict(mamba_num_heads=-1, eos_token_ids=(3, 99)),
            "mamba_num_heads is -1, .*; eos_token_ids 99 is not in the",
        ),
    ],
)
def test_what_no_file_may_say(changes, says):
    with pytest.raises(UserError, match=says):
        ModelConfig.from_dict(ModelConfig.of(**VALUES).to_dict() | changes)


def test_files_say_what_heads_read_where_it_differs():
    rules = {"mtp_reads_of_base": "before_final_norm", "mtp_reads_of_depth": "before_final_norm"}
    rules |= {"mtp_zero_first_embedding": True}
    values = ModelConfig.of(**VALUES | rules).to_dict()
    assert rules.items() <= values.items() and ModelConfig.from_dict(values).to_dict() == values


def test_files_keep_their_keys_in_order_and_numbers_as_written():
    values = ModelConfig.of(**VALUES | dict(rotary_base=10000, layernorm_epsilon=1e-6)).to_dict()
    assert [key for key in values if key in ORDER] == ORDER
    assert json.dumps(values["rotary_base"]) == "10000"


def test_sections_that_are_defaults_are_the_same_as_none():
    config = toy_config(pattern="M", mtp_pattern="", mtp_num_depths=0)
    assert dataclasses.replace(config, sections=(MoeConfig(), *config.sections[::-1])) == config
    assert config.moe == MoeConfig() and config.mamba2.num_heads == 4


def test_unknown_and_missing_keys_are_all_named():
    values = {key: value for key, value in VALUES.items() if key not in ("vocab_size", "pattern")}
    with pytest.raises(UserError) as error:
        ModelConfig.from_dict(values | {"hidden_sizes": 3, "experts": 4})
    assert all(
        name in str(error.value) for name in ("hidden_sizes", "experts", "vocab_size", "pattern")
    )


@pytest.mark.parametrize(
    ("changes", "default", "adaptive"),
    [
        ({}, 2, 2),
        (dict(mtp_num_depths=1, mtp_depths_known=False), 3, 7),
        (dict(mtp_pattern="", mtp_num_depths=0), 0, 0),
    ],
)
def test_how_many_drafts_a_head_makes(changes, default, adaptive):
    config = ModelConfig.of(**VALUES | changes)
    assert (config.mtp.default_drafts, config.mtp.most_adaptive_drafts) == (default, adaptive)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_replace_checks_again():
    config = ModelConfig.of(**VALUES)
    assert config.replace(hidden_size=64).hidden_size == 64
    with pytest.raises(UserError, match="hidden_size"):
        config.replace(hidden_size=0)


@pytest.mark.parametrize(
    ("kind", "code", "also"),
    [(MtpkitError, 1, Exception), (UserError, 2, ValueError), (StorageError, 1, OSError)],
)
def test_exit_codes(kind, code, also):
    error = kind("what is wrong")
    assert isinstance(error, MtpkitError) and isinstance(error, also)
    assert error.exit_code == code and str(error) == "what is wrong"
