"""Heads written in bf16, fp8 and 4 bits, by `stitch` and by `export`: on every base that can say
it, both servers read them, and elsewhere one line says why not."""

import json
from pathlib import Path

import pytest
import torch

from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.directory import open_directory
from mtpkit.checkpoint.stitch import stitch
from mtpkit.checkpoint.tensors import bits_equal
from mtpkit.errors import UserError
from tests.checkpoint.builders import edit_config
from tests.checkpoint.family_models import write_family
from tests.checkpoint.schemes import READ, SCHEMES, write_quantised
from tests.checkpoint.test_cli import convert
from tests.checkpoint.test_round_trip import read_all
from tests.checkpoint.test_stitch_formats import PLACES, SIZES, fails, is_of_base

EXPRESSED = {
    "fp8 blocks": "fp8",
    "ModelOpt rows": "fp8",
    "W4A16_NVFP4": "nvfp4",
    "MIXED_PRECISION": "nvfp4",
    "compressed FP8": "fp8",
    "compressed W4A16": "int4",
    "compressed NVFP4": "nvfp4",
}
"""Base -> the format that heads may have on it."""
REFUSED = [
    ("W4A16_NVFP4", "qwen3_5", "servers build these heads without quantisation"),
    ("W4A16_NVFP4", "deepseek_v3", "servers build these heads without quantisation"),
    ("MIXED_PRECISION", "deepseek_v3", "servers would take model.layers.2.* for unquantised"),
]
"""Base, family of which SGLang does not read quantised heads there, and what is said."""
NOTHING = {"vllm": [], "sglang": []}
STAYS = ("eh_proj", "mtp.fc", "norm", ".gate.", "e_score", "layernorm")
"""Parts of names of tensors that no server quantises."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories in bf16 with heads, by family."""
    return {
        family: write_family(family, tmp_path_factory.mktemp(family), dtype=torch.bfloat16, **sizes)
        for family, sizes in SIZES.items()
    }


def is_head(name: str, family: str) -> bool:
    return name.startswith(PLACES[family])


def quantised(models, directory, scheme, family, heads=False) -> Path:
    """A base in a format, with or without heads that are quantised, too."""

    def wanted(name):
        taken = heads and is_head(name, family) and not any(part in name for part in STAYS)
        return is_of_base(name, family) or (taken and name.endswith("_proj.weight"))

    return write_quantised(scheme, models[family], directory, wanted)


def check(out: Path, source: Path, family: str, kind: str) -> None:
    """Heads have a format, mean what they meant up to its steps, and are read by both servers."""
    opened = open_directory(out)
    new = {name: each for name, each in opened.matrices.items() if is_head(name, family)}
    assert {each.format.name for each in new.values()} == {kind}
    assert any("q_proj" in name or "q_a_proj" in name for name in new)
    assert not any(part in name for name in new for part in STAYS)
    found = opened.weights(expand_scales=True)
    before = open_directory(source).weights()
    error = {"fp8": 0.07, "nvfp4": 0.3, "int4": 0.2}[kind]
    names = [name for name in before.tensors if name.startswith("mtp.")]
    assert names
    for name in names:
        one, other = found.read(name).float(), before.read(name).float()
        assert (one - other).norm() <= error * other.norm(), name
    found.require_finite()


@pytest.mark.parametrize(
    ("scheme", "family"),
    [
        (scheme, family)
        for scheme in EXPRESSED
        for family in SIZES
        if (scheme, family) not in {each[:2] for each in REFUSED}
    ],
)
def test_stitched_heads_in_the_format_of_the_base(models, tmp_path, scheme, family):
    kind = EXPRESSED[scheme]
    hf = quantised(models, tmp_path / "hf", scheme, family)
    if scheme.startswith("ModelOpt rows"):
        edit_config(
            hf,
            quantization_config={
                **SCHEMES[scheme].config,
                "ignore": ["lm_head", f"{PLACES[family]}*"],
            },
        )
    stitch(hf, models[family], tmp_path / "out", head_format=kind)
    check(tmp_path / "out", models[family], family, kind)
    assert fails(tmp_path / "out") == fails(models[family])
    before, after = (read_all(each) for each in (hf, tmp_path / "out"))
    for name in before:
        assert is_head(name, family) or bits_equal(after[name], before[name]), name
    # and back to bf16
    stitch(tmp_path / "out", models[family], tmp_path / "plain")
    assert not any(is_head(name, family) for name in open_directory(tmp_path / "plain").matrices)
    assert fails(tmp_path / "plain") == fails(models[family])


