"""The engine's step loop as streaming clients see it: requests arrive at given times, and outputs
have timestamps."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np

from mtpkit.engine import Engine, RequestOutput, SamplingParams, require_whole
from mtpkit.errors import MtpkitError


class Clock(Protocol):
    """Clock to read and to wait by; tests have their own clocks."""

    def now(self) -> float:
        """Seconds since any fixed moment."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds` seconds."""
        ...


class WallClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Seconds since any fixed moment."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds` seconds."""
        time.sleep(seconds)


@dataclass
class Stream:
    """One request and what its client sees. Times are seconds since the load began."""

    arrival: float
    prompt: Sequence[int]
    max_tokens: int
    times: list[float] = field(default_factory=list)
    """Time of each output."""
    lengths: list[int] = field(default_factory=list)
    """Tokens up to each output; with drafts, several tokens may come at once."""
    tokens: list[int] = field(default_factory=list)
    """All tokens so far."""

    @property
    def params(self) -> SamplingParams:
        """Greedy decoding of exactly `max_tokens` tokens."""
        return SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=True)

    def record(self, output: RequestOutput, now: float) -> None:
        """Record an output that came at the time `now`."""
        self.tokens = output.outputs[0].token_ids
        self.times.append(now)
        self.lengths.append(len(self.tokens))

    @property
    def ended(self) -> bool:
        """Whether all tokens have come."""
        return len(self.tokens) == self.max_tokens

    @property
    def first_seconds(self) -> float:
        """Time to the first token. It includes the wait for the step in progress at arrival, after
        which the engine gets the request."""
        return self.times[0] - self.arrival

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: seconds between consecutive outputs."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def seconds_per_token(self) -> float | None:
        """Mean seconds per token after the first token; None if there is only one token."""
        return (
            (self.times[-1] - self.times[0]) / (self.lengths[-1] - 1)
            if self.lengths[-1] > 1
            else None
        )


def serve(
    engine: Engine,
    streams: Sequence[Stream],
    clock: Clock,
    follow: Callable[[Stream, float], Stream | None] | None = None,
) -> float:
    """Serve requests to their end: add each to the engine when it is due, and step.

    A request is never added before its arrival. The loop sleeps only while no request is
    unfinished.

    Args:
        streams: requests in the order of their arrival; they record their outputs.
        follow: is given each request that has ended, and the time; returns the request that arrives
            with this end, if one does.

    Returns:
        Seconds from the beginning to the last output.

    Raises:
        RequestError: the logits of a request are NaN or infinite.
        MtpkitError: an output has another length than requested.
    """
    began = clock.now()
    added = dict[str, Stream]()

    def add(stream: Stream) -> None:
        added[engine.add_request(stream.prompt, stream.params)] = stream

    # The next arrival is at the end, where a list pops in constant time.
    waiting = list(streams)[::-1]
    while waiting or engine.has_unfinished:
        now = clock.now() - began
        while waiting and waiting[-1].arrival <= now:
            add(waiting.pop())
        if not engine.has_unfinished:
            clock.sleep(waiting[-1].arrival - now)
            continue

        served = take(engine.step(), added, clock.now() - began)
        if follow is None:
            continue
        for ended in [stream for stream in served if stream.ended]:
            following = follow(ended, clock.now() - began)
            if following is not None:
                add(following)

    wrong = [one for one in added.values() if not one.ended]
    if wrong:
        raise MtpkitError(
            f"{len(wrong)} of {len(added)} outputs have another length than was asked for, one of"
            f" them {len(wrong[0].tokens)} tokens where {wrong[0].max_tokens} were"
        )
    return max(one.times[-1] for one in added.values())


def take(
    outputs: Sequence[RequestOutput], streams: Mapping[str, Stream], now: float
) -> list[Stream]:
    """Record a step's outputs in the streams, which are keyed by request id, and return these
    streams.

    Raises:
        RequestError: the logits of a request are NaN or infinite.
    """
    require_whole(outputs)
    for output in outputs:
        streams[output.request_id].record(output, now)
    return [streams[output.request_id] for output in outputs]


def percentiles_ms(seconds: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """The 50th and the 99th percentile in milliseconds, linearly interpolated; None if there are no
    values."""
    if not seconds:
        return None, None
    middle, high = np.percentile(seconds, (50, 99)) * 1e3
    return float(middle), float(high)
