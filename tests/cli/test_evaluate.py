"""`mtpkit evaluate`: the report, and the gate on correctness."""

import json

import pytest

from mtpkit import bench
from mtpkit.cli.evaluate import app


@pytest.fixture
def prompts(tmp_path):
    (tmp_path / "prompts.txt").write_text("the cat\non the mat\ndef add\n")
    return tmp_path / "prompts.txt"


def test_options_reach_the_measurement(model_dir, prompts, call, capsys, tmp_path):
    options = (
        "--k 2 1 --batch-size 2 --max-tokens 6 --repeats 1 --num-prompts 2 --temperature 0.8 --seed 3 --block-size 4"
    )
    options += " --state-rollback snapshot --ignore-eos --dtype float32"
    out = tmp_path / "out"
    assert call(app, "--model", model_dir, "--prompts", prompts, "--out", out, *options.split()) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["batch_size"], row["k"]) for row in report["rows"]] == [(2, 0), (2, 1), (2, 2)]
    settings = json.loads((out / "report.json").read_text())["settings"]
    assert (settings["prompts"], settings["block_size"], settings["state_rollback"]) == (2, 4, "snapshot")
    sampling = settings["sampling"]
    assert (sampling["temperature"], sampling["seed"], sampling["max_tokens"]) == (0.8, 3, 6) and sampling["ignore_eos"]


@pytest.mark.parametrize(
    ("dtype", "options", "code"),
    [("float32", [], 1), ("bfloat16", [], 0), ("float32", ["--temperature", 1], 0)],
    ids=["greedy fp32", "bf16", "sampling"],
)
def test_changed_tokens_fail_greedy_fp32_alone(dtype, options, code, prompts, call, capsys, tmp_path, monkeypatch):
    rows = [bench.Row(1, 0, 10, 1, 1, [], 1), bench.Row(1, 1, 20, 2, 1.5, [0.5], 2 / 3)]
    report = bench.Report(rows, "dir", "cpu", dtype, None)
    monkeypatch.setattr(bench, "measure_speedup", lambda *_: report)
    out = tmp_path / "out"
    assert call(app, "--model", tmp_path, "--prompts", prompts, "--out", out, *options) == code
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1]) == report.to_dict()
    assert (out / "report.json").exists()
    assert ("33% at batch 1, K = 1" in printed.err) == bool(code)


def test_out_must_not_be_a_file(model_dir, prompts, call, capsys):
    assert call(app, "--model", model_dir, "--prompts", prompts, "--out", prompts) == 2
    assert f"{prompts} is a file; name a directory" in capsys.readouterr().err