@pytest.mark.parametrize("scheme", READ)
def test_stored_heads_stay_as_they_are(models, tmp_path, scheme):
    """Through `stitch` onto a base with bf16 heads, and through Megatron's layout."""
    family = "nemotron_h"
    hf = quantised(models, tmp_path / "hf", scheme, family)
    stored = quantised(models, tmp_path / "stored", scheme, family, heads=True)
    stitch(hf, stored, tmp_path / "out")
    before, after = (read_all(each) for each in (stored, tmp_path / "out"))
    assert after.keys() == before.keys()
    assert all(bits_equal(after[name], before[name]) for name in before)
    assert fails(tmp_path / "out") == fails(models[family])

    import_checkpoint(stored, tmp_path / "megatron", expand_scales=True)
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    back = read_all(tmp_path / "back")
    assert back.keys() == before.keys()
    assert all(bits_equal(back[name], before[name]) for name in before)
    stitch(hf, tmp_path / "megatron", tmp_path / "again")
    again = read_all(tmp_path / "again")
    assert all(bits_equal(again[name], before[name]) for name in before)

    for command, source in (("stitch", hf), ("export", tmp_path / "megatron")):
        more = [tmp_path / "megatron"] if command == "stitch" else []
        target = tmp_path / f"{command}-bf16"
        assert convert(command, source, *more, target, "--head-format", "bf16") == 0
        assert not any(name.startswith("mtp") for name in open_directory(target).matrices)
        assert fails(target) == (NOTHING if command == "export" else fails(models[family]))


@pytest.mark.parametrize("scheme", READ)
def test_exported_heads(models, tmp_path, scheme):
    """As they are, which the lists then say, and in the format of the base."""
    family = "nemotron_h"
    hf = quantised(models, tmp_path / "hf", scheme, family)
    import_checkpoint(hf, tmp_path / "megatron", expand_scales=True)
    export_checkpoint(tmp_path / "megatron", tmp_path / "plain")
    assert fails(tmp_path / "plain") == NOTHING
    assert any(fails(hf).values())
    kind = EXPRESSED.get(scheme)
    if kind is not None:
        export_checkpoint(tmp_path / "megatron", tmp_path / "out", head_format=kind)
        assert fails(tmp_path / "out") == NOTHING
        check(tmp_path / "out", models[family], family, kind)
        stitch(hf, models[family], tmp_path / "stitched", head_format=kind)
        one, other = (read_all(tmp_path / each) for each in ("out", "stitched"))
        assert one.keys() == other.keys()
        assert all(bits_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("scheme", "kind", "why"),
    [
        ("ModelOpt FP8", "fp8", "quant_algo FP8 has no fp8 without scales of inputs"),
        ("NVFP4", "nvfp4", "quant_algo NVFP4 has no nvfp4 without scales of inputs"),
        ("NVFP4", "fp8", "quant_algo NVFP4 has no fp8"),
        ("fp8 blocks", "nvfp4", "fp8 in blocks has fp8 alone"),
        ("compressed W4A16", "fp8", "pack-quantized has int4 alone"),
        ("AWQ", "int4", "not supported on a base with quant_method 'awq'"),
        ("MIXED_PRECISION", "fp8", "columns must be a multiple of 128 in fp8"),
    ],
)
def test_what_the_base_cannot_say_is_refused(models, tmp_path, scheme, kind, why):
    hf = quantised(models, tmp_path / "hf", scheme, "nemotron_h")
    with pytest.raises(UserError, match=why) as caught:
        stitch(hf, models["nemotron_h"], tmp_path / "out", head_format=kind)
    assert "leave --head-format out" in str(caught.value) and str(hf) in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("scheme", "family", "why"), REFUSED)
