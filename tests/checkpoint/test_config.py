"""Configs of both sides, and the keys that servers read."""

import argparse
import dataclasses
import json
import logging
import shutil

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from mtpkit import LLM
from mtpkit.checkpoint import load_config, load_model, save_checkpoint
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.families.keys import RULE_KEYS
from mtpkit.checkpoint.families.nemotron_h import NEMOTRON_H
from mtpkit.checkpoint.layouts.megatron import config_from_megatron
from mtpkit.checkpoint.verify import compare_weights
from mtpkit.config import MtpConfig
from mtpkit.config.sections import MlaConfig
from mtpkit.engine.loading import resolve_drafts
from mtpkit.errors import UserError
from tests.checkpoint.builders import GOLDEN, edit_config
from tests.shared import each


def test_both_spellings_of_a_pattern(hf_dir):
    first = load_config(hf_dir)
    assert (first.pattern, first.mtp.pattern, first.mtp.num_depths, first.mtp.num_layers) == (
        "M*-E",
        "*E",
        3,
        1,
    )
    edit_config(hf_dir, layers_block_type=["mamba", "attention", "mlp", "moe"])
    assert load_config(hf_dir) == first
    edit_config(
        hf_dir,
        layers_block_type=None,
        hybrid_override_pattern="M*-E",
        mtp_hybrid_override_pattern=None,
    )
    edit_config(hf_dir, mtp_layers_block_type=["full_attention", "moe"])
    assert load_config(hf_dir) == first


@each(
    ("physical", "own", "depths", "repeated", "known"),
    [
        (1, None, 1, True, False),
        (1, {"mtp_use_repeated_layer": True}, 1, True, False),
        (1, {"mtp_num_depths": 1}, 1, True, True),
        (1, {"mtp_num_depths": 5}, 5, True, True),
        (1, {"mtp_use_repeated_layer": False}, 1, False, True),
        (3, None, 3, False, True),
    ],
)
def test_depths_as_the_file_has_them(hf_dir, physical, own, depths, repeated, known):
    edit_config(hf_dir, mtpkit=own, num_nextn_predict_layers=physical)
    config = load_config(hf_dir)
    assert (config.mtp.num_depths, config.mtp.repeated, config.mtp.depths_known) == (
        depths,
        repeated,
        known,
    )


