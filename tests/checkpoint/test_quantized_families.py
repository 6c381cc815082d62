"""Quantised matrices of every family through Megatron's layout, and what is refused there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.directory import open_directory
from mtpkit.checkpoint.tensors import bits_equal
from mtpkit.errors import UserError
from mtpkit.model.formats import Fp8
from tests.checkpoint.builders import add_heads, edit, edit_config, write_base
from tests.checkpoint.family_models import FAMILIES, write_family
from tests.shared import each

Tensors = dict[str, Tensor]
LEFT = ("embed", "lm_head", "gate.weight", "conv1d", "eh_proj", "fc.weight", "head.weight", "norm")
LEFT_TOO = ("in_proj_a", "in_proj_b", "in_proj_ba", "input_proj", "visual", "shared_expert_gate")
ROWS = 2
"""Rows of blocks that no transform of a toy cuts."""


def fp8(rows: int | None, columns: int | None, inputs: dict[str, Any] | None) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors, or of DeepSeek's blocks."""
    if rows and columns:
        return {"quant_method": "fp8", "weight_block_size": [rows, columns]}
    weights = {"num_bits": 8, "type": "float", "strategy": "channel" if rows else "tensor"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


SCHEMES: dict[str, tuple[int | None, int | None, Callable[[Tensor], Tensor]]] = {
    "block": (ROWS, 4, lambda scales: scales),
    "channel": (1, None, lambda scales: scales),
    "tensor": (None, None, lambda scales: scales.reshape(())),
}


def quantize(directory: Path, scheme: str) -> Tensors:
    """Quantise the matrices of a directory, each with its own scales; returns its tensors."""
    rows, columns, shaped = SCHEMES[scheme]
    name = "weight_scale_inv" if scheme == "block" else "weight_scale"
    kind = Fp8(rows=rows, columns=columns, scale=name)

    def change(tensors: Tensors) -> None:
        for key in sorted(tensors):
            tensor = tensors[key]
            if tensor.dim() < 2 or any(each in key for each in (*LEFT, *LEFT_TOO)):
                continue
            if tensor.dim() == 3 and scheme == "block":
                parts = [kind.quantize(one.float()) for one in tensor]
                tensors[key] = torch.stack([part["weight"] for part in parts])
                tensors[f"{key}_scale_inv"] = torch.stack([part[name] for part in parts])
            elif tensor.dim() == 2:
                part = kind.quantize(tensor.float())
                tensors[key] = part["weight"]
                tensors[key.removesuffix("weight") + name] = shaped(part[name])

    edit(directory, change)
    edit_config(directory, quantization_config=fp8(rows, columns, None))
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("scheme", SCHEMES)
@each("family", FAMILIES)
def test_every_family_keeps_its_matrices(family: str, scheme: str, tmp_path: Path) -> None:
    write_family(family, tmp_path / "hf", dtype=torch.bfloat16)
    before = quantize(tmp_path / "hf", scheme)
    source = open_directory(tmp_path / "hf").weights()
    assert len(source.formats) > 4
    # `read` moves the rows of widened matrices, and so does not share how parts are moved.
    for name in source.formats:
        matrix = source.quantized(name)
        assert matrix.format.rows == SCHEMES[scheme][0]
        assert torch.equal(matrix.widen(torch.bfloat16), source.read(name)), name
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert bits_equal(after[name], tensor), name


def test_a_matrix_whose_columns_move_is_not_kept(tmp_path: Path) -> None:
    """MiMo's heads read the hidden state first, Megatron's last."""
    write_family("mimo", tmp_path / "hf", dtype=torch.bfloat16)
    quantize(tmp_path / "hf", "channel")
    name = "model.mtp_layers.0.input_proj.weight"

    def change(tensors: Tensors) -> None:
        parts = Fp8(rows=1, columns=None).quantize(tensors[name].float())
        tensors |= {name: parts["weight"], f"{name}_scale": parts["weight_scale_inv"]}

    edit(tmp_path / "hf", change)
    with pytest.raises(UserError, match=r"input_proj.weight: .*columns.*: widen them by --fp8-as"):
        import_checkpoint(tmp_path / "hf", tmp_path / "megatron", expand_scales=True)
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron", fp8_as=torch.bfloat16)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a scale per matrix."""
    directory = tmp_path_factory.mktemp("stored")
    write_base(directory, "*E", dtype=torch.bfloat16)
    add_heads(directory, "*-")
    quantize(directory, "tensor")
    return directory


Q = "backbone.layers.0.mixer.q_proj.weight"
UP = "backbone.layers.1.mixer.experts.1.up_proj.weight"


def copy_of(source: Path, target: Path, change: Callable[[Tensors], object]) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    edit(target, change)
    return target


@each(
    ("value", "told"),
    [
        (float("nan"), "NaN or infinity"),
        (float("inf"), "NaN or infinity"),
        (-0.5, "is negative"),
        (0.0, "is 0 for elements that are not"),
    ],
)
def test_hostile_scales_are_named(stored: Path, tmp_path: Path, value: float, told: str) -> None:
    def damage(tensors: Tensors) -> None:
        tensors[f"{Q}_scale"].fill_(value)
        tensors[f"{UP}_scale"].fill_(value)

    directory = copy_of(stored, tmp_path / "hf", damage)
    for widen in (None, torch.bfloat16):
        with pytest.raises(UserError) as caught:
            import_checkpoint(directory, tmp_path / "megatron", fp8_as=widen)
        assert told in str(caught.value) and not (tmp_path / "megatron").exists()
        assert Q in str(caught.value) and UP in str(caught.value)


@each(
    ("change", "told"),
    [
        (lambda t: t.pop(f"{Q}_scale"), rf"1 missing.*{Q}_scale"),
        (lambda t: t.update({f"{Q}_scale": torch.ones(3)}), rf"{Q}_scale \[3\] float32 instead"),
        (lambda t: t.update({f"{Q}_scale": torch.ones(()).int()}), rf"{Q}_scale \[\] int32"),
        # of another tensor: of a matrix with blocks
        (lambda t: t.update({f"{Q}_scale": torch.ones(4, 4)}), rf"{Q}_scale \[4, 4\]"),
        (lambda t: t.update({f"{Q}_scale_inv": torch.ones(4, 4)}), rf"{Q}_scale_inv is unknown"),
        (lambda t: t.update({Q[:-6] + "input_scale": torch.ones(())}), "input_scale is unknown"),
        (lambda t: t.update({"lm_head.weight_scale": torch.ones(())}), "1 unexpected: lm_head"),
        (lambda t: t.update({Q: t[Q].to(torch.float8_e5m2)}), rf"{Q} float8_e5m2"),
        (lambda t: t.update({Q: t[Q].view(torch.uint8)}), f"{Q} is stored as nvfp4, but"),
        (lambda t: t[Q].view(torch.uint8).fill_(127), f"NaN or infinity.*{Q}"),
    ],
)
def test_what_does_not_fit_is_named(
    stored: Path, tmp_path: Path, change: Callable[[Tensors], object], told: str
) -> None:
    directory = copy_of(stored, tmp_path / "hf", change)
    with pytest.raises(UserError, match=told):
        import_checkpoint(directory, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()


def _settings(**changes: Any) -> dict[str, Any]:
    return fp8(None, None, None) | changes


@each(
    ("settings", "told"),
    [
        (_settings(ignore=["backbone.layers.0.mixer.q_proj"]), f"{Q} is stored as fp8, but"),
        (_settings(ignore=["re:.*q_proj"]), f"{Q} is stored as fp8, but"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt NVFP4 has no fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "missing.*input_scale"),
        ({"quant_method": "modelopt", "quant_algo": "INT8"}, "quant_algo 'INT8' is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "no quantized_layers"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"backbone.layers.9": {"quant_algo": "FP8"}},
            },
            "stored as fp8, but modelopt MIXED_PRECISION does not say so",
        ),
        (fp8(8, 8, None), r"o_proj.weight_scale \[\] float32 instead of \[4, 4\]"),
        (fp8(1, None, None), r"o_proj.weight_scale \[\] float32 instead of \[32, 1\]"),
        (_settings(transform_config={"config_groups": {"u": {}}}), "transform_config"),
        ({"quant_method": "awq", "bits": 4}, "stored as fp8, but awq has no fp8"),
        ({"quant_method": "bitsandbytes"}, "quantization_config"),
    ],
)
def test_settings_that_contradict_tensors_are_refused(
    stored: Path, tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    directory = copy_of(stored, tmp_path / "hf", lambda tensors: None)
    edit_config(directory, quantization_config=settings)
    with pytest.raises(UserError, match=told) as caught:
        import_checkpoint(directory, tmp_path / "megatron")
    assert "\n" not in str(caught.value) and not (tmp_path / "megatron").exists()


def test_groups_that_differ_in_inputs_alone_are_refused(stored: Path, tmp_path: Path) -> None:
    directory = copy_of(stored, tmp_path / "hf", lambda tensors: None)
    token = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    groups = {
        name: fp8(None, None, inputs)["config_groups"]["group_0"] | {"targets": targets}
        for name, inputs, targets in (
            ("first", None, ["re:.*(q|k|v)_proj"]),
            ("second", token, ["re:.*(o|up|down)_proj"]),
        )
    }
    edit_config(directory, quantization_config=_settings(config_groups=groups))
    source = open_directory(directory).weights()
    rules = {name: kind.inputs.rule for name, kind in source.formats.items()}
    assert rules["decoder.layers.0.self_attention.linear_qkv.weight"] == "none"
    assert rules["decoder.layers.0.self_attention.linear_proj.weight"] == "token"
    with pytest.raises(UserError, match=r"fits several rules.*--fp8-as"):
        import_checkpoint(directory, tmp_path / "megatron")


def test_places_of_settings_that_contradict_each_other(stored: Path, tmp_path: Path) -> None:
    directory = copy_of(stored, tmp_path / "hf", lambda tensors: None)
    edit_config(directory, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    own = {"quantization": {"quant_algo": "NVFP4"}}
    (directory / "hf_quant_config.json").write_text(json.dumps(own))
    with pytest.raises(UserError, match="contradict each other: quant_algo FP8 and NVFP4"):
        import_checkpoint(directory, tmp_path / "megatron")


def widened(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = (tensors[name].float() * tensors.pop(f"{name}_scale")).bfloat16()

    return change


@each(
    ("change", "told"),
    [
        (widened(Q), r"q_proj.*stored as plain numbers and fp8.*--fp8-as"),
        (widened(UP), r"linear_fc1.*experts of one layer.*--fp8-as"),
    ],
)
def test_what_megatron_joins_must_be_stored_alike(
    stored: Path, tmp_path: Path, change: Callable[[Tensors], None], told: str
) -> None:
    directory = copy_of(stored, tmp_path / "hf", change)
    with pytest.raises(UserError, match=told):
        import_checkpoint(directory, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()
    import_checkpoint(directory, tmp_path / "megatron", fp8_as=torch.bfloat16)
    weights = open_directory(tmp_path / "megatron").weights()
    again = open_directory(directory).weights()
    assert all(torch.equal(weights.read(name), again.read(name)) for name in again.tensors)
