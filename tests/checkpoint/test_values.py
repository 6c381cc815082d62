"""Weights that are no finite floating-point numbers are refused by name, wherever they are read or
written."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from mtpkit import LLM
from mtpkit.checkpoint import (
    load_checkpoint,
    load_model,
    load_model_weights,
    save_checkpoint,
    save_hf_model,
    save_model,
)
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.directory import latest_iteration, load_config
from mtpkit.checkpoint.tensors import is_finite
from mtpkit.checkpoint.verify import compare_logits, compare_weights
from mtpkit.errors import UserError
from mtpkit.model import build_model
from tests.checkpoint.builders import edit, write_megatron_copy
from tests.shared import each

NOT_FINITE = [float("nan"), float("inf"), -float("inf"), 3.4e38]
"""The last one is a number in fp32 and infinite in bf16."""

HF_NAMES = ("lm_head.weight", "mtp.layers.0.eh_proj.weight")
MEGATRON_NAMES = ("output_layer.weight", "mtp.layers.0.eh_proj.weight")


def put(value: float, *names: str):
    """Change the last number of each tensor."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            tensors[name].view(-1)[-1] = value

    return change


def stored_as(dtype: torch.dtype, *names: str):
    return lambda tensors: tensors.update({name: tensors[name].to(dtype) for name in names})


def refused(action, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        action()
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value), (
        caught.value
    )


