"""Faults in the files of every family: each is named, exit code 2, nothing left; and heads put into
every family."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpkit.checkpoint import load_config
from mtpkit.checkpoint.families import FAMILIES, get_family
from mtpkit.checkpoint.lint import lint
from mtpkit.checkpoint.stitch import stitch
from mtpkit.checkpoint.tensors import bits_equal
from tests.checkpoint import qwen_models as qwen
from tests.checkpoint.builders import add_heads, edit, write_base
from tests.checkpoint.family_models import write_family
from tests.checkpoint.test_cli import convert
from tests.checkpoint.test_round_trip import read_all


def _nemotron(directory: Path) -> None:
    write_base(directory, "M*-E")
    add_heads(directory)


def _qwen(family: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        dense = {
            "qwen3_5": {},
            "qwen3_5_text": {},
            "qwen3_next": dict(mlp_only_layers=[0, 1, 2, 3]),
        }
        qwen.write(family, directory, **dense.get(family, EXPERTS))
        qwen.add_heads(family, directory)

    return write


EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=20,
)
WRITERS = {
    "nemotron_h": _nemotron,
    **{family: _qwen(family) for family in FAMILIES if family.startswith("qwen")},
}
"""Of families with more kinds of layers than those of `family_models`, or without a row there."""
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def clean(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a family, with a head, in one file."""
    directory = tmp_path_factory.mktemp("faults") / request.param
    WRITERS.get(request.param, partial(write_family, request.param))(directory)
    return directory


@pytest.fixture
def hf(clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may change, under a short path: errors are cut to a length."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(clean, "hf")
    return Path("hf")


def heads(directory: Path) -> list[str]:
    """Names of the heads' own tensors, copies of the base's left out."""
    config = load_config(directory)
    table = get_family(config.family).table(config)
    names = read_all(directory).keys()
    return sorted(table.mtp_names(table.stored_in(names)) - table.copies.keys())


def test_every_wrong_tensor_is_named(hf, tmp_path, capsys):
    own = heads(hf)
    config = load_config(hf)
    table = get_family(config.family).table(config)
    shapes = table.hf_shapes(table.stored_in(read_all(hf)))
    base = sorted(name for name in shapes.keys() - own if name.endswith("proj.weight"))
    renamed = own[0]
    missing = base[0]
    odd = own[-1]
    short = base[-1]
    extra = "mtp.unheard.weight"

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[renamed + "s"] = tensors.pop(renamed)
        tensors[extra] = torch.ones(3)
        tensors[odd] = tensors[odd].to(torch.int32)
        tensors[short] = tensors[short][:-1].clone()
        del tensors[missing]

    edit(hf, damage)
    assert convert("import", hf, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
    found = "\n".join(finding.text for finding in lint(hf) if finding.fatal)
    for name in (renamed, missing, odd, short, extra, renamed + "s"):
        assert name in found and (name in error or len(error) > 300), name
    for words in ("2 missing", "2 unexpected", "1 of another shape", "1 not stored as fp64"):
        assert words in error


def shard(directory: Path, count: int = 3) -> list[Path]:
    """Cut the file of a checkpoint into several with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    paths = [directory / f"model-{number}.safetensors" for number in range(count)]
    names = {path: sorted(tensors)[number::count] for number, path in enumerate(paths)}
    for path, part in names.items():
        save_file({name: tensors[name] for name in part}, path, metadata={"format": "pt"})
    weight_map = {name: path.name for path, part in names.items() for name in part}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return paths


def test_damaged_shards_and_a_lying_index_are_named_together(hf, tmp_path, capsys):
    paths = shard(hf)
    index = json.loads((hf / INDEX).read_text())
    lie = next(name for name, file in index["weight_map"].items() if file == paths[1].name)
    index["weight_map"][lie] = paths[0].name
    index["weight_map"]["unheard.of"] = "model-9.safetensors"
    (hf / INDEX).write_text(json.dumps(index))
    paths[2].write_bytes(paths[2].read_bytes()[:-7])
    for command in ("import", "stitch"):
        others = [hf] if command == "stitch" else []
        assert convert(command, hf, *others, tmp_path / "out") == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        for words in (
            "missing model-9.safetensors",
            f"{paths[2].name} is damaged",
            f"{paths[0].name}, {paths[1].name} and {INDEX} disagree about",
            lie,
        ):
            assert words in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_heads_go_into_every_family(clean, hf, tmp_path):
    paths = shard(hf)
    own = heads(hf)
    trained = shutil.copytree(clean, tmp_path / "trained")
    edit(trained, lambda tensors: [tensors[name].mul_(1.25) for name in own])
    assert convert("import", trained, tmp_path / "run") == 0
    done = stitch(hf, tmp_path / "run", tmp_path / "out", link=True)
    before = read_all(hf)
    want = read_all(trained)
    after = read_all(tmp_path / "out")
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        if name not in own:
            assert bits_equal(tensor, before[name]), name
        else:  # transforms that add and subtract may round
            torch.testing.assert_close(tensor, want[name], rtol=1e-6, atol=1e-6)
            assert not torch.equal(tensor, before[name])
    assert {path.name for path in paths} == {*done.files, *done.kept_files}
    assert load_config(tmp_path / "out") == load_config(hf)
    changed, config = (json.loads((d / "config.json").read_text()) for d in (tmp_path / "out", hf))
    assert {key for key in config if changed.get(key) != config[key]} <= {"mtpkit"}


def test_every_family_has_a_checkpoint_here(clean):
    assert load_config(clean).family == clean.name and len(heads(clean)) > 10
