"""Configs of every kind, with every value of every type in every key: a model that can be built, or
one line."""

import argparse
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from mtpkit.checkpoint import latest_iteration, load_config
from mtpkit.checkpoint.directory import HFDirectory
from mtpkit.checkpoint.families.keys import Fixed, Key
from mtpkit.checkpoint.families.nemotron_h import NEMOTRON_H
from mtpkit.checkpoint.layouts.megatron import config_from_megatron
from mtpkit.checkpoint.layouts.torch_dist_write import CHECKPOINT_VERSION, write_megatron
from mtpkit.config import ModelConfig
from mtpkit.errors import UserError
from tests.checkpoint.builders import GOLDEN, SIZES, Unchecked, edit_config
from tests.checkpoint.test_config import megatron_args
from tests.shared import each
from tests.toy_config import toy_config

HUGE = 10**400
NAN = float("nan")
INFINITE = float("inf")
VALUES = [
    None,
    True,
    False,
    0,
    -1,
    3,
    10**12,
    HUGE,
    0.5,
    2.0,
    1e308,
    NAN,
    INFINITE,
    "",
    "three",
    "M" * 10**5,
]
VALUES += [[], [1], [None], ["a"], [[1]], {}, {"a": 1}]
"""Values of every JSON type, and of every size."""

NO_NUMBERS = [True, NAN, INFINITE, "three", "3", [], [1], {}, {"a": 1}, -1, HUGE]
"""None of them is the value of any size or number of a model."""


def outcome(action, where: str) -> str:
    """The message of a refusal, "" where there is none; anything but one short line that names
    `where` fails."""
    try:
        assert isinstance(action(), ModelConfig)
    except UserError as error:
        text = str(error)
        assert text.startswith(where) and "\n" not in text and len(text) < 450 + len(where), text
        return text.removeprefix(where)
    return ""


HF_NUMBERS = {line.key for line in NEMOTRON_H.lines if isinstance(line, Key)}
HF_NUMBERS |= {"routed_scaling_factor", "n_group", "topk_group"}
HF_KEYS = {
    *SIZES,
    *HF_NUMBERS,
    *(line.key for line in NEMOTRON_H.lines if isinstance(line, Fixed) and line.key),
}
HF_KEYS |= {
    "num_hidden_layers",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
}
HF_KEYS |= {
    "model_type",
    "mtpkit",
    "num_nextn_predict_layers",
    "hybrid_override_pattern",
    "layers_block_type",
}
HF_KEYS |= {
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
    "norm_topk_prob",
    "eos_token_id",
}
HF_KEYS |= {"time_step_limit", "time_step_min", "attention_head_dim"}


