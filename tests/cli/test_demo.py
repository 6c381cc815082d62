"""`mtpkit demo`: what it removes and what it refuses to; the whole of it runs in
tests/integration."""

import sys
from types import SimpleNamespace

import pytest
import torch

from mtpkit.bench.speedup import SpeedupRow
from mtpkit.cli import demo
from mtpkit.errors import MtpkitError


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """The demo changes to the root of the checkout."""
    monkeypatch.chdir(demo.ROOT)


def test_an_earlier_demo_is_removed(tmp_path):
    out = tmp_path / "demo"
    demo._start_over(out)
    (out / "run").mkdir()
    (out / "report.json").write_text("{}")
    demo._start_over(out)
    assert [path.name for path in out.iterdir()] == [demo.MARK]


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_anything_else_is_left_alone(kind, tmp_path, call, capsys):
    out = tmp_path / "mine"
    if kind == "directory":
        out.mkdir()
        (out / "thesis.txt").write_text("mine")
    else:
        out.write_text("mine")
    assert call(demo.app, "--output", out) == 2
    why = (
        "holds files other than a demo; name another directory"
        if kind == "directory"
        else "is a file"
    )
    assert f"{out} {why}" in capsys.readouterr().err
    assert (out / "thesis.txt" if kind == "directory" else out).read_text() == "mine"


def test_a_place_below_a_file_is_refused(tmp_path, call, capsys):
    (tmp_path / "mine").touch()
    assert call(demo.app, "--output", tmp_path / "mine" / "demo") == 2
    assert f"{tmp_path / 'mine'} is a file; name a directory" in capsys.readouterr().err


def test_settings_are_checked_before_an_earlier_demo_goes(tmp_path, call, capsys):
    out = tmp_path / "demo"
    demo._start_over(out)
    (out / "report.json").write_text("{}")
    assert call(demo.app, "stepz=5", "--output", out) == 2
    assert "stepz" in capsys.readouterr().err and (out / "report.json").exists()


def test_a_batch_is_divided_among_as_many_processes_as_share_it_evenly(monkeypatch):
    calls = []
    monkeypatch.setattr(demo, "_call", lambda command, **variables: calls.append(command))
    monkeypatch.setattr(demo.os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    data = SimpleNamespace(global_batch_size=4, micro_batch_size=8)
    demo._train(SimpleNamespace(data=data), ["steps=3"])
    (command,) = calls
    assert command[command.index("--nproc-per-node") + 1] == "2"
    assert command[-2:] == ["steps=3", "data.micro_batch_size=2"]


def test_without_the_examples_it_says_so(tmp_path, call, capsys, monkeypatch):
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    assert call(demo.app) == 2
    assert "the demo needs a checkout of mtpkit" in capsys.readouterr().err


def test_heads_that_learnt_too_little_fail_the_demo():
    def rows(*lengths):
        return [SpeedupRow(1, k, 40.0, 1.0, length, [], 1.0) for k, length in enumerate(lengths)]

    demo._require_learnt(rows(1.0, 1.5, 1.7, 1.8))
    with pytest.raises(MtpkitError, match=r"acceptance length of 1\.79, where 1\.8 is the least"):
        demo._require_learnt(rows(1.0, 1.5, 1.7, 1.79))


def test_a_command_that_fails_ends_the_demo():
    with pytest.raises(MtpkitError, match="failed with exit code 3; see its output above"):
        demo._call([sys.executable, "-c", "raise SystemExit(3)"])
