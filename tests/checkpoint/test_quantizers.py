"""Checkpoints that the libraries of quantisers wrote (`quantizers/write.py`): what they mean, and
back and forth through Megatron's layout bit for bit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.directory import open_directory
from mtpkit.checkpoint.matrices import StoredMatrices
from mtpkit.checkpoint.tensors import bits_equal
from mtpkit.checkpoint.verify import compare_weights
from mtpkit.errors import UserError
from mtpkit.kernels.quantized import Inputs
from mtpkit.model.formats import Fp8, Int4, Nvfp4
from tests.checkpoint.builders import edit
from tests.shared import each

PLACE = Path(__file__).parent / "quantizers"
NAMES = sorted(path.parent.name for path in PLACE.glob("*/config.json"))

_SCALE = "weight_scale"
FORMATS = {
    "compressed_block": {
        Fp8(rows=16, columns=16, scale=_SCALE, inputs=Inputs("group", 128)),
        Fp8(rows=1, columns=16, scale=_SCALE, inputs=Inputs("group", 128)),
    },
    "compressed_channel": {Fp8(rows=1, columns=None, scale=_SCALE, inputs=Inputs("token"))},
    "compressed_int4": {Int4(columns=16)},
    "compressed_int4_zeros": {Int4(columns=16, asymmetric=True)},
    "compressed_nvfp4": {
        Nvfp4(
            packed="weight_packed",
            whole="weight_global_scale",
            input_scale="input_global_scale",
        ),
    },
    "compressed_tensor": {Fp8(rows=None, columns=None, scale=_SCALE, inputs=Inputs("static"))},
    "fine_grained": {
        Fp8(rows=16, columns=16, inputs=Inputs("group", 16)),
        Fp8(rows=1, columns=16, inputs=Inputs("group", 16)),
    },
    "modelopt_fp8": {Fp8(rows=None, columns=None, scale=_SCALE, inputs=Inputs("static"))},
    "modelopt_mixed": {
        Fp8(rows=None, columns=None, scale=_SCALE, inputs=Inputs("static")),
        Nvfp4(),
    },
    "modelopt_nvfp4": {Nvfp4(input_scale="input_scale")},
}


@each("name", NAMES)
def test_elements_are_those_of_the_library(name: str) -> None:
    opened = open_directory(PLACE / name)
    expected = load_file(PLACE / name / "expected.safetensors")
    assert opened.matrices.keys() == expected.keys() and len(expected) > 6
    stored = StoredMatrices(opened.reader, opened.matrices, torch.float32)
    for matrix, rows in expected.items():
        found = stored.read(matrix)[: len(rows)]
        # compressed-tensors divides by scales in the precision of the model.
        exact = name.startswith(("modelopt", "fine"))
        tolerance = 1e-6 if exact else 2**-8
        assert torch.allclose(found, rows, rtol=tolerance, atol=0), matrix


@each("name", NAMES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    import_checkpoint(PLACE / name, tmp_path / "megatron", expand_scales=True)
    opened = open_directory(tmp_path / "megatron").weights()
    original = open_directory(PLACE / name).weights(expand_scales=True)
    assert {*opened.formats.values()} == FORMATS[name]
    assert opened.formats == original.formats
    for matrix in original.formats:
        parts = opened.quantized(matrix).parts
        for part, tensor in original.quantized(matrix).parts.items():
            assert bits_equal(parts[part], tensor), (matrix, part)
    assert compare_weights(PLACE / name, tmp_path / "megatron").identical

    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    before = load_file(PLACE / name / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert after.keys() == before.keys()
    for tensor in before:
        assert bits_equal(after[tensor], before[tensor]), tensor
    configs = [
        json.loads((each / "config.json").read_text()) for each in (PLACE / name, tmp_path / "back")
    ]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    own = "hf_quant_config.json"
    assert (PLACE / name / own).exists() == (tmp_path / "back" / own).exists()
    if (PLACE / name / own).exists():
        assert (PLACE / name / own).read_bytes() == (tmp_path / "back" / own).read_bytes()


@each("name", NAMES)
def test_widened_import_leaves_no_trace_of_quantisation(name: str, tmp_path: Path) -> None:
    import_checkpoint(PLACE / name, tmp_path / "megatron", fp8_as=torch.float32)
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    weights = open_directory(tmp_path / "back").weights()
    assert not weights.formats
    original = open_directory(PLACE / name).weights(widen=torch.float32)
    for tensor in original.tensors:
        assert torch.equal(weights.read(tensor), original.read(tensor)), tensor
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    assert not (tmp_path / "back/hf_quant_config.json").exists()


def copy_of(name: str, target: Path) -> Path:
    return Path(shutil.copytree(PLACE / name, target))


def without_layers(config: dict[str, Any]) -> None:
    del config["quantization_config"]["quantized_layers"]


def without_settings(config: dict[str, Any]) -> None:
    del config["quantization_config"]


@each(
    ("name", "change"),
    [
        ("modelopt_mixed", without_layers),
        ("modelopt_mixed", without_settings),
        ("modelopt_fp8", without_settings),
    ],
)
def test_settings_beside_the_config_count_too(
    name: str, change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    directory = copy_of(name, tmp_path / "hf")
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))
    whole = open_directory(PLACE / name).weights()
    assert open_directory(directory).weights().formats == whole.formats
    import_checkpoint(directory, tmp_path / "megatron")
    assert open_directory(tmp_path / "megatron").weights().formats == whole.formats
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    back = open_directory(tmp_path / "back")
    assert back.weights().formats == whole.formats
    assert ("quantization_config" in back.settings) == ("quantization_config" in config)


def test_what_tells_of_quantised_weights_stays_behind_with_them(tmp_path: Path) -> None:
    """A run keeps the files of its base, but writes plain weights."""
    import_checkpoint(PLACE / "modelopt_nvfp4", tmp_path / "run", fp8_as=torch.bfloat16)
    own = "hf_quant_config.json"
    assert not (tmp_path / "run" / own).exists()
    shutil.copyfile(PLACE / "modelopt_nvfp4" / own, tmp_path / "run" / own)
    assert not open_directory(tmp_path / "run").weights().formats
    export_checkpoint(tmp_path / "run", tmp_path / "back")
    assert not (tmp_path / "back" / own).exists()
    assert not open_directory(tmp_path / "back").weights().formats


def test_quantised_weights_keep_their_family(tmp_path: Path) -> None:
    import_checkpoint(PLACE / "modelopt_nvfp4", tmp_path / "megatron")
    (tmp_path / "megatron" / "config.json").unlink()
    with pytest.raises(UserError, match="only be exported as the family"):
        export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_rows_of_vocabulary_padding_are_left_out(tmp_path: Path) -> None:
    """lm_head is in NVFP4 here."""
    import_checkpoint(PLACE / "modelopt_mixed", tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "back", vocab_size=9)
    before = load_file(PLACE / "modelopt_mixed" / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    for part in ("weight", "weight_scale"):
        assert bits_equal(after[f"lm_head.{part}"], before[f"lm_head.{part}"][:9])
    assert bits_equal(after["lm_head.weight_scale_2"], before["lm_head.weight_scale_2"])


def test_a_shape_that_contradicts_the_codes_is_named(tmp_path: Path) -> None:
    directory = copy_of("compressed_int4", tmp_path / "hf")
    name = "backbone.layers.0.mixer.o_proj.weight_shape"
    edit(directory, lambda tensors: tensors[name].fill_(8))
    with pytest.raises(UserError, match=r"o_proj.*weight_shape"):
        import_checkpoint(directory, tmp_path / "megatron")


@each(
    ("name", "part", "value"),
    [
        ("modelopt_fp8", "input_scale", 0.0),
        ("modelopt_fp8", "input_scale", 1e-40),
        ("modelopt_nvfp4", "input_scale", 0.0),
        ("compressed_nvfp4", "weight_global_scale", 1e-40),
        ("fine_grained", "weight_scale_inv", 3e38),
    ],
)
def test_scales_that_nothing_can_be_computed_with_are_named(
    name: str, part: str, value: float, tmp_path: Path
) -> None:
    directory = copy_of(name, tmp_path / "hf")
    stored = load_file(directory / "model.safetensors")
    scale = next(each for each in sorted(stored) if each.endswith(f".{part}"))
    edit(directory, lambda tensors: tensors[scale].fill_(value))
    with pytest.raises(UserError, match=rf"{part} is "):
        import_checkpoint(directory, tmp_path / "megatron", expand_scales=True)
    assert not (tmp_path / "megatron").exists()