def test_unknown_depths_stay_unknown_until_a_training_sets_them(hf_dir, tmp_path):
    edit_config(hf_dir, mtpkit=None)
    import_checkpoint(hf_dir, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    config = load_config(hf_dir)
    assert not config.mtp.depths_known
    assert load_config(tmp_path / "megatron") == load_config(tmp_path / "back") == config
    trained = config.replace(mtp_num_depths=2)
    exported = NEMOTRON_H.config_to_hf(trained, json.loads((hf_dir / "config.json").read_text()))
    assert trained.mtp.depths_known and NEMOTRON_H.config_from_hf(exported) == trained


def test_a_head_of_unknown_depths_drafts_without_a_warning(hf_dir, caplog):
    edit_config(hf_dir, mtpkit=None)
    assert resolve_drafts(load_config(hf_dir), None) == 3
    caplog.set_level(logging.INFO)
    small = dict(device="cpu", num_blocks=8, max_model_len=64, warm_up=False, max_num_seqs=2)
    for k in (1, 3, 9):
        LLM(hf_dir, num_speculative_tokens=k, **small)
    llm = LLM(hf_dir, num_speculative_tokens="auto", **small)
    assert llm.engine.config.num_speculative_tokens == 7
    assert "not trained" not in caplog.text


BEFORE = "before_final_norm"


@each(
    ("usual", "own", "found"),
    [
        ({}, {}, {}),
        ({}, {"mtp_reads_of_base": BEFORE}, {"mtp_reads_of_base": BEFORE}),
        ({"mtp_reads_of_depth": BEFORE}, {}, {"mtp_reads_of_depth": BEFORE}),
        ({"mtp_reads_of_depth": BEFORE}, {"mtp_reads_of_depth": "after_final_norm"}, {}),
        ({"mtp_zero_first_embedding": True}, {"mtp_zero_first_embedding": False}, {}),
        ({}, {"mtp_zero_first_embedding": True}, {"mtp_zero_first_embedding": True}),
        ({}, {"mtp_attention_window": 9}, {"mtp_attention_window": 9}),
        (
            {"mtp_reads_of_base": BEFORE},
            {"mtp_reads_of_depth": BEFORE},
            dict.fromkeys(RULE_KEYS[:2], BEFORE),
        ),
    ],
)
@each("depths", [{}, {"mtp_num_depths": 3}])
def test_heads_read_what_their_family_says_or_their_own_file(hf_dir, usual, own, found, depths):
    """What differs from the family is written again, and nothing else; so for a base without
    heads."""
    family = dataclasses.replace(NEMOTRON_H, head_rules=usual)
    hf = json.loads((hf_dir / "config.json").read_text()) | {"mtpkit": own | depths}
    for heads in (1, 0):
        file = hf | {"num_nextn_predict_layers": heads, **({} if heads else {"mtpkit": own})}
        config = family.config_from_hf(file)
        assert config.mtp.rules == MtpConfig().rules | found
        written = family.config_to_hf(config, file)
        assert family.config_from_hf(written) == config
        assert {
            key: value for key, value in written.get("mtpkit", {}).items() if key in RULE_KEYS
        } == own


def test_a_rule_that_is_none_is_refused_by_its_key(hf_dir):
    edit_config(hf_dir, mtpkit={"mtp_reads_of_base": "logits"})
    with pytest.raises(
        UserError,
        match=r"config\.json: mtpkit\.mtp_reads_of_base is 'logits', must be 'after_final_no",
    ):
        load_config(hf_dir)


@pytest.mark.parametrize(
    ("own", "says"),
    [
        *(
            ({"mtp_num_depths": v}, "mtp_num_depths")
            for v in ("three", [], {}, None, 2.7, 3.0, True, "3", 0, -1)
        ),
        *(
            ({"mtp_use_repeated_layer": v}, "mtp_use_repeated_layer")
            for v in ("true", [], {}, None, 1, 0.0)
        ),
        ({"mtp_depths": 3}, "mtpkit.mtp_depths is unknown"),
    ],
    ids=str,
)
def test_mtpkits_own_keys_are_checked(hf_dir, own, says):
    edit_config(hf_dir, mtpkit=own)
    with pytest.raises(UserError, match=says):
        load_config(hf_dir)


@each(
    ("changes", "says"),
    [
        (
            {"num_nextn_predict_layers": "one"},
            "num_nextn_predict_layers 'one' is not a whole number",
        ),
        ({"mtpkit": 3}, "mtpkit 3 is not an object"),
        (
            {"hybrid_override_pattern": ["M"]},
            "hybrid_override_pattern .* is not a text of layer letters",
        ),
        (
            {"hybrid_override_pattern": None, "layers_block_type": "mamba"},
            "layers_block_type 'mamba' is not a list",
        ),
        ({"hybrid_override_pattern": None, "layers_block_type": [["mamba"]]}, "has unknown layers"),
        ({"layer_norm_epsilon": "small"}, "layer_norm_epsilon is 'small', must be a finite number"),
        ({"eos_token_id": "</s>"}, "eos_token_id .* whole numbers"),
    ],
)
def test_values_of_another_type_are_named(hf_dir, tmp_path, changes, says):
    directory = shutil.copytree(hf_dir, tmp_path / "model")
    edit_config(directory, **changes)
    with pytest.raises(UserError, match=says):
        load_config(directory)


INF = float("inf")


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"time_step_limit": None, "time_step_min": 0.001}, (0.0, INF)),
        ({"time_step_limit": None, "time_step_min": None}, (0.0, INF)),
        ({"time_step_limit": [0.0, INF]}, (0.0, INF)),
        ({"time_step_limit": [0.0, {"__float__": "Infinity"}]}, (0.0, INF)),
        ({"time_step_limit": [0.25, {"__float__": "Infinity"}]}, (0.25, INF)),
        ({"time_step_limit": [0, 3]}, (0.0, 3.0)),
    ],
)
def test_dt_has_the_range_of_time_step_limit(hf_dir, changes, limit):
    """As in Megatron-LM and vLLM: `time_step_min`, which transformers clamps at, is for initial
    values alone."""
    edit_config(hf_dir, **changes)
    config = load_config(hf_dir)
    assert config.mamba2.dt_limit == limit
    original = json.loads((hf_dir / "config.json").read_text())
    for exported in (NEMOTRON_H.config_to_hf(config, original), NEMOTRON_H.config_to_hf(config)):
        assert NEMOTRON_H.config_from_hf(json.loads(json.dumps(exported))) == config
    keys = ("time_step_limit", "time_step_min")
    exported = NEMOTRON_H.config_to_hf(config, original)
    assert [exported.get(key) for key in keys] == [original.get(key) for key in keys], (
        "a base keeps its own keys"
    )


