"""Comparisons of quantised checkpoints: what is stored, and widened values where one is widened."""

import shutil

import pytest
import torch

from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.stitch import stitch
from mtpkit.checkpoint.verify import compare_weights
from tests.checkpoint.builders import add_heads, edit, edit_config, write_base
from tests.checkpoint.schemes import READ, SCHEMES, write_quantised
from tests.checkpoint.test_columnwise import SETTINGS as COLUMNWISE
from tests.checkpoint.test_columnwise import write as write_columnwise
from tests.shared import each

LEFT = ("embed", "lm_head", "gate.weight", "conv1d", "norm", "mtp.")
Q = "backbone.layers.1.mixer.q_proj"
QKV = "decoder.layers.1.self_attention.linear_qkv"
OUT = "decoder.layers.1.self_attention.linear_proj"


def wanted(name):
    return name.endswith(".weight") and not any(part in name for part in LEFT)


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """A function that writes a quantised checkpoint."""
    source = tmp_path_factory.mktemp("plain")
    write_base(source, "M*E", dtype=torch.bfloat16, moe_shared_expert_intermediate_size=16)
    add_heads(source, "*")

    def make(scheme, directory):
        if scheme in COLUMNWISE:
            write_columnwise(directory, scheme)
        else:
            write_quantised(scheme, source, directory, wanted)

    return make


def copy_of(directory, change, name="other"):
    target = directory.parent / name
    shutil.copytree(directory, target)
    edit(target, change)
    return target


