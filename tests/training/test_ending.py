"""The last lines of a run: true, and commands that work as they stand."""

import json
import shlex
from pathlib import Path

import pytest

from mtpkit.cli import run
from mtpkit.cli.main import app
from mtpkit.cli.train import describe_end
from mtpkit.training.config.reading import load_config


@pytest.fixture
def settings(run_settings, text_files, tmp_path):
    """Settings of a short run in a directory whose name a shell would cut."""
    values = {
        "output": tmp_path / "my run",
        "data.eval": f"[cats={text_files[1]}]",
        "data.eval_sequences": 4,
        "data.text_column": "body",
        "steps": 3,
        "eval_interval": 1,
    }
    return run_settings(**values)


def call(*words):
    with pytest.raises(SystemExit) as stop:
        run(app, [str(word) for word in words])
    return int(stop.value.code or 0)


def test_the_commands_that_a_run_ends_with_work(settings, capsys, tmp_path):
    assert call("train", *settings) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"trained heads with their base: {tmp_path / 'my run'}, step 3 of 3" in lines
    commands = [
        line.split(": ", 1)[1].strip()
        for line in lines
        if line.startswith(("export it: ", "evaluate it: "))
    ]
    assert len(commands) == 2 and "--text-column=body" in commands[1]
    for command in commands:
        name, *words = shlex.split(command)
        assert name == "mtpkit" and call(*words) == 0
    assert "cats" in capsys.readouterr().out and (tmp_path / "my run-hf" / "config.json").exists()
    assert call("train", *settings, "steps=4") == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"going on after step 3 of 4, saved in {tmp_path / 'my run' / 'iter_0000003'}" in lines
    assert any(line.endswith(shlex.quote(str(tmp_path / "my run-hf-2"))) for line in lines)


@pytest.mark.parametrize(
    ("best", "says", "where"),
    [
        ((8, 2.0), "the best step is the last one: held-out acceptance length 2.000", "run"),
        (
            (4, 2.5),
            (
                "the best step is 4, in run/best: held-out acceptance length 2.500, ahead of step 8"
                " with 2.000"
            ),
            "run/best",
        ),
        (None, None, "run"),
    ],
)
def test_the_best_step_is_named_beside_the_last(tmp_path, monkeypatch, best, says, where):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/latest_checkpointed_iteration.txt").write_text("8")
    evals = [
        {"kind": "eval", "step": step, "acceptance_length": length}
        for step, length in ((4, 2.5), (8, 2.0))
    ]
    Path("run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evals))
    if best:
        Path("run/best.json").write_text(
            json.dumps({"iteration": best[0], "acceptance_length": best[1]})
        )
    lines = describe_end(
        load_config(None, ["model=base", "output=run", "data.train=[a.txt]", "steps=20"])
    )
    assert lines[0].endswith("run, step 8 of 20") and lines[1:-2] == ([says] if says else [])
    assert lines[-2:] == [
        f"export it:   mtpkit convert export {where} run-hf",
        f"evaluate it: mtpkit acceptance --model {where} --data a.txt",
    ]
