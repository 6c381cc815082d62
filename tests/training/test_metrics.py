"""Destinations of metrics: lines that a killed run left, scalars of boards, and W&B by a stub of
its package."""

import json
import logging
import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest

from mtpkit.errors import UserError
from mtpkit.training import metrics
from mtpkit.training.log import LOG, Warnings
from mtpkit.training.metrics import MetricsLog, Throughput, check_wandb, read_metrics


def lines(output):
    return [(line["kind"], line["step"]) for line in read_metrics(output / "metrics.jsonl")]


def test_a_run_goes_on_after_the_lines_of_its_checkpoint(tmp_path):
    log = MetricsLog(tmp_path, 0, 9, enabled=True)
    log.write("eval", 0, {"loss": 3.0})
    for step in (1, 2, 3):
        log.write("train", step, {"loss": 1 / step})
    log.sync()
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    MetricsLog(tmp_path, 2, 9, enabled=True).close()
    assert lines(tmp_path) == [("eval", 0), ("train", 1), ("train", 2)]
    assert read_metrics(tmp_path / "metrics.jsonl")[2]["loss"] == 1 / 2
    # there was no checkpoint: everything is done again
    MetricsLog(tmp_path, 0, 9, enabled=True).close()
    assert lines(tmp_path) == []


def test_a_rank_without_results_writes_nothing(tmp_path):
    log = MetricsLog(tmp_path, 0, 9, enabled=False, wandb="project")
    log.write("train", 1, {"loss": 1.0})
    log.sync()
    log.close()
    assert not list(tmp_path.iterdir())


class StubRun:
    def __init__(self, settings):
        self.settings = settings
        self.logged = []
        self.finished = False
        self.metrics = []

    def define_metric(self, name, step_metric):
        self.metrics.append((name, step_metric))

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    """The package as far as it is used; `runs` are those that were started."""
    stub = ModuleType("wandb")
    stub.__spec__ = SimpleNamespace(name="wandb")
    stub.runs, stub.errors = [], SimpleNamespace(Error=RuntimeError)
    stub.init = lambda **settings: stub.runs.append(StubRun(settings)) or stub.runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", stub)
    return stub


def test_wandb_gets_scalars_and_goes_on_with_the_same_run(wandb, tmp_path):
    check_wandb("heads")
    for first in (0, 1):
        log = MetricsLog(tmp_path, first, 9, enabled=True, wandb="heads", settings={"steps": 9})
        log.write(
            "eval", first, {"loss": 2.0, "rates": [0.5, 0.25], "sources": {"code": {"loss": 1.0}}}
        )
        log.close()
    first, second = wandb.runs
    assert first.settings["project"] == "heads" and first.settings["config"] == {"steps": 9}
    assert first.settings["id"] == second.settings["id"] and second.settings["resume"] == "allow"
    assert second.logged == [
        {
            "eval/loss": 2.0,
            "eval/rates_1": 0.5,
            "eval/rates_2": 0.25,
            "eval/sources/code/loss": 1.0,
            "step": 1,
        }
    ]
    assert first.metrics == [("*", "step")] and first.finished


def test_wandb_that_does_not_take_the_run_is_said_in_one_line(wandb, tmp_path):
    def refuse(**settings):
        raise RuntimeError("no API key")

    wandb.init = refuse
    with pytest.raises(UserError, match="no API key; run `wandb login`"):
        MetricsLog(tmp_path, 0, 9, enabled=True, wandb="heads")


def test_wandb_that_is_asked_for_and_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_wandb("")
    with pytest.raises(UserError, match="pip install wandb"):
        check_wandb("heads")


def test_tensorboard_has_every_scalar(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, 0, 9, enabled=True)
    log.write(
        "eval", 4, {"loss": 2.0, "sources": {"code": {"conditional_acceptance": [0.5, 0.25]}}}
    )
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    code = "eval/sources/code/conditional_acceptance"
    assert found == {"eval/loss": [(4, 2.0)], f"{code}_1": [(4, 0.5)], f"{code}_2": [(4, 0.25)]}
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 4


def test_the_rate_is_that_of_the_steps_since_the_last_line(monkeypatch):
    times = iter([0.0, 2.0, 50.0, 53.0, 100.0, 101.0])  # what is between steps does not count
    monkeypatch.setattr("mtpkit.training.metrics.time.perf_counter", lambda: next(times))
    throughput = Throughput()
    for tokens, rate in ((10, 5.0), (10, 4.0)):
        with throughput.step(tokens):
            pass
        assert throughput.rate() == rate
    throughput.reset()
    with throughput.step(7):
        pass
    assert throughput.rate() == 7.0


def test_curves_go_on_after_the_step_of_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "torch.utils.tensorboard.SummaryWriter", lambda directory, purge_step: purge_step
    )
    assert [metrics._tensorboard(tmp_path, step) for step in (0, 4)] == [0, 5]


def test_the_log_has_the_lines_that_a_bar_replaces(tmp_path):
    log = MetricsLog(tmp_path, 0, 10, enabled=True)
    log._bar = SimpleNamespace(
        disable=False, update=int, close=int, set_postfix_str=lambda text, refresh: None
    )
    for step, due in ((1, False), (2, True)):
        log.progress(step, "loss 1", due)
    log.close()
    assert [line[21:] for line in (tmp_path / LOG).read_text().splitlines()] == [
        "step 2 of 10: loss 1"
    ]


def test_ranks_without_results_keep_nothing(tmp_path):
    log = MetricsLog(tmp_path, 0, 10, enabled=False)
    log.message("text")
    log.fail(ValueError("error"))
    log.close()
    assert not (tmp_path / LOG).exists()


@pytest.mark.parametrize("alone", [True, False])
def test_warnings_are_shown_once_and_kept(tmp_path, monkeypatch, alone):
    shown = []
    warned = []
    other = logging.Handler()
    other.emit = shown.append
    monkeypatch.setattr(logging, "lastResort", other)
    monkeypatch.setattr(logging.root, "handlers", [] if alone else [other])
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: warned.append(str(message)))
    with Warnings() as kept:
        logging.getLogger("a").warning("first of %d", 2)
        assert not (tmp_path / LOG).exists()
        kept.keep_in(tmp_path)
        warnings.warn_explicit("second", UserWarning, "file.py", 1, registry={})
        logging.getLogger("a").info("not a warning")
    logging.getLogger("a").warning("after")
    assert [line[21:] for line in (tmp_path / LOG).read_text().splitlines()] == [
        "warning: first of 2",
        "warning: second",
    ]
    assert [record.getMessage() for record in shown] == ["first of 2", "after"] and warned == [
        "second"
    ]
