"""The stall benchmark: which gaps count, on a clock that every step moves on by what it
computes."""

from dataclasses import replace

import pytest
import torch

from mtpkit.bench.load import measure_load, stall, workload
from mtpkit.bench.load.serving import WallClock
from mtpkit.bench.settings import LoadConfig, StallConfig
from mtpkit.bench.shapes import open_model
from mtpkit.errors import UserError

CONFIG = LoadConfig(
    num_speculative_tokens=(0, 2),
    acceptance=(0.5,),
    trace=False,
    engine={"max_num_batched_tokens": 32},
)
STALL = StallConfig(
    decoding_requests=2, arriving_prompts=2, arriving_length=64, lone_length=(8, 50)
)


class StepClock:
    """A step takes a second, and a tenth more for each prompt token that it computes; all else
    takes no time."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time

    def sleep(self, seconds):
        raise AssertionError("nothing waits here")


@pytest.fixture
def short(monkeypatch):
    for name, value in {"_PROMPT_LEN": 40, "_QUIET_STEPS": 6, "_SETTLING_STEPS": 2}.items():
        monkeypatch.setattr(stall, name, value)


@pytest.fixture
def clock(monkeypatch, short):
    clock = StepClock()

    def timed(*args, **settings):
        llm = make(*args, **settings)
        step = llm.engine.step
        scheduler = llm.engine.scheduler
        plan = scheduler.plan

        def planned(decision):
            plans = plan(decision)
            prefill = sum(row.length for one in plans for row in one.rows[one.num_decode_rows :])
            clock.time += prefill / 10
            return plans

        def stepped(*args):
            clock.time += 1
            return step(*args)

        llm.engine.step = stepped
        scheduler.plan = planned
        return llm

    make = workload.LLM
    monkeypatch.setattr(workload, "LLM", timed)
    return clock


def test_gaps_with_and_without_prompts(clock):
    model = open_model("nemotron-h-tiny", torch.device("cpu"))
    kept = []
    result = measure_load(model, CONFIG, STALL, "tiny", kept.append, clock)
    assert [row.k for row in result.rows] == [0, 2] and [len(part.rows) for part in kept] == [1, 2]
    for row in result.rows:
        assert row.quiet_p50_ms == row.quiet_p99_ms == pytest.approx(1000)
        assert row.stalled_p99_ms > 3000 and row.stall == pytest.approx(
            row.stalled_p99_ms / row.quiet_p99_ms
        )
        # Chunks of 32 tokens: a step of 8 tokens; two steps of 32 and 18.
        assert row.lone_ms == pytest.approx([1800, 7000])
    assert "2 requests decode while 2 prompts of 64 tokens arrive" in result.title
    assert result.name == "load_stall" and result.settings["arriving_length"] == 64


def test_nothing_runs_when_a_lone_prompt_arrives(clock, monkeypatch):
    """A step launched ahead may outlast the request that it was for: it is waited for."""
    events = []
    add = stall._Bench._add

    def added(bench, length, tokens):
        if tokens == stall._LONE_TOKENS:
            events.append(("arrives", clock.time))
        return add(bench, length, tokens)

    monkeypatch.setattr(stall, "synchronize", lambda device: events.append(("idle", clock.time)))
    monkeypatch.setattr(stall._Bench, "_add", added)
    measure_load(
        open_model("nemotron-h-tiny", torch.device("cpu")), CONFIG, STALL, "tiny", clock=clock
    )
    waits = events[::2]
    arrivals = events[1::2]
    assert len(waits) == 2 * (1 + 5) * 2  # two K, a warm-up and five repeats of two lengths
    assert [("arrives", time) for what, time in waits if what == "idle"] == arrivals


def test_requests_that_end_too_early_are_told(short, monkeypatch):
    monkeypatch.setattr(stall, "_STEPS_OF_PROMPT", -2)
    model = open_model("nemotron-h-tiny", torch.device("cpu"))
    config = replace(CONFIG, num_speculative_tokens=(0,))
    with pytest.raises(
        UserError,
        match=r"K = 0: requests decoded \d+ tokens before .* lower arriving_prompts \(2\)",
    ):
        measure_load(model, config, STALL)


def test_the_engine_is_left_without_requests(short):
    model = open_model("nemotron-h-tiny", torch.device("cpu"))
    config = replace(CONFIG, num_speculative_tokens=(2,))
    bench = stall._Bench(model, config, STALL, 2, WallClock())
    bench.warm_up()
    engine = bench.llm.engine
    dropped = [stream for stream in bench.streams.values() if stream.max_tokens == bench.room]
    assert len(dropped) == 2 and all(len(stream.tokens) < bench.room for stream in dropped)
    assert (
        not engine.has_unfinished
        and engine.scheduler.blocks.num_free == engine.scheduler.blocks.size
    )


def test_settings_that_cannot_be_measured_are_all_named():
    with pytest.raises(
        UserError,
        match=r"decoding_requests is 0, .*; lone_length is \(\), must be a list of one or more",
    ):
        StallConfig(decoding_requests=0, lone_length=())
    with pytest.raises(UserError, match=r"tokens in all, .* lower arriving_length"):
        StallConfig(arriving_length=1 << 30)
