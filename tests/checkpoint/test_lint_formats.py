"""Rules of the lint about tensors beside quantised matrices of every format: names, shapes, values,
and parts of a rank."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtpkit.checkpoint.lint import lint
from mtpkit.checkpoint.stitch import stitch
from tests.checkpoint.builders import edit, edit_config
from tests.checkpoint.family_models import write_family
from tests.checkpoint.schemes import READ, SCHEMES, write_quantised
from tests.checkpoint.test_stitch_formats import SIZES, is_of_base

O_PROJ = "backbone.layers.1.mixer.o_proj"
HEAD = "mtp.layers.0.mixer"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Nemotron-H with a base in each format and heads in bf16."""
    source = tmp_path_factory.mktemp("nemotron")
    write_family("nemotron_h", source, dtype=torch.bfloat16, **SIZES["nemotron_h"])
    found = {"bf16": source}
    for scheme in SCHEMES:
        place = tmp_path_factory.mktemp("bases")
        hf = write_quantised(
            scheme, source, place / "hf", lambda name: is_of_base(name, "nemotron_h")
        )
        stitch(hf, source, place / "out")
        files = {"model.safetensors": load_file(place / "out" / "model.safetensors")}
        assert len(files) == 1
        found[scheme] = place / "out"
    return found


@pytest.fixture
def copy(bases, tmp_path):
    return lambda scheme: shutil.copytree(bases[scheme], tmp_path / scheme.replace(" ", "-"))


def texts(directory: Path, ranks: int = 1, fatal: bool = True) -> list[str]:
    """What is said, without what is said about the model in bf16."""
    return [
        one.text
        for one in lint(directory, ranks=ranks)
        if one.fatal == fatal
        and "layers_block_type" not in one.text
        and "tokenizer" not in one.text
    ]


def scale_of(directory: Path) -> str:
    """The name of the scales of a matrix."""
    names = load_file(directory / "model.safetensors")
    ends = ("weight_scale_inv", "weight_scale")
    return next(f"{O_PROJ}.{end}" for end in ends if f"{O_PROJ}.{end}" in names)


@pytest.mark.parametrize("scheme", READ)
def test_scales_that_are_missing_or_odd(copy, scheme):
    hf = copy(scheme)
    assert texts(hf) == []
    name = scale_of(hf)
    scale = load_file(hf / "model.safetensors")[name]
    for value, says in ((float("nan"), "holds NaN or infinity"), (-1.0, "is negative")):
        damaged = scale.float().clone()
        damaged.view(-1)[0] = value
        edit(hf, lambda tensors, new=damaged: tensors.update({name: new.to(scale.dtype)}))
        (said,) = texts(hf)
        assert said.startswith("scales that no quantiser writes: ")
        assert f"{O_PROJ}.weight: {name.rpartition('.')[2]} {says}" in said
    edit(hf, lambda tensors: tensors.update({name: torch.ones(3, 5).to(scale.dtype)}))
    assert any(f"{name} [3, 5]" in said for said in texts(hf))
    edit(hf, lambda tensors: tensors.pop(name))
    assert any(name in said for said in texts(hf))


@pytest.mark.parametrize(
    ("scheme", "ranks", "says"),
    [
        ("W4A16_NVFP4", 2, "nvfp4: down_proj has 48 columns, 24 per rank, not a multiple of"),
        ("compressed W4A16", 2, "int4: down_proj has 48 columns, 24 per rank, not a multiple of"),
        ("AWQ", 2, "awq: down_proj has 48 columns, 24 per rank, not a multiple of"),
        ("compressed FP8", 2, ""),
        ("W4A16_NVFP4", 1, ""),
    ],
)
def test_columns_of_a_rank_are_whole_groups(bases, scheme, ranks, says):
    found = [text for text in texts(bases[scheme], ranks) if "per rank" in text]
    assert bool(found) == bool(says)
    assert not says or any(text.startswith(says) for text in found)


