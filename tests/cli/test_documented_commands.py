"""The scripts, called with the words that their documentation has: `--k 0 1 2 3`, `--out`, two
directories, `key=value`."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from mtpkit.cli.demo import ROOT
from mtpkit.training import loop
from mtpkit.training.config.describe import describe_settings
from mtpkit.training.config.settings import TrainConfig


@pytest.fixture
def script(monkeypatch, capsys):
    """Run a script of the checkout; return its exit code and what it prints on standard output."""

    def script(name: str, *words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(ROOT / name), run_name="__main__")
        return int(stop.value.code or 0), capsys.readouterr().out

    return script


def test_eval_speedup(script, model_dir, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the cat\non the mat\n")
    line = (
        f"--model {model_dir} --prompts {prompts} --k 0 1 2 --batch-size 1 2 --max-tokens 8"
        f" --out {tmp_path / 'out'}"
    )
    code, printed = script("infer/eval_speedup.py", *line.split())
    assert code == 0
    last = json.loads(printed.splitlines()[-1])
    assert last.keys() == {"rows", "model", "device", "dtype", "commit"}
    assert [(row["batch_size"], row["k"]) for row in last["rows"]] == [
        (size, k) for size in (1, 2) for k in (0, 1, 2)
    ]
    assert {
        "tokens_per_s",
        "speedup",
        "acceptance_length",
        "conditional_acceptance",
        "identical",
    } <= last["rows"][0].keys()
    assert (tmp_path / "out" / "report.json").exists()


def test_convert(script, model_dir, tmp_path):
    def convert(*words: object) -> int:
        return script("convert/convert.py", *words)[0]

    assert convert("import", model_dir, tmp_path / "megatron") == 0
    assert convert("export", tmp_path / "megatron", tmp_path / "hf") == 0
    assert convert("verify", model_dir, tmp_path / "hf") == 0
    assert convert("stitch", model_dir, tmp_path / "megatron", tmp_path / "stitched") == 0
    assert convert("verify", tmp_path / "stitched", tmp_path / "megatron") == 0
    code, printed = script("convert/convert.py", "lint", tmp_path / "hf")
    assert code in (0, 2) and "vLLM" in printed and "SGLang" in printed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (("outputs/corpus/train.jsonl",), "kl", 3)),
        (["data.train=[a.txt,b.txt]", "loss.kind=tv"], (("a.txt", "b.txt"), "tv", 3)),
        (["heads.num_depths=2"], (("outputs/corpus/train.jsonl",), "kl", 2)),
    ],
)
def test_train(script, words, expected, monkeypatch):
    """The settings that reach the training."""
    reached: list[TrainConfig] = []

    def train(config: TrainConfig) -> Path:
        reached.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train", train)
    config = ROOT / "examples" / "train_tiny.yaml"
    assert script("train/train_mtp.py", "--config", config, *words)[0] == 130
    (found,) = reached
    assert (found.data.train, found.loss.kind, found.heads.num_depths) == expected


@pytest.mark.parametrize(
    ("name", "required"),
    [
        ("infer/eval_speedup.py", ["--model", "--prompts"]),
        ("infer/generate.py", ["--model"]),
    ],
)
def test_help_names_what_is_required(script, name, required):
    code, printed = script(name, "--help")
    assert code == 0
    entries = ["--" + entry for entry in " ".join(printed.split()).split(" --")[1:]]
    found = [entry.split()[0] for entry in entries if "[required]" in entry]
    assert found == required


def test_help_of_training_names_the_settings_that_are_required(script):
    required = [
        line.split(":")[0].strip()
        for line in describe_settings().splitlines()
        if line.endswith(": ???")
    ]
    assert required == ["model", "output", "train"]
    code, printed = script("train/train_mtp.py", "--help")
    assert code == 0 and "Required: model, output and data.train" in " ".join(printed.split())