@each("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@each("place", [0, 7, 14])
def test_one_number_in_a_tensor(dtype, place):
    tensor = torch.randn(5, 3).to(dtype)
    assert is_finite(tensor) and is_finite(tensor[:0]) and is_finite(tensor[0, 0])
    for value in NOT_FINITE[:3]:
        tensor.view(-1)[place] = value
        assert not is_finite(tensor) and not is_finite(tensor.t())


@pytest.mark.parametrize("value", NOT_FINITE)
def test_files_of_the_hugging_face_layout(hf_dir, tmp_path, value):
    edit(hf_dir, put(value, *HF_NAMES))
    for action in (
        lambda: load_model(hf_dir),
        lambda: load_model_weights(build_model(load_config(hf_dir)), hf_dir),
        lambda: LLM(hf_dir, device="cpu"),
        lambda: compare_logits(hf_dir, hf_dir),
        lambda: import_checkpoint(hf_dir, tmp_path / "out"),
    ):
        refused(action, str(hf_dir), *HF_NAMES)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("value", NOT_FINITE)
def test_files_of_the_megatron_layout(hf_dir, tmp_path, value):
    directory = tmp_path / "megatron"
    experts = "decoder.layers.3.mlp.experts.experts.linear_fc1.weight[2]"
    write_megatron_copy(hf_dir, directory, put(value, *MEGATRON_NAMES, experts))
    refused(lambda: load_model(directory), str(directory), *MEGATRON_NAMES, experts)
    refused(
        lambda: export_checkpoint(directory, tmp_path / "out"),
        str(directory),
        *MEGATRON_NAMES,
        experts,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "megatron"]


def test_models_in_memory_are_not_saved(hf_dir, tmp_path):
    model = load_model(hf_dir)
    save_hf_model(model, tmp_path / "out")
    with torch.no_grad():
        model.output_layer.weight[3, 3] = float("nan")
    refused(
        lambda: save_hf_model(model, tmp_path / "out"), "output_layer.weight", str(tmp_path / "out")
    )
    refused(
        lambda: save_model(model, tmp_path / "saved"),
        "output_layer.weight",
        str(tmp_path / "saved"),
    )
    assert compare_weights(hf_dir, tmp_path / "out").identical
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_run_keeps_its_last_good_checkpoint(hf_dir, tmp_path, part):
    model = load_model(hf_dir)
    run = tmp_path / "run"
    moments = load_model(hf_dir)
    state = {
        "model": model.sharded_state_dict(),
        "optimizer": moments.sharded_state_dict(prefix="optimizer."),
    }
    save_checkpoint(run, 1, state, {}, model.mtpkit_config, hf_dir)
    before = contents(run)
    with torch.no_grad():
        (model if part == "model" else moments).mtp.layers[0].eh_proj.weight[0, 0] = float("inf")
    name = (
        "mtp.layers.0.eh_proj.weight"
        if part == "model"
        else "optimizer.mtp.layers.0.eh_proj.weight"
    )
    for iteration in (1, 2):
        refused(
            lambda at=iteration: save_checkpoint(run, at, state, {}, model.mtpkit_config, hf_dir),
            f"iter_000000{iteration}",
            name,
            "learning rate",
        )
    assert contents(run) == before and latest_iteration(run) == 1


def test_the_base_of_a_run_and_a_checkpoint_to_resume(hf_dir, tmp_path):
    model = load_model(hf_dir)
    heads = {
        name: part for name, part in model.sharded_state_dict().items() if name.startswith("mtp.")
    }
    broken = tmp_path / "broken"
    shutil.copytree(hf_dir, broken)
    edit(broken, put(float("nan"), "lm_head.weight"))
    refused(
        lambda: save_checkpoint(
            tmp_path / "run", 1, {"model": heads}, {}, model.mtpkit_config, hf_dir, base=broken
        ),
        "lm_head.weight",
    )
    assert not (tmp_path / "run").exists()
    write_megatron_copy(hf_dir, tmp_path / "megatron", put(float("nan"), *MEGATRON_NAMES))
    refused(
        lambda: load_checkpoint(tmp_path / "megatron", {"model": model.sharded_state_dict()}),
        str(tmp_path / "megatron"),
        *MEGATRON_NAMES,
    )


def test_equal_tensors_with_nan_are_a_finding(hf_dir, tmp_path):
    write_megatron_copy(hf_dir, tmp_path / "clean", lambda tensors: None)
    write_megatron_copy(hf_dir, tmp_path / "nan", put(float("nan"), *MEGATRON_NAMES))
    both = compare_weights(tmp_path / "nan", tmp_path / "nan")
    assert (
        sorted(both.not_finite) == sorted(MEGATRON_NAMES)
        and not both.different
        and not both.identical
    )
    one = compare_weights(tmp_path / "clean", tmp_path / "nan")
    assert sorted(one.not_finite) == sorted(MEGATRON_NAMES) and len(one.different) == 2


def test_some_names_and_a_count(hf_dir):
    names: list[str] = []

    def spoil(tensors):
        names.extend(sorted(tensors)[:13])
        put(float("nan"), *names)(tensors)

    edit(hf_dir, spoil)
    with pytest.raises(UserError) as caught:
        load_model(hf_dir)
    named = sum(
        f"{name}," in str(caught.value) or f"{name} and" in str(caught.value) for name in names
    )
    assert named > 2 and f"and {13 - named} more" in str(caught.value)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
)
def test_integers_are_no_weights(hf_dir, tmp_path, dtype):
    write_megatron_copy(hf_dir, tmp_path / "megatron", stored_as(dtype, *MEGATRON_NAMES))
    edit(hf_dir, stored_as(dtype, *HF_NAMES))
    for action in (
        lambda: load_model(hf_dir),
        lambda: LLM(hf_dir, device="cpu"),
        lambda: import_checkpoint(hf_dir, tmp_path / "out"),
        lambda: compare_weights(hf_dir, hf_dir),
    ):
        refused(action, str(hf_dir), *HF_NAMES)
    model = build_model(load_config(tmp_path / "megatron"))
    for action in (
        lambda: load_model(tmp_path / "megatron"),
        lambda: export_checkpoint(tmp_path / "megatron", tmp_path / "out"),
        lambda: load_checkpoint(tmp_path / "megatron", {"model": model.sharded_state_dict()}),
    ):
        refused(
            action, str(tmp_path / "megatron"), *MEGATRON_NAMES, str(dtype).removeprefix("torch.")
        )
    assert not (tmp_path / "out").exists()


def test_a_comparison_by_the_command_fails(hf_dir, tmp_path, capsys):
    from tests.checkpoint.test_cli import convert

    write_megatron_copy(hf_dir, tmp_path / "nan", put(float("nan"), "output_layer.weight"))
    assert convert("verify", tmp_path / "nan", tmp_path / "nan") == 1
    assert "1 hold NaN or infinity: output_layer.weight" in capsys.readouterr().out
    assert json.loads((tmp_path / "nan" / "mtpkit.json").read_text())["family"] == "nemotron_h"


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.uint8, torch.int64]
)
def test_tensors_of_any_dtype_are_compared(hf_dir, tmp_path, dtype):
    write_megatron_copy(hf_dir, tmp_path / "megatron", stored_as(dtype, *MEGATRON_NAMES))
    assert compare_weights(tmp_path / "megatron", tmp_path / "megatron").identical
    different = compare_weights(hf_dir, tmp_path / "megatron").different
    assert [name.split(" ")[0] for name in different] == sorted(MEGATRON_NAMES, reverse=True)
