"""Serving by an engine whose steps take the time that a test says, read from a clock of the test's
own."""

from types import SimpleNamespace

import numpy as np
import pytest

from mtpkit.bench.load.serving import Stream, percentiles_ms, serve
from mtpkit.engine import RequestError
from mtpkit.errors import MtpkitError


class FakeClock:
    """Time passes in sleeps and steps alone."""

    def __init__(self):
        self.time = 100.0
        self.sleeps = []

    def now(self):
        return self.time

    def sleep(self, seconds):
        assert seconds > 0
        self.sleeps.append((self.time - 100.0, seconds))
        self.time += seconds


class FakeEngine:
    """Gives every running request `width` tokens per step; a step takes a second for each of
    them."""

    def __init__(self, clock, width=1):
        self.clock = clock
        self.width = width
        self.running = {}
        self.added = []
        self.steps = 0

    @property
    def has_unfinished(self):
        return bool(self.running)

    def add_request(self, prompt, params):
        self.added.append((self.clock.time - 100.0, prompt))
        self.running[str(len(self.added))] = (params.max_tokens, [])
        return str(len(self.added))

    def step(self):
        assert self.running, "a step without a request"
        self.steps += 1
        self.clock.time += len(self.running)
        outputs = []
        for name, (most, tokens) in list(self.running.items()):
            tokens += [0] * min(self.width, most - len(tokens))
            outputs.append(answer(name, list(tokens)))
            if len(tokens) == most:
                del self.running[name]
        return outputs


def answer(name, tokens, error=None):
    return SimpleNamespace(
        request_id=name, outputs=[SimpleNamespace(token_ids=tokens)], error=error
    )


def test_requests_are_added_when_due_and_the_engine_waits_when_idle():
    clock = FakeClock()
    engine = FakeEngine(clock)
    streams = [Stream(0.0, [1], 2), Stream(0.5, [2], 1), Stream(1.5, [3], 1), Stream(9.0, [4], 2)]
    seconds = serve(engine, streams, clock)
    # A step at 0 takes 1; then two run, which takes 2; the third came meanwhile and takes 1; then
    # nothing until 9.
    assert engine.added == [(0.0, [1]), (1.0, [2]), (3.0, [3]), (9.0, [4])]
    assert all(
        added >= stream.arrival for (added, _), stream in zip(engine.added, streams, strict=True)
    )
    assert clock.sleeps == [(4.0, 5.0)]
    assert [stream.times for stream in streams] == [[1.0, 3.0], [3.0], [4.0], [10.0, 11.0]]
    assert [stream.first_seconds for stream in streams] == [1.0, 2.5, 2.5, 1.0]
    assert [stream.gaps for stream in streams] == [[2.0], [], [], [1.0]]
    assert [stream.seconds_per_token for stream in streams] == [2.0, None, None, 1.0]
    assert seconds == 11.0


def test_all_that_is_due_is_added_before_a_step():
    clock = FakeClock()
    engine = FakeEngine(clock)
    streams = [Stream(0.0, [n], 3) for n in range(5)]
    assert serve(engine, streams, clock) == 15.0
    assert (
        [time for time, _ in engine.added] == [0.0] * 5 and engine.steps == 3 and not clock.sleeps
    )


def test_a_request_may_arrive_with_the_end_of_another():
    clock = FakeClock()
    engine = FakeEngine(clock)
    first = Stream(0.0, [1], 2)
    other = Stream(0.0, [2], 1)
    second = Stream(0.0, [3], 2)

    def follow(ended, now):
        if ended is not first:
            return None
        second.arrival = now
        return second

    # Two steps of 2 and 1 seconds, then two of 1 for the request that follows.
    assert serve(engine, [first, other], clock, follow) == 5.0
    assert engine.added == [(0.0, [1]), (0.0, [2]), (3.0, [3])]
    assert second.times == [4.0, 5.0] and second.first_seconds == 1.0


def test_tokens_that_come_at_once_are_one_gap_but_several_tokens():
    clock = FakeClock()
    stream = Stream(0.0, [1], 7)
    serve(FakeEngine(clock, width=3), [stream], clock)
    assert stream.times == [1.0, 2.0, 3.0] and stream.lengths == [3, 6, 7]
    assert stream.gaps == [1.0, 1.0] and stream.seconds_per_token == pytest.approx(2 / 6)


def test_percentiles_are_numpys():
    clock = FakeClock()
    streams = [Stream(n / 3, [n], 1 + n * n % 7) for n in range(40)]
    serve(FakeEngine(clock), streams, clock)
    gaps = [gap for stream in streams for gap in stream.gaps]
    middle, high = percentiles_ms(gaps)
    assert len(set(gaps)) > 5 and middle < high
    assert middle == pytest.approx(1e3 * np.percentile(np.array(gaps), 50))
    assert high == pytest.approx(1e3 * np.percentile(np.array(gaps), 99))
    values = [n * n % 1009 / 1e3 for n in range(500)]
    assert percentiles_ms(values) == pytest.approx(
        [1e3 * np.percentile(values, percent) for percent in (50, 99)]
    )
    assert percentiles_ms([0.004]) == (4.0, 4.0) and percentiles_ms([]) == (None, None)


def test_outputs_of_another_length_and_failed_ones_are_refused(monkeypatch):
    clock = FakeClock()
    engine = FakeEngine(clock)
    streams = [Stream(0.0, [1], 3), Stream(0.0, [2], 2)]
    step = engine.step
    monkeypatch.setattr(
        engine, "step", lambda: [one for one in step() if len(one.outputs[0].token_ids) < 3]
    )
    with pytest.raises(
        MtpkitError, match=r"1 of 2 outputs have another length .* 2 tokens where 3 were"
    ):
        serve(engine, streams, clock)
    engine = FakeEngine(clock)
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: [answer("1", [], "request 1: NaN") for _ in step()])
    with pytest.raises(RequestError, match="request 1: NaN"):
        serve(engine, [Stream(0.0, [1], 3)], clock)