def test_transformers_computes_an_exported_range(hf_dir):
    """Without a config to keep, its bound `time_step_min` is the low end, and infinity is written
    in its own way."""
    from transformers import NemotronHConfig

    config = load_config(hf_dir)
    (hf_dir / "config.json").write_text(
        json.dumps(NEMOTRON_H.config_to_hf(config), allow_nan=False)
    )
    read = NemotronHConfig.from_pretrained(hf_dir)
    assert (read.time_step_min, *read.time_step_limit) == (0.0, 0.0, INF)
    changed = NEMOTRON_H.config_to_hf(
        config.replace(mamba_dt_limit=(0.5, INF)), {"time_step_min": 0.001}
    )
    assert (changed["time_step_min"], changed["time_step_limit"][0]) == (0.5, 0.5)


@each(
    "limit",
    [3, [1], [], "x", True, {}, [0, 1, 2], [None, 1], [0, "1"], [0, True], [2, 1], [1, 1], [-1, 1],
     [0, float("nan")], [INF, INF], [10**400, 10**401], [0, {"__float__": "NaN"}], [[0], 1]],

)  # fmt: skip
def test_a_range_of_dt_that_is_none_is_refused(hf_dir, limit):
    edit_config(hf_dir, time_step_limit=limit)
    with pytest.raises(UserError, match=r"time_step_limit .* is not a list of two numbers"):
        load_config(hf_dir)


def test_export_writes_what_servers_read_and_keeps_the_rest(hf_dir):
    original = json.loads((hf_dir / "config.json").read_text()) | {
        "rope_theta": 10000,
        "eos_token_id": [2, 5],
    }
    config = NEMOTRON_H.config_from_hf(original)
    exported = NEMOTRON_H.config_to_hf(config, original)
    assert (
        exported["hybrid_override_pattern"] == "M*-E"
        and exported["mtp_hybrid_override_pattern"] == "*E"
    )
    assert "layers_block_type" not in exported and "mtp_layers_block_type" not in exported
    assert exported["num_nextn_predict_layers"] == 1, "physical layers, not the 3 depths"
    assert exported["rope_theta"] == 10000 and exported["eos_token_id"] == [2, 5]
    assert NEMOTRON_H.config_from_hf(exported) == config
    bare = NEMOTRON_H.config_to_hf(config.replace(mtp_pattern="", mtp_num_depths=0), exported)
    assert (
        bare["num_nextn_predict_layers"] == 0
        and "mtpkit" not in bare
        and "mtp_hybrid_override_pattern" not in bare
    )


def test_golden_configs():
    config = load_config(GOLDEN / "tp2/moe")
    assert (config.hybrid_layer_pattern, config.mtp.num_depths, config.mtp.num_layers) == (
        "ME*E/*E/*E",
        2,
        1,
    )
    assert (config.moe.router_topk_scaling_factor, config.moe.shared_expert_intermediate_size) == (
        2.5,
        64,
    )
    assert not load_config(GOLDEN / "tp1/distinct_heads").mtp.repeated


def megatron_args(**changes) -> dict:
    """Arguments as Megatron-LM saves them."""
    values = dict(
        padded_vocab_size=256,
        hidden_size=64,
        hybrid_override_pattern="M-*-",
        mtp_hybrid_override_pattern="*-",
        mtp_num_layers=2,
        mtp_use_repeated_layer=True,
        num_attention_heads=4,
        group_query_attention=False,
        num_query_groups=1,
        kv_channels=16,
        ffn_hidden_size=128,
        squared_relu=True,
        swiglu=False,
        position_embedding_type="none",
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
        norm_epsilon=1e-6,
        normalization="RMSNorm",
        mamba_num_heads=8,
        mamba_head_dim=16,
        mamba_state_dim=16,
        mamba_num_groups=2,
    )
    return values | changes


