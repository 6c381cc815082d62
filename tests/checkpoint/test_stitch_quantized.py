"""Heads in bf16 put into quantised checkpoints: the config says so in each server's words, and
nothing else changes."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from mtpkit.checkpoint.families.serving import SERVERS
from mtpkit.checkpoint.lint import lint
from mtpkit.checkpoint.quantized import SCALE
from mtpkit.checkpoint.stitch import stitch
from mtpkit.checkpoint.tensors import bits_equal
from mtpkit.errors import UserError
from tests.checkpoint.builders import edit, edit_config
from tests.checkpoint.family_models import FAMILIES, write_family
from tests.checkpoint.test_lint_quantized import FP8_CONFIG, STORED, quantize
from tests.checkpoint.test_round_trip import read_all

SIZES = {
    "deepseek_v3": dict(num_hidden_layers=2),
    "glm4_moe": dict(num_hidden_layers=2),
    "nemotron_h": {},
    "mimo": {},
    **{
        name: dict(num_hidden_layers=2, full_attention_interval=2)
        for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")
    },
}
HEADS = ("mtp.", "model.mtp_layers.", "model.layers.2.")
CANNOT_SAY = {"qwen3_next": ["sglang"], "mimo": ["sglang"]}
"""Servers that call modules of the heads what modules of the base are called: naming them would
leave out those."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories with new heads, by family."""
    assert SIZES.keys() == FAMILIES.keys()
    return {
        name: write_family(name, tmp_path_factory.mktemp(name), **sizes)
        for name, sizes in SIZES.items()
    }


def is_head(name, family):
    return name.startswith(HEADS[:2] if family in ("mimo", "nemotron_h") else HEADS)


def matrices(tensors, family, heads):
    """Projections of the base, or of the heads with the same names."""
    names = [n for n in tensors if n.endswith("_proj.weight") and is_head(n, family) == heads]
    return [
        n
        for n in names
        if "visual" not in n and not n.endswith(("eh_proj.weight", "input_proj.weight"))
    ]


def quantised_base(directory, source, family, config, store=quantize, heads=False):
    shutil.copytree(source, directory)
    edit(directory, lambda tensors: store(tensors, matrices(tensors, family, False)))
    if heads:
        edit(directory, lambda tensors: store(tensors, matrices(tensors, family, True)))
    edit_config(directory, quantization_config=config)
    return directory


def complaints(directory):
    """What fails about quantisation, by server."""
    words = ("quanti", "missing", "unexpected")
    found = [
        one for one in lint(directory) if one.fatal and any(word in one.text for word in words)
    ]
    return {server: [one.text for one in found if server in one.servers] for server in SERVERS}


def check_tensors(before, after, new, family):
    """Heads are the new ones, without scales; all others are as they were."""
    heads = {name for name in new if is_head(name, family)}
    kept = {name for name in before if not is_head(name, family)}
    assert after.keys() == heads | kept and heads
    assert all(bits_equal(after[n], new[n] if n in heads else before[n]) for n in after)


@pytest.mark.parametrize("quantised_heads", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_on_a_base_in_fp8(models, tmp_path, family, quantised_heads):
    """Heads that were in fp8 leave no scale behind, and what was listed stays."""
    config = FP8_CONFIG | {"modules_to_not_convert": ["lm_head"]}
    hf = quantised_base(tmp_path / "hf", models[family], family, config, heads=quantised_heads)
    before = read_all(hf)
    assert any(name.endswith(SCALE) and is_head(name, family) for name in before) == quantised_heads
    stitch(hf, models[family], tmp_path / "out")
    check_tensors(before, read_all(tmp_path / "out"), read_all(models[family]), family)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {**settings, "modules_to_not_convert": ["lm_head"]} == config
    assert settings["modules_to_not_convert"][0] == "lm_head"
    assert len(settings["modules_to_not_convert"]) > 3
    found = complaints(tmp_path / "out")
    failing = CANNOT_SAY.get(family, [])
    assert [server for server, said in found.items() if said] == failing
    for server in failing:
        (said,) = found[server]
        assert "modules of the heads are not quantised, but not listed in" in said


def test_a_list_that_says_all_stays(models, tmp_path):
    config = FP8_CONFIG | {"ignored_layers": ["lm_head"]}
    hf = quantised_base(tmp_path / "hf", models["qwen3_5"], "qwen3_5", config)
    stitch(hf, models["qwen3_5"], tmp_path / "once")
    stitch(tmp_path / "once", models["qwen3_5"], tmp_path / "twice")
    one, other = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("once", "twice"))
    assert one == other and "modules_to_not_convert" not in one["quantization_config"]
    assert "mtp.layers.0.self_attn.q_proj" in one["quantization_config"]["ignored_layers"]


