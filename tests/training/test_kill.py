"""Training that is killed at any moment goes on as if nothing had been, bit for bit."""

import json
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from mtpkit.checkpoint import latest_iteration, load_model
from mtpkit.training.config.reading import load_config
from mtpkit.training.loop import train
from tests.ranks import fork
from tests.training.test_run import settings  # noqa: F401

STEPS = 10


def work(overrides: list[str]) -> None:
    train(load_config(None, overrides))


def launch(overrides: list[str]) -> ForkServerProcess:
    return fork(work, overrides)


def curve(output: Path) -> list[dict]:
    """Every line of the metrics without what the clock says, in the order of the file."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    clock = {"time", "tokens_per_s"}
    return [{key: value for key, value in line.items() if key not in clock} for line in lines]


def saving(output: Path) -> bool:
    return any(output.glob(".iter_*.writing"))


def after(seconds: float) -> Callable[[Path], bool]:
    """True from so many seconds after the first line of metrics on."""
    began: list[float] = []

    def due(output: Path) -> bool:
        if not began and (output / "metrics.jsonl").exists():
            began.append(time.monotonic())
        return bool(began) and time.monotonic() - began[0] > seconds

    return due


def in_a_save(number: int, delay: float) -> Callable[[Path], bool]:
    """True from so many seconds after the beginning of the `number`-th save on."""
    begun: list[bool] = []
    before = True  # what an earlier kill left behind is no save

    def due(output: Path) -> bool:
        nonlocal before
        now = saving(output)
        if now and not before:
            begun.append(True)
        before = now
        if len(begun) < number:
            return False
        time.sleep(delay)
        return True

    return due


def kill_when(process, output: Path, due: Callable[[Path], bool]) -> bool:
    """SIGKILL the process when it is due, or let it end before; whether it was in the middle of a
    save."""
    while process.is_alive() and not due(output):
        time.sleep(0.001)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL and saving(output)


def check_checkpoints(output: Path, whole: Path) -> None:
    """All checkpoints that can be chosen are whole: the newest, the best and those with a name."""
    if (output / "latest_checkpointed_iteration.txt").exists():
        load_model(output)
        assert (output / "tokenizer.json").read_bytes() == (whole / "tokenizer.json").read_bytes()
    for path in (*output.glob("iter_*"), *output.glob("best")):
        load_model(path)


@pytest.mark.parametrize("killed", ["optimizer.kind=muon", "optimizer.kind=adamw"])
def test_a_killed_run_goes_on_bit_for_bit(settings, killed, tmp_path):  # noqa: F811
    base = [*settings, f"steps={STEPS}", "save_interval=3", "eval_interval=2", "keep_checkpoints=1"]
    base += ["loss.hidden_mix=0.5", "optimizer.lr=1e-2"]
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    uninterrupted = launch([*base, f"output={whole}", killed])
    uninterrupted.join()
    assert uninterrupted.exitcode == 0

    command = [*base, f"output={parts}", killed]
    cut_saves = 0
    reached = set()
    moments = [
        in_a_save(2, 0),
        after(random.uniform(0, 0.5)),
        in_a_save(2, random.uniform(0, 0.1)),
        in_a_save(1, 0),
    ]
    # where those came too early or too late
    more = [in_a_save(1, 0.01 * number) for number in range(6)]
    for number, due in enumerate(moments + more, 1):
        cut_saves += kill_when(launch(command), parts, due)
        check_checkpoints(parts, whole)
        reached.add(latest_iteration(parts))
        proven = cut_saves >= 2 and len(reached - {None}) >= 2
        if proven and number >= len(moments):
            break
    assert proven, "the kills prove nothing"
    last = launch(command)
    last.join()
    assert last.exitcode == 0
    assert curve(parts) == curve(whole)
    assert [line["step"] for line in curve(parts) if line["kind"] == "train"] == list(
        range(1, STEPS + 1)
    )
    assert (parts / "best.json").read_text() == (whole / "best.json").read_text()
    names = [sorted(path.name for path in output.iterdir()) for output in (parts, whole)]
    assert names[0] == names[1] and not any(name.startswith(".") for name in names[0])
