"""Training that is killed at any moment goes on as if nothing had been, bit for bit."""

import json
import multiprocessing
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mtpkit.checkpoint import load_model
from mtpkit.training import load_config, train
from tests.training.test_run import settings  # noqa: F401

STEPS = 12


def work(overrides: list[str]) -> None:
    train(load_config(None, overrides))


@pytest.fixture(scope="module")
def launch():
    """Starts training in a process of its own, which has the imports behind it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mtpkit.training"])

    def launch(overrides: list[str]):
        process = context.Process(target=work, args=(overrides,))
        process.start()
        return process

    return launch


def curve(output: Path) -> list[dict]:
    """Every line of the metrics without what the clock says, in the order of the file."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in lines]


def saving(output: Path) -> bool:
    return any(output.glob(".iter_*.writing"))


def after(seconds: float) -> Callable[[Path], bool]:
    """True from so many seconds after the first step on."""
    began: list[float] = []

    def due(output: Path) -> bool:
        if not began and (output / "metrics.jsonl").exists():
            began.append(time.monotonic())
        return bool(began) and time.monotonic() - began[0] > seconds

    return due


def kill_when(process, output: Path, due: Callable[[Path], bool], delay: float) -> bool:
    """SIGKILL the process a little after `due`; whether it was in the middle of a save. Not if it ends before."""
    while process.is_alive():
        if due(output):
            time.sleep(delay)
            process.kill()
            break
        time.sleep(0.001)
    process.join()
    return process.exitcode == -9 and saving(output)


def test_a_killed_run_goes_on_bit_for_bit(settings, launch, tmp_path):  # noqa: F811
    base = [*settings, f"steps={STEPS}", "save_interval=3", "eval_interval=2", "keep_checkpoints=1"]
    base += ["loss.hidden_mix=0.5", "optimizer.kind=muon", "optimizer.lr=1e-2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    uninterrupted = launch([*base, f"output={whole}"])
    uninterrupted.join()
    assert uninterrupted.exitcode == 0

    command = [*base, f"output={parts}"]
    cut_saves = kills = 0
    for due in [saving, saving, after(random.uniform(0, 1)), after(random.uniform(0, 0.3)), saving, saving]:
        process = launch(command)
        cut_saves += kill_when(process, parts, due, random.uniform(0, 0.05) if due is saving else 0)
        kills += process.exitcode == -9
        for model in (parts, parts / "best"):
            if (parts / "latest_checkpointed_iteration.txt").exists() and model.exists():
                load_model(model)
        for iteration in parts.glob("iter_*"):
            load_model(iteration)
    assert kills >= 4 and cut_saves >= 1
    last = launch(command)
    last.join()
    assert last.exitcode == 0
    assert curve(parts) == curve(whole)
    assert [line["step"] for line in curve(parts) if line["kind"] == "train"] == list(range(1, STEPS + 1))
    assert (parts / "best.json").read_text() == (whole / "best.json").read_text()
    names = [sorted(path.name for path in output.iterdir()) for output in (parts, whole)]
    assert names[0] == names[1] and not any(name.startswith(".") for name in names[0])