@each("scheme", [*READ, "awq", "gptq"])
def test_what_is_stored_is_compared_in_both_layouts(scheme, write, tmp_path):
    write(scheme, tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron", expand_scales=True)
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    parts = ("scale", "scales", "packed", "qzeros", "scale_2", "scale_inv", "qweight")
    for pair in (("hf", "megatron"), ("megatron", "hf"), ("hf", "back"), ("megatron", "megatron")):
        found = compare_weights(*(tmp_path / name for name in pair))
        assert found.identical, (pair, found)
        assert sum(name.endswith(parts) for name in found.equal) > 4


@each(
    ("scheme", "part"),
    [
        ("fp8 blocks", "weight_scale_inv"),
        ("ModelOpt FP8", "input_scale"),
        ("ModelOpt FP8", "weight_scale"),
        ("compressed FP8", "weight"),
        ("NVFP4", "weight_scale_2"),
        ("NVFP4", "weight"),
        ("compressed W4A16", "weight_packed"),
        ("compressed NVFP4", "weight_global_scale"),
    ],
)
def test_the_part_that_differs_is_named(scheme, part, write, tmp_path):
    write(scheme, tmp_path / "hf")

    def change(tensors):
        bits = tensors[f"{Q}.{part}"].view(-1).view(torch.uint8)
        bits[-1 if part.endswith("packed") else 0] ^= 1

    other = copy_of(tmp_path / "hf", change)
    found = compare_weights(tmp_path / "hf", other)
    (told,) = found.different
    assert told.startswith(f"{Q}.{part} (differs by up to ")
    assert not (found.only_first or found.only_second or found.not_finite)
    assert found.parts == "base differs, heads equal"
    for path in (tmp_path / "hf", other):
        import_checkpoint(path, path.with_suffix(".megatron"), expand_scales=True)
    for first, second in (
        (tmp_path / "hf.megatron", tmp_path / "other.megatron"),
        (tmp_path / "hf", tmp_path / "other.megatron"),
    ):
        (told,) = compare_weights(first, second).different
        assert told.startswith(f"{QKV}.{part} (differs by up to ")


@each(
    ("scheme", "dtype"),
    [
        ("fp8 blocks", torch.bfloat16),
        ("ModelOpt FP8", torch.float32),
        ("compressed FP8", torch.float32),
        ("compressed W4A16", torch.bfloat16),
        ("NVFP4", torch.float32),
    ],
)
def test_a_widened_checkpoint_is_equal_in_its_own_dtype(scheme, dtype, write, tmp_path):
    write(scheme, tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "wide", fp8_as=dtype)
    export_checkpoint(tmp_path / "wide", tmp_path / "back")
    import_checkpoint(tmp_path / "hf", tmp_path / "kept", expand_scales=True)
    for pair in (("hf", "wide"), ("wide", "hf"), ("back", "hf"), ("kept", "wide")):
        found = compare_weights(*(tmp_path / name for name in pair))
        assert found.identical, (pair, found)

    # A change of one code is seen.
    def change(tensors):
        part = next(f"{Q}.{x}" for x in ("weight", "weight_packed") if f"{Q}.{x}" in tensors)
        tensors[part].view(-1).view(torch.uint8)[0] ^= 7

    other = copy_of(tmp_path / "hf", change)
    (told,) = compare_weights(other, tmp_path / "wide").different
    assert told.startswith(f"{QKV}.weight (differs by up to ")
    (told,) = compare_weights(other, tmp_path / "back").different
    assert told.startswith(f"{Q}.weight (differs by up to ")


def test_formats_that_differ_are_told(write, tmp_path):
    for name, scheme in (("first", "compressed FP8"), ("second", "NVFP4")):
        write(scheme, tmp_path / name)
    found = compare_weights(tmp_path / "first", tmp_path / "second")
    assert f"{Q}.weight (stored as fp8 with inputs by token and nvfp4)" in found.different
    # The same tensors, of which settings alone say that inputs are not quantised.
    config = write_settings_without_inputs(tmp_path)
    found = compare_weights(tmp_path / "first", config)
    assert f"{Q}.weight (stored as fp8 with inputs by token and fp8)" in found.different


def write_settings_without_inputs(tmp_path):
    other = copy_of(tmp_path / "first", lambda tensors: None)
    weights = {"type": "float", "num_bits": 8, "strategy": "channel", "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    edit_config(other, quantization_config=settings)
    return other


def test_scales_that_are_not_finite_are_a_finding(write, tmp_path):
    """vLLM presets scales to NaN, which stay so where none is loaded."""
    write("NVFP4", tmp_path / "hf")
    name = f"{Q}.weight_scale_2"
    other = copy_of(tmp_path / "hf", lambda tensors: tensors[name].fill_(float("nan")))
    found = compare_weights(other, other)
    assert found.not_finite == [name] and not found.identical


def test_a_stitched_base_is_equal_bit_for_bit(write, tmp_path):
    """Heads in bf16 beside a base in fp8, and heads in fp8."""
    write("compressed FP8", tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron")
    for format_, heads in (("bf16", "equal"), ("fp8", "differ")):
        out = tmp_path / format_
        stitch(tmp_path / "hf", tmp_path / "megatron", out, head_format=format_)
        found = compare_weights(tmp_path / "hf", out)
        assert found.parts == f"base equal, heads {heads}"
        assert f"{Q}.weight_scale" in found.equal


@pytest.mark.parametrize("lost", ["first", "second"])
def test_a_missing_part_is_in_one_checkpoint_alone(write, tmp_path, lost):
    write("NVFP4", tmp_path / "hf")
    name = f"{Q}.input_scale"
    other = copy_of(tmp_path / "hf", lambda tensors: tensors.pop(name))
    pair = (other, tmp_path / "hf") if lost == "first" else (tmp_path / "hf", other)
    found = compare_weights(*pair)
    here, there = found.only_first, found.only_second
    assert (here, there) == (([], [name]) if lost == "first" else ([name], []))
    assert f"{Q}.weight_scale" in found.equal and not found.different


@each(
    ("scheme", "changes", "says"),
    [
        ("compressed FP8", {"ignore": []}, "only one lists as not quantised lm_head"),
        (
            "compressed FP8",
            {"kv_cache_scheme": {"type": "float", "num_bits": 8}},
            "say nothing and FP8",
        ),
        ("W4A16_NVFP4", {"ignore": ["lm_head", "*gate"]}, "mixer.gate"),
        ("fp8 blocks", {"modules_to_not_convert": None}, "only one lists as not quantised lm_head"),
    ],
)
def test_settings_that_differ_alone_are_told(scheme, changes, says, write, tmp_path):
    write(scheme, tmp_path / "hf")
    other = copy_of(tmp_path / "hf", lambda tensors: None)
    edit_config(other, quantization_config={**SCHEMES[scheme].config, **changes})
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron", expand_scales=True)
    for first in (tmp_path / "hf", tmp_path / "megatron"):
        found = compare_weights(first, other)
        (told,) = found.settings
        assert says in told and not found.different and not found.identical


def test_keys_and_values_of_a_plain_base_are_compared(tmp_path):
    write_base(tmp_path / "hf", "*-")
    other = copy_of(tmp_path / "hf", lambda tensors: None)
    edit_config(
        other, quantization_config={"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
    )
    assert compare_weights(other, other).identical
    assert compare_weights(tmp_path / "hf", other).settings
