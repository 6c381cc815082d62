"""Directories whose config.json counts heads that tools have dropped from the weights, as
transformers does."""

import json
import logging

import pytest
from safetensors.torch import load_file, save_file

from mtpkit.checkpoint import directory, load_model
from mtpkit.checkpoint.convert import import_checkpoint
from mtpkit.checkpoint.directory import load_config
from mtpkit.checkpoint.lint import lint
from mtpkit.errors import UserError
from tests.checkpoint import qwen_models
from tests.checkpoint.builders import add_heads, edit_config, write_base

EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=8,
)


@pytest.fixture(params=[1, 4], ids=["one file", "an index"])
def hf(request, tmp_path):
    """(directory, rewrite its weights without the tensors whose names meet a condition)."""
    path = tmp_path / "hf"
    write_base(path, "M*-")
    add_heads(path, pattern="*-")
    directory._warn_of_lost_heads.cache_clear()

    def drop(condition):
        kept = {
            name: t
            for name, t in load_file(path / "model.safetensors").items()
            if not condition(name)
        }
        (path / "model.safetensors").unlink()
        if request.param == 1:
            save_file(kept, path / "model.safetensors", {"format": "pt"})
            return
        places = {
            name: f"model-{number % 4}.safetensors" for number, name in enumerate(sorted(kept))
        }
        for file in set(places.values()):
            save_file(
                {name: kept[name] for name in places if places[name] == file},
                path / file,
                {"format": "pt"},
            )
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    return path, drop


def is_head(name):
    return name.startswith("mtp.")


def test_a_model_without_a_tensor_of_its_heads_has_none(hf, tmp_path, caplog):
    path, drop = hf
    drop(is_head)
    with caplog.at_level(logging.WARNING):
        config = load_config(path)
        load_config(path)
    assert (config.mtp.num_depths, config.mtp.pattern) == (0, "")
    (message,) = caplog.messages
    assert (
        "no tensor of the 1 MTP layer(s) of this model is stored" in message
        and str(path) in message
    )
    import_checkpoint(path, tmp_path / "megatron")
    assert load_model(tmp_path / "megatron").mtpkit_config.mtp.num_depths == 0


@pytest.mark.parametrize(
    "kept", ["mtp.layers.0.eh_proj.weight", "mtp.layers.1.mixer.up_proj.weight"]
)
def test_one_tensor_of_the_heads_shows_that_others_are_missing(hf, caplog, kept):
    path, drop = hf
    drop(lambda name: is_head(name) and name != kept)
    assert load_config(path).mtp.num_depths == 3 and not caplog.messages
    with pytest.raises(UserError, match=r"missing: mtp\.layers"):
        load_model(path)


def test_all_heads_are_kept(hf, caplog):
    path, drop = hf
    drop(lambda name: False)
    assert load_model(path).mtpkit_config.mtp.num_depths == 3 and not caplog.messages


def test_heads_that_the_config_does_not_count_are_not_missed(tmp_path, caplog):
    """transformers' Qwen3-Next has no key for them, and servers count one head then: one finding
    says so."""
    model = qwen_models.make("qwen3_next", 0, num_hidden_layers=2, **EXPERTS)
    model.save_pretrained(tmp_path)
    directory._warn_of_lost_heads.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert load_config(tmp_path).mtp.num_depths == 0
        found = [finding.text for finding in lint(tmp_path) if "head" in finding.text]
    assert not caplog.messages
    assert found == [
        "num_nextn_predict_layers is absent, which counts as 1: no tensor of a head is stored;"
        " train heads, or stitch some into the directory"
    ]
    edit_config(tmp_path, num_nextn_predict_layers=1)
    with caplog.at_level(logging.WARNING):
        load_config(tmp_path)
        (found,) = [finding.text for finding in lint(tmp_path) if "head" in finding.text]
    assert len(caplog.messages) == 1 and found.startswith(
        "num_nextn_predict_layers is 1: no tensor of a head is stored"
    )
    edit_config(tmp_path, num_nextn_predict_layers=0)
    (found,) = [finding.text for finding in lint(tmp_path) if "head" in finding.text]
    assert found.startswith("num_nextn_predict_layers is 0: there are no heads to draft with")