def test_megatron_lm_arguments():
    config = config_from_megatron(megatron_args())
    assert (config.hybrid_layer_pattern, config.mtp.num_layers, config.layernorm_epsilon) == (
        "M-*-/*-/*-",
        1,
        1e-6,
    )
    assert config.attention.num_query_groups == 4, (
        "without group_query_attention every head has its own"
    )
    assert config_from_megatron(megatron_args(mamba_num_heads=None)) == config, (
        "2 x hidden_size / mamba_head_dim"
    )
    gated = config_from_megatron(megatron_args(apply_layernorm_1p=True, attention_output_gate=True))
    assert gated == config.replace(layernorm_zero_centered_gamma=True, attention_output_gate=True)
    assert config_from_megatron(
        megatron_args(layernorm_zero_centered_gamma=True)
    ).layernorm_zero_centered_gamma
    experts = dict(
        hybrid_override_pattern="ME",
        num_experts=4,
        moe_ffn_hidden_size=8,
        mtp_hybrid_override_pattern="*E",
    )
    softmax = dict(moe_router_score_function="softmax", moe_router_enable_expert_bias=False)
    for values, normalize in (
        (dict(moe_router_pre_softmax=False, **softmax), True),
        (dict(moe_router_pre_softmax=True, **softmax), False),
        # which Megatron ignores there
        (dict(moe_router_pre_softmax=True, moe_router_score_function="sigmoid"), True),
    ):
        routing = config_from_megatron(megatron_args(**experts, **values)).moe.routing
        assert (routing.score, routing.normalize) == (
            values["moe_router_score_function"],
            normalize,
        )
    with pytest.raises(UserError, match="moe_router_score_function is 'sqrtsoftplus'"):
        config_from_megatron(megatron_args(**experts, moe_router_score_function="sqrtsoftplus"))
    for changes in (
        {"apply_layernorm_1p": "x"},
        {"attention_output_gate": "x"},
        {"normalization": "LayerNorm"},
        {"disable_bias_linear": False},
        {"squared_relu": False},
        {"hybrid_override_pattern": "M-*/*-/*E"},
        {"hybrid_override_pattern": "G-*-"},
        {"hidden_size": None},
        {"padded_vocab_size": None},
        {"norm_epsilon": "x"},
        {"mamba_num_heads": None, "mamba_head_dim": 0},
    ):
        with pytest.raises(UserError):
            config_from_megatron(megatron_args(**changes))


LATENT = dict(
    hybrid_override_pattern="+-+-", mtp_hybrid_override_pattern="+-", multi_latent_attention=True
)


def test_megatron_lm_arguments_of_latent_attention():
    """Megatron's defaults are not DeepSeek's: YaRN by 40 with `mscale_all_dim` 0."""
    sizes = dict(kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12)
    config = config_from_megatron(
        megatron_args(**LATENT, **sizes, q_lora_rank=None, qk_layernorm=True)
    )
    assert config.mla == MlaConfig(**sizes, q_proj_layernorm=True)
    assert (config.mla.rope_type, config.mla.rotary_scaling_factor, config.mla.mscale_all_dim) == (
        "yarn",
        40,
        0,
    )
    low_rank = config_from_megatron(
        megatron_args(
            **LATENT,
            **sizes,
            q_lora_rank=24,
            qk_layernorm=True,
            rope_type="rope",
            mscale_all_dim=1.0,
        )
    )
    assert low_rank.mla == MlaConfig(**sizes, q_lora_rank=24, rope_type="rope", mscale_all_dim=1.0)
    for changes in (
        LATENT | {"multi_latent_attention": False},
        LATENT | {"rotary_percent": 0.5},
        LATENT | {"attention_output_gate": True},
        LATENT | {"rope_type": "linear"},
        LATENT | {"hybrid_override_pattern": "+-*-"},
        {"multi_latent_attention": True},
    ):
        with pytest.raises(UserError):
            config_from_megatron(megatron_args(**changes))


def test_arguments_inside_a_run_with_optimizer_state(tmp_path):
    """A tree as Megatron-LM leaves it: `args` in the common state, optimizer tensors beside the
    model's."""
    model = load_model(GOLDEN / "tp1/mamba_attention_mlp")
    moment = ShardedTensor.from_rank_offsets(
        "optimizer.state.exp_avg.decoder.final_norm.weight", torch.ones(64)
    )
    state = {"model": model.sharded_state_dict(), "optimizer": {"exp_avg": moment}}
    args = argparse.Namespace(
        **megatron_args(
            hybrid_override_pattern="M-*-M-", num_query_groups=2, group_query_attention=True
        )
    )
    save_checkpoint(
        tmp_path / "run", 300, state, {"args": args, "iteration": 300}, model.mtpkit_config
    )
    (tmp_path / "run" / "mtpkit.json").unlink()
    config = load_config(tmp_path / "run")
    assert config == model.mtpkit_config.replace(layernorm_epsilon=1e-6)
    assert load_config(tmp_path / "run" / "iter_0000300") == config
    export_checkpoint(tmp_path / "run", tmp_path / "hf")
    assert compare_weights(tmp_path / "hf", GOLDEN / "tp1/mamba_attention_mlp").identical
