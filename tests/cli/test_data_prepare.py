"""`mtpkit data prepare`: a directory that training maps, whole or not at all."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time

import pytest

from mtpkit.cli.data import app
from mtpkit.data.prepared import read_manifest
from mtpkit.training.config.reading import load_config
from mtpkit.training.loop import train

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}{{ eos_token"
    " }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def files(tmp_path):
    turns = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "sat on the mat"},
    ]
    (tmp_path / "chat.jsonl").write_text(
        (json.dumps({"messages": turns}) + "\n") * 40 + '{"messages": []}\n'
    )
    (tmp_path / "code.txt").write_text("def add(left, right):\n    return left + right\n" * 20)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.fixture
def prepare(call, model_dir, files):
    def prepare(*more, **changes):
        settings = {
            "model": model_dir,
            "data": files / "chat.jsonl",
            "output": files / "out",
            "sequence_length": 32,
        }
        settings |= {"chat_template": files / "template.jinja"} | changes
        named = [
            part
            for name, value in settings.items()
            for part in (f"--{name.replace('_', '-')}", value)
        ]
        return call(app, "prepare", *named, *more)

    return prepare


def test_training_reads_what_was_prepared(files, prepare, model_dir, capsys) -> None:
    assert prepare("--data", files / "chat.jsonl", f"code={files / 'code.txt'}") == 0
    printed = capsys.readouterr()
    assert "data.train=[" in printed.out and "wrote" in printed.out
    rows = {row[0]: row[1:] for row in map(str.split, printed.out.splitlines()) if row}
    assert rows["chat"][:2] == ["41", "1"] and rows["code"][:2] == ["1", "0"]
    manifest = read_manifest(files / "out")
    assert [source.name for source in manifest.sources] == ["chat", "code"]
    assert manifest.sources[0].num_left_out == 1
    settings = {
        "model": model_dir,
        "output": files / "run",
        "data.train": f"[{files / 'out'}]",
        "data.eval": f"[{files / 'out'}]",
        "data.sequence_length": 32,
        "data.global_batch_size": 2,
        "data.eval_sequences": 2,
        "heads.num_depths": 2,
        "heads.fit_tokens": 256,
        "optimizer.warmup_steps": 1,
        "steps": 2,
    }
    run = train(load_config(None, [f"{key}={value}" for key, value in settings.items()]))
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2 and last["loss"] > 0


def test_inspect_shows_prepared_data(files, prepare, call, model_dir, capsys) -> None:
    assert prepare() == 0
    capsys.readouterr()
    assert (
        call(app, "inspect", "--model", model_dir, "--data", files / "out", "--sequence-length", 32)
        == 0
    )
    assert re.search(r"documents left out +│ +1 ", capsys.readouterr().out)


def test_an_output_is_replaced_only_by_force(files, prepare, capsys) -> None:
    assert prepare() == 0
    before = read_manifest(files / "out")
    assert (
        prepare() == 2
        and "holds prepared data already; name another directory, or add --force"
        in capsys.readouterr().err
    )
    assert (
        prepare("--force", "--data", files / "code.txt", files / "code.txt", sequence_length=16)
        == 0
    )
    assert read_manifest(files / "out").sequence_length == 16 and before.sequence_length == 32
    assert {path.name for path in files.iterdir()} == {
        "chat.jsonl",
        "code.txt",
        "template.jinja",
        "out",
    }


def test_what_a_killed_one_left_is_removed(files, prepare) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = [f".out.writing-{platform.node()}-{pid}" for pid in (gone.pid, os.getppid())]
    for name in (*names, str(gone.pid), f".other.writing-{platform.node()}-{gone.pid}"):
        (files / name / "data").mkdir(parents=True)
    before = {path.name for path in files.iterdir()}
    assert prepare() == 0
    assert {path.name for path in files.iterdir()} == before - {names[0]} | {"out"}


def test_killed_and_begun_again(files, prepare, model_dir) -> None:
    arguments = [
        "--model",
        model_dir,
        "--data",
        files / "code.txt",
        "--output",
        files / "out",
        "--sequence-length",
        32,
    ]
    command = [sys.executable, "-m", "mtpkit.cli.main", "data", "prepare", *map(str, arguments)]
    with subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
    ) as process:
        while process.poll() is None and not list(files.glob(".out.writing-*")):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and list(files.glob(".out.writing-*"))
    assert prepare() == 0
    assert not list(files.glob(".out.*")) and read_manifest(files / "out").sequence_length == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "nowhere"}, "nowhere does not exist"),
        ({"model": "nowhere"}, "model directory nowhere does not exist"),
        ({"sequence_length": 1}, "sequence length 1 is too short"),
        ({"chat_template": "nowhere.jinja"}, "chat template nowhere.jinja cannot be read"),
        ({"messages_column": "talk"}, "has the columns messages"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(files, prepare, capsys, changes, message) -> None:
    assert prepare(**changes) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mtpkit: error: ") and message in line
    assert {path.name for path in files.iterdir()} == {"chat.jsonl", "code.txt", "template.jinja"}


def test_tokens_that_are_not_checked_are_told_of(
    files, model_dir, tokenizer_dir, call, capsys
) -> None:
    data = ["--data", files / "code.txt", "--sequence-length", 16]
    assert call(app, "inspect", "--model", model_dir, *data) == 0
    assert not capsys.readouterr().err
    assert call(app, "inspect", "--model", tokenizer_dir, *data) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "mtpkit: warning: token ids are not checked against the model's vocabulary: "
    )
    assert str(tokenizer_dir) in line