def test_an_output_layer_with_scales_that_is_listed_as_plain(copy):
    """Of which servers find no parameter for the scales."""
    hf = copy("NVFP4")
    edit(hf, lambda tensors: tensors.update({"lm_head.input_scale": torch.tensor(0.5)}))
    says = "lm_head.input_scale: quantization_config says that lm_head is not quantised"
    assert any(text.startswith(says) for text in texts(hf))
    weight = load_file(hf / "model.safetensors")["lm_head.weight"]
    parts = SCHEMES["NVFP4"].pack(weight.float())
    edit(
        hf, lambda tensors: tensors.update({f"lm_head.{end}": part for end, part in parts.items()})
    )
    found = texts(hf)
    assert any("lm_head.weight is stored as nvfp4, but" in text for text in found)
    assert any("lm_head is not quantised, so that servers" in text for text in found)
    for place in (hf / "config.json", hf / "hf_quant_config.json"):
        settings = json.loads(place.read_text())
        inner = settings.get("quantization_config") or settings["quantization"]
        for key in ("ignore", "exclude_modules"):
            inner[key].remove("lm_head")
        place.write_text(json.dumps(settings))
    assert texts(hf) == []


def test_joined_matrices_with_several_scales(copy):
    hf = copy("W4A16_NVFP4")
    before = texts(hf, fatal=False)
    assert any("backbone.layers.1.mixer.{q_proj,k_proj,v_proj} are one matrix" in t for t in before)

    def change(tensors):
        for name in tensors:
            if name.endswith("weight_scale_2"):
                tensors[name] = torch.tensor(0.5)

    edit(hf, change)
    assert not any("are one matrix" in text for text in texts(hf, fatal=False))


@pytest.mark.parametrize(("scheme", "servers"), [("NVFP4", 2), ("MIXED_PRECISION", 1)])
def test_keys_and_values_of_which_only_modelopts_file_tells(copy, scheme, servers):
    hf = copy(scheme)
    assert not any("kv_cache_quant_algo" in one.text for one in lint(hf))
    own = json.loads((hf / "hf_quant_config.json").read_text())
    own["quantization"]["kv_cache_quant_algo"] = "FP8"
    (hf / "hf_quant_config.json").write_text(json.dumps(own))
    (found,) = [one for one in lint(hf) if "kv_cache_quant_algo" in one.text]
    assert not found.fatal and len(found.servers) == servers
    settings = json.loads((hf / "config.json").read_text())["quantization_config"]
    scheme_of_kv = {"type": "float", "num_bits": 8}
    edit_config(hf, quantization_config={**settings, "kv_cache_scheme": scheme_of_kv})
    assert not any("kv_cache_quant_algo" in one.text for one in lint(hf))


def test_the_input_projection_must_be_listed_by_compressed_tensors(tmp_path):
    """vLLM leaves it out by itself only under ModelOpt's NVFP4."""
    source = tmp_path / "source"
    write_family("qwen3_5", source, dtype=torch.bfloat16, **SIZES["qwen3_5"])
    hf = write_quantised(
        "compressed W4A16", source, tmp_path / "hf", lambda name: is_of_base(name, "qwen3_5")
    )
    config = SCHEMES["compressed W4A16"].config
    edit_config(hf, quantization_config={**config, "ignore": ["lm_head", "re:^mtp\\.layers.*"]})
    found = [one for one in lint(hf) if "quanti" in one.text]
    assert [one.servers for one in found] == [("vllm",)]
    assert found[0].text.endswith("ignore: add mtp.fc")


def test_a_glob_that_quantises_the_heads(copy):
    """MIXED_PRECISION names what is quantised: a name of the whole head is one of a stack."""
    hf = copy("MIXED_PRECISION")
    settings = json.loads((hf / "config.json").read_text())["quantization_config"]
    layers = {**settings["quantized_layers"], f"{HEAD}.o_proj": {"quant_algo": "W4A16_NVFP4"}}
    changed = {**settings, "quantized_layers": layers, "ignore": ["lm_head"]}
    changed.pop("exclude_modules")
    edit_config(hf, quantization_config=changed)
    assert any(f"add {HEAD}.o_proj" in text for text in texts(hf))
    groups = SCHEMES["compressed FP8"].config
    other = copy("compressed FP8")
    edit_config(other, quantization_config={**groups, "ignore": ["lm_head", "re:.*o_proj"]})
    assert any(f"{HEAD}.q_proj" in text and "not listed" in text for text in texts(other))