@pytest.fixture(scope="module")
def hf_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with nothing but a `config.json` of all kinds of layers, and heads."""
    directory = tmp_path_factory.mktemp("config")
    values = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M*-E",
        "mtp_hybrid_override_pattern": "*E",
    }
    values |= {"num_nextn_predict_layers": 1, **SIZES}
    (directory / "config.json").write_text(json.dumps(values))
    assert load_config(directory).mtp.pattern == "*E"
    return directory


@pytest.fixture
def hf(hf_config, tmp_path) -> Path:
    return shutil.copytree(hf_config, tmp_path / "model")


@pytest.mark.parametrize("key", sorted(HF_KEYS))
def test_every_value_in_every_key_of_config_json(hf, key):
    before = json.loads((hf / "config.json").read_text())
    where = f"{hf / 'config.json'}: "
    for value in VALUES:
        edit_config(hf, **{key: value})
        said = outcome(lambda: load_config(hf), where)
        if key in HF_NUMBERS and any(value is odd or (value == odd and odd) for odd in NO_NUMBERS):
            assert key in said or "num_experts_per_tok" in said, (value, said)
        (hf / "config.json").write_text(json.dumps(before))


def megatron_dir(directory: Path, config: object, name: str = "config.json") -> Path:
    """A directory that is a Megatron checkpoint for all that its config is asked for."""
    directory.mkdir(exist_ok=True)
    (directory / ".metadata").touch()
    (directory / name).write_text(json.dumps(config))
    return directory


MEGATRON_KEYS = {
    *megatron_args(),
    *json.loads((GOLDEN / "tp1/moe/config.json").read_text())["config"],
}
MEGATRON_KEYS |= {
    "hybrid_layer_pattern",
    "mtp_num_layers",
    "squared_relu",
    "num_experts",
    "window_size",
}


@pytest.mark.parametrize("key", sorted(MEGATRON_KEYS))
def test_every_value_in_every_key_of_megatrons_config(tmp_path, key):
    args = megatron_args(num_moe_experts=4, moe_ffn_hidden_size=16, hybrid_override_pattern="M-*E")
    for value in VALUES:
        directory = megatron_dir(tmp_path, {"config": args | {key: value}})
        outcome(lambda at=directory: load_config(at), f"{tmp_path / 'config.json'}: ")


GPT_KEYS = (
    "num_layers",
    "num_experts",
    "moe_layer_freq",
    "multi_latent_attention",
    "mtp_num_layers",
)
GPT_KEYS += ("experimental_attention_variant", "linear_attention_freq")


@pytest.mark.parametrize("key", GPT_KEYS)
def test_every_value_in_every_key_that_makes_a_pattern(tmp_path, key):
    args = megatron_args(num_experts=4, moe_ffn_hidden_size=16, num_layers=3, moe_layer_freq=2)
    args |= dict(hybrid_override_pattern=None, linear_attention_freq=2)
    if key == "linear_attention_freq":
        args["experimental_attention_variant"] = "gated_delta_net"
    for value in VALUES:
        directory = megatron_dir(tmp_path, {"config": args | {key: value}})
        outcome(lambda at=directory: load_config(at), f"{tmp_path / 'config.json'}: ")


@each("config", [[1], None, 3, "x", {}])
def test_megatron_configs_that_are_none(tmp_path, config):
    megatron_dir(tmp_path, {"config": config})
    assert outcome(lambda: load_config(tmp_path), f"{tmp_path / 'config.json'}: ")


@pytest.mark.parametrize(
    "changes", [{"hybrid_override_pattern": 5}, {"hidden_size": "64"}, {"kv_channels": [16]}]
)
def test_numbers_of_megatron_as_texts(changes):
    assert next(iter(changes)) in outcome(
        lambda: config_from_megatron(megatron_args(**changes)), "Megatron config: "
    )


KEYS = toy_config().values()
NUMBERS = [key for key, value in KEYS.items() if type(value) in (int, float)]


@pytest.mark.parametrize("key", KEYS)
def test_every_value_in_every_key_of_mtpkit_json(hf, tmp_path, key):
    config = load_config(hf)
    for value in VALUES:
        directory = megatron_dir(
            tmp_path / "megatron", config.to_dict() | {key: value}, "mtpkit.json"
        )
        where = f"{directory / 'mtpkit.json'}: "
        said = outcome(lambda at=directory: load_config(at), where)
        if key in NUMBERS and any(value is odd or (value == odd and odd) for odd in NO_NUMBERS):
            assert key in said, (value, said)
        if key in ("mamba_dt_limit", "eos_token_ids") and not (
            value == [] and key == "eos_token_ids"
        ):
            assert key in said or value == [1], (value, said)


def test_an_unknown_family_and_other_keys(hf, tmp_path):
    values = load_config(hf).to_dict()
    for change, named in (
        ({"family": "llama"}, "family 'llama'"),
        ({"hidden": 3}, "hidden is unknown"),
    ):
        directory = megatron_dir(tmp_path / "megatron", values | change, "mtpkit.json")
        assert named in outcome(
            lambda at=directory: load_config(at), f"{directory / 'mtpkit.json'}: "
        )


@each(
    ("changes", "says"),
    [
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000, must be from 1 to 1048576"),
        (
            {"hybrid_override_pattern": "M" * 10**5},
            "hybrid_override_pattern has 100000 layers, more than 2048",
        ),
        (
            {"mtpkit": {"mtp_num_depths": 10**9}},
            "mtpkit.mtp_num_depths is 1000000000, must be from 0 to 64",
        ),
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers|mtp_num_depths"),
        (
            {"n_routed_experts": 2**14, "hybrid_override_pattern": "E" * 100},
            "n_routed_experts 16384 in all layers",
        ),
        ({"layer_norm_epsilon": -1}, "layer_norm_epsilon is -1, must be from 1e-20 to 1"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon is 0, "),
        ({"layer_norm_epsilon": INFINITE}, "layer_norm_epsilon is inf, "),
        ({"layer_norm_epsilon": NAN}, "layer_norm_epsilon is nan, must be a finite number"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0, "),
        ({"routed_scaling_factor": -2.5}, "routed_scaling_factor is -2.5, "),
        ({"initializer_range": -0.1}, "initializer_range is -0.1, "),
        ({"bos_token_id": 96}, "bos_token_id 96 is not in the vocabulary of 96"),
        ({"eos_token_id": [3, -1, 400]}, "eos_token_id -1, 400 is not in the vocabulary"),
        ({"pad_token_id": -1}, "pad_token_id -1"),
        ({"model_type": ["nemotron_h"]}, "model_type"),
    ],
)
def test_values_beyond_all_models(hf_config, tmp_path, changes, says):
    hf = shutil.copytree(hf_config, tmp_path / "model")
    edit_config(hf, **changes)
    assert re.search(says, outcome(lambda: load_config(hf), f"{hf / 'config.json'}: "))


@each("args", [5, "x", [1], {"hidden_size": 3}, argparse.Namespace(), argparse.Namespace(hidden=1)])
def test_saved_arguments_that_are_no_namespace(tmp_path, args):
    write_megatron(tmp_path, Unchecked({"w": torch.ones(2)}), {**CHECKPOINT_VERSION, "args": args})
    assert outcome(lambda: load_config(tmp_path), f"args in {tmp_path}: ")


@each("content", [b"\xff\xfe1", b"9" * 5000, b"-3", b"", b"x" * 10**4, "٣".encode(), b"1.5", None])
def test_tracker_files(tmp_path, content):
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.mkdir() if content is None else tracker.write_bytes(content)
    for action in (lambda: latest_iteration(tmp_path), lambda: load_config(tmp_path)):
        assert outcome(action, str(tracker))


@each("value", ["2", -1, 40, 1.5, True, HUGE, [1, None], [[2]], {"id": 2}, [1, "x"]])
def test_generation_settings(tmp_path, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(
        UserError, match=r"generation_config\.json: eos_token_id .* is none of the 40 token ids"
    ):
        HFDirectory(tmp_path).end_token_ids(40)


@each(("value", "ids"), [(None, set()), (3, {3}), ([3, 5], {3, 5}), ([], set())])
def test_generation_settings_that_are_right(tmp_path, value, ids):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert HFDirectory(tmp_path).end_token_ids(40) == ids