@pytest.mark.parametrize("method", STORED)
def test_bases_that_cannot_be_read(models, tmp_path, method, caplog):
    """Their tensors are only copied, and a warning says that they cannot be read."""

    def store(tensors, names):
        for name in names:
            start = name.removesuffix("weight")
            weight = tensors.pop(name)
            tensors |= {
                start + end: part.contiguous().clone()
                for end, part in STORED[method](weight).items()
            }

    hf = quantised_base(
        tmp_path / "hf", models["nemotron_h"], "nemotron_h", {"quant_method": method}, store
    )
    stitch(hf, models["nemotron_h"], tmp_path / "out")
    (warning,) = caplog.messages
    assert warning.startswith(f"{hf}: quantization_config") and "not checked: compare" in warning
    check_tensors(
        read_all(hf), read_all(tmp_path / "out"), read_all(models["nemotron_h"]), "nemotron_h"
    )
    cannot = (
        "experts of the heads are not quantised, which quantization_config's dynamic cannot say"
    )
    found = complaints(tmp_path / "out")
    assert found["vllm"] == [] and [text.startswith(cannot) for text in found["sglang"]] == [
        True
    ] * (method == "gptq")
    edit(hf, lambda tensors: tensors.pop("backbone.norm_f.weight"))
    with pytest.raises(UserError, match=r"1 missing: backbone\.norm_f\.weight"):
        stitch(hf, models["nemotron_h"], tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("family", "method"), [("glm4_moe", "awq"), ("deepseek_v3", "modelopt")])
def test_names_that_two_servers_read_differently(models, tmp_path, family, method):
    """A list for one server ends the other's reading of the files; the end of a name may stand for
    all layers."""

    def store(tensors, names):
        for name in names:
            start = name.removesuffix("weight")
            weight = tensors.pop(name)
            tensors |= {
                start + end: part.contiguous().clone()
                for end, part in STORED[method](weight).items()
            }

    config = {"quant_method": method, "quant_algo": "FP8"}
    hf = quantised_base(tmp_path / "hf", models[family], family, config, store)
    stitch(hf, models[family], tmp_path / "out")
    assert complaints(tmp_path / "out") == {"vllm": [], "sglang": []}


def static_fp8(tensors, names):
    """Store matrices as ModelOpt's FP8: a scale for each, and one for its inputs."""
    for name in names:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        stem = name.removesuffix("weight")
        tensors |= {f"{stem}weight_scale": torch.ones(()), f"{stem}input_scale": torch.ones(())}


def test_the_list_beside_the_config(models, tmp_path):
    """ModelOpt's own file is written too, and keeps its other settings."""
    hf = quantised_base(tmp_path / "hf", models["nemotron_h"], "nemotron_h", None, static_fp8)
    own = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    }
    (hf / "hf_quant_config.json").write_text(json.dumps(own))
    stitch(hf, models["nemotron_h"], tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    listed = settings["quantization"].pop("exclude_modules")
    assert settings["quantization"].pop("ignore") == listed
    assert settings == {**own, "quantization": {"quant_algo": "FP8"}}
    assert listed[0] == "lm_head" and {"mtp*", "mtp.layers.0.mixer.q_proj"} < {*listed}
    assert complaints(tmp_path / "out") == {"vllm": [], "sglang": []}
    assert json.loads((hf / "hf_quant_config.json").read_text()) == own


def test_a_scale_that_does_not_fit_is_refused(models, tmp_path):
    hf = quantised_base(tmp_path / "hf", models["nemotron_h"], "nemotron_h", FP8_CONFIG)
    name = next(n for n in load_file(hf / "model.safetensors") if n.endswith(SCALE))
    edit(hf, lambda tensors: tensors.update({name: torch.ones(9, 9)}))
    with pytest.raises(UserError, match=rf"{name} \[9, 9\]"):
        stitch(hf, models["nemotron_h"], tmp_path / "out")