def test_what_a_server_would_not_read_is_refused(models, tmp_path, scheme, family, why):
    hf = quantised(models, tmp_path / "hf", scheme, family)
    with pytest.raises(UserError, match=why):
        stitch(hf, models[family], tmp_path / "out", head_format=EXPRESSED[scheme])
    assert not (tmp_path / "out").exists()


def test_a_base_that_is_not_quantised(models, tmp_path):
    source = models["nemotron_h"]
    import_checkpoint(source, tmp_path / "megatron")
    for command, arguments in (
        ("stitch", [source, tmp_path / "megatron"]),
        ("export", [tmp_path / "megatron"]),
    ):
        out = tmp_path / command
        assert convert(command, *arguments, out, "--head-format", "fp8") == 2
        assert not out.exists()


def test_stored_heads_on_a_base_of_another_format(models, tmp_path):
    hf = quantised(models, tmp_path / "hf", "W4A16_NVFP4", "nemotron_h")
    stored = quantised(models, tmp_path / "stored", "compressed FP8", "nemotron_h", heads=True)
    with pytest.raises(UserError, match=r"modelopt W4A16_NVFP4 has no fp8.*--head-format bf16"):
        stitch(hf, stored, tmp_path / "out")
    stitch(hf, stored, tmp_path / "out", head_format="nvfp4")
    assert fails(tmp_path / "out") == fails(models["nemotron_h"])


def test_joined_matrices_have_one_scale(models, tmp_path):
    """Servers take the largest `weight_scale_2` of queries, keys and values for all three."""
    hf = quantised(models, tmp_path / "hf", "MIXED_PRECISION", "qwen3_5")
    stitch(hf, models["qwen3_5"], tmp_path / "out", head_format="nvfp4")
    tensors = read_all(tmp_path / "out")
    for parts in (("q", "k", "v"), ("gate", "up")):
        place = "self_attn" if "q" in parts else "mlp"
        scales = {
            tensors[f"mtp.layers.0.{place}.{part}_proj.weight_scale_2"].item() for part in parts
        }
        assert len(scales) == 1
    assert tensors["mtp.layers.0.self_attn.q_proj.weight_scale_2"].shape == ()


def test_an_entry_for_base_and_heads_is_taken_apart(models, tmp_path):
    """What it said of the base is said by names."""
    family = "nemotron_h"
    place = "backbone.layers.1.mixer"
    base = write_quantised(
        "W4A16_NVFP4",
        models[family],
        tmp_path / "base",
        lambda name: is_of_base(name, family) and not name.startswith(place),
    )
    entries = ["lm_head", "*.qkv_proj", "*.o_proj", "*.[kqv]_proj"]
    config = {**SCHEMES["W4A16_NVFP4"].config, "ignore": entries}
    edit_config(base, quantization_config=config)
    stitch(base, models[family], tmp_path / "out", head_format="nvfp4")
    assert fails(tmp_path / "out") == fails(models[family])
    listed = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert not {*entries[1:]} & {*listed["ignore"]}
    assert {f"{place}.{part}_proj" for part in "qkvo"} <= {*listed["ignore"]}


def test_copies_of_a_quantised_output_layer_are_widened(models, tmp_path):
    """Heads that store a copy of it get the values, not the codes."""
    source = models["deepseek_v3"]
    hf = write_quantised(
        "fp8 blocks", source, tmp_path / "hf", lambda name: name == "lm_head.weight"
    )
    config = {**SCHEMES["fp8 blocks"].config, "modules_to_not_convert": []}
    edit_config(hf, quantization_config=config)
    stitch(hf, source, tmp_path / "out")
    copy = read_all(tmp_path / "out")["model.layers.2.shared_head.head.weight"]
    assert torch.equal(copy, open_directory(hf).weights().read("output_layer.weight"))
