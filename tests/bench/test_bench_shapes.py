"""Shapes that are known by name, weights that are drawn on a device, prompts."""

import json
import re
import shutil

import pytest
import torch

from mtpkit.bench.shapes import get_config, open_model, random_prompts, read_token_ids
from mtpkit.bench.sizes import NEMOTRON_H_8B, NEMOTRON_H_TINY
from mtpkit.checkpoint import save_hf_model
from mtpkit.errors import UserError
from mtpkit.model import build_model
from tests.model.toy import CONFIG, toy_model


def test_the_published_shape():
    config = NEMOTRON_H_8B
    assert {letter: config.pattern.count(letter) for letter in "M-*"} == {"M": 24, "-": 24, "*": 4}
    assert len(config.pattern) == 52 and config.mtp.pattern == "*" and config.mtp.num_layers == 1
    assert set(NEMOTRON_H_TINY.pattern) == set(config.pattern)


def test_a_shape_or_a_directory(tmp_path):
    assert get_config("nemotron-h-8b") is NEMOTRON_H_8B
    save_hf_model(toy_model(), tmp_path)
    assert get_config(str(tmp_path)).hidden_size == CONFIG.hidden_size
    assert (
        open_model(str(tmp_path), torch.device("cpu")).mtpkit_config.hidden_size
        == CONFIG.hidden_size
    )
    with pytest.raises(
        UserError,
        match=r"model 'nemotron' is neither a shape .nemotron-h-8b, .* nor a model directory",
    ):
        get_config("nemotron")


def test_a_shape_may_have_another_head(tmp_path):
    assert get_config("nemotron-h-tiny", "*-") == NEMOTRON_H_TINY.replace(mtp_pattern="*-")
    model = open_model("nemotron-h-tiny", torch.device("cpu"), pattern="*-")
    assert (
        model.mtpkit_config.mtp.pattern == "*-"
        and len(model.mtp.layers[0].mtp_model_layer.layers) == 2
    )
    for pattern, problem in (
        ("*Q", "'Q'"),
        ("*G", "must be positive: linear_num_key_heads"),
        ("+", "in one model"),
    ):
        start = f"^pattern '{re.escape(pattern)}' does not fit: "
        end = r"; layers of this base are '\*', '-', 'M'$"
        match = f"{start}.*{problem}.*{end}"
        with pytest.raises(UserError, match=match):
            get_config("nemotron-h-tiny", pattern)
    with pytest.raises(
        UserError,
        match=r"pattern '\*-' is for a shape .nemotron-h-8b, .*, not for a model directory as ",
    ):
        open_model(str(tmp_path), torch.device("cpu"), pattern="*-")


def test_a_shape_may_have_a_head_for_each_depth(tmp_path):
    config = get_config("nemotron-h-tiny", distinct=True)
    assert (
        config == NEMOTRON_H_TINY.replace(mtp_use_repeated_layer=False)
        and config.mtp.num_layers == 3
    )
    model = open_model("nemotron-h-tiny", torch.device("cpu"), distinct=True)
    assert len(model.mtp.layers) == 3
    with pytest.raises(
        UserError, match=r"distinct heads are for a shape .*, not for a model directory as "
    ):
        save_hf_model(toy_model(), tmp_path)
        open_model(str(tmp_path), torch.device("cpu"), distinct=True)


def test_weights_drawn_on_the_device_follow_the_seed_and_the_kinds(device):
    first, again, other = (
        dict(
            build_model(CONFIG, torch.bfloat16, device, seed=seed, init="device").named_parameters()
        )
        for seed in (5, 5, 6)
    )
    portable = dict(build_model(CONFIG, torch.bfloat16, device, seed=5).named_parameters())
    for name, value in first.items():
        assert (
            torch.equal(value, again[name])
            and value.isfinite().all()
            and value.device.type == device
        )
        if value.dim() > 1:
            assert not torch.equal(value, other[name])
        # Other numbers, of the same kind; a CPU draws the very same.
        if device == "cpu":
            assert torch.equal(value, portable[name])
        elif value.numel() > 500:
            assert value.float().std().item() == pytest.approx(
                portable[name].float().std().item(), rel=0.2, abs=1e-6
            )


def test_an_unknown_init_is_refused():
    with pytest.raises(UserError, match="init is 'gpu', must be one of portable, device"):
        build_model(CONFIG, init="gpu")


def test_random_prompts_differ():
    prompts = random_prompts(5, 12, 512)
    assert {len(prompt) for prompt in prompts} == {12} and len(
        {tuple(prompt) for prompt in prompts}
    ) == 5
    assert prompts == random_prompts(5, 12, 512) != random_prompts(5, 12, 512, seed=1)


def test_prompts_of_a_file(tmp_path, tokenizer_dir):
    (tmp_path / "ids.jsonl").write_text(json.dumps({"prompt_token_ids": [1, 2]}) + "\n")
    assert read_token_ids(tmp_path / "ids.jsonl", "nemotron-h-tiny") == [[1, 2]]
    (tmp_path / "text.txt").write_text("the cat\non the mat\n")
    shutil.copytree(tokenizer_dir, tmp_path / "model")
    save_hf_model(toy_model(), tmp_path / "model")
    assert [
        len(ids) > 0 for ids in read_token_ids(tmp_path / "text.txt", str(tmp_path / "model"))
    ] == [True, True]
    with pytest.raises(
        UserError, match="holds texts, but the shape nemotron-h-tiny has no tokenizer"
    ):
        read_token_ids(tmp_path / "text.txt", "nemotron-h-tiny")
