"""The engine's step loop as clients of streams see it: requests arrive at their times, outputs come with theirs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np

from mtpkit.engine import Engine, RequestOutput, SamplingParams, require_whole
from mtpkit.errors import MtpkitError


class Clock(Protocol):
    """What time it is; tests have clocks of their own."""

    def now(self) -> float:
        """Seconds since any fixed moment."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let so many seconds pass."""
        ...


class WallClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Seconds since any fixed moment."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Let so many seconds pass."""
        time.sleep(seconds)


@dataclass
class Stream:
    """One request and what its client sees. Times are seconds since the load began."""

    arrival: float
    prompt: Sequence[int]
    max_tokens: int
    times: list[float] = field(default_factory=list)
    """When each output came."""
    lengths: list[int] = field(default_factory=list)
    """Tokens that there were then; with drafts several may come at once."""
    tokens: list[int] = field(default_factory=list)
    """All tokens so far."""

    @property
    def params(self) -> SamplingParams:
        """Greedy decoding of exactly `max_tokens` tokens."""
        return SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=True)

    def record(self, output: RequestOutput, now: float) -> None:
        """Take an output that came at the time `now`."""
        self.tokens = output.outputs[0].token_ids
        self.times.append(now)
        self.lengths.append(len(self.tokens))

    @property
    def first_seconds(self) -> float:
        """Time to the first token. A wait for the step under way at arrival, after which the engine gets the request,
        is part of it."""
        return self.times[0] - self.arrival

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: seconds between outputs that follow each other."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def seconds_per_token(self) -> float | None:
        """Mean seconds per token after the first output's first; None where there is one token."""
        return (self.times[-1] - self.times[0]) / (self.lengths[-1] - 1) if self.lengths[-1] > 1 else None


def serve(engine: Engine, streams: Sequence[Stream], clock: Clock) -> float:
    """Serve requests to their end: add each to the engine when it is due, and step.

    A request is never added before its arrival; the engine sleeps only where none is unfinished.

    Args:
        streams: in the order of their arrival; they record what comes.

    Returns:
        Seconds from the beginning to the last output.

    Raises:
        RequestError: the logits of a request are NaN or infinite.
        MtpkitError: an output of another length than was asked for.
    """
    began, added, waiting = clock.now(), dict[str, Stream](), list(streams)[::-1]
    while waiting or engine.has_unfinished:
        now = clock.now() - began
        while waiting and waiting[-1].arrival <= now:
            stream = waiting.pop()
            added[engine.add_request(stream.prompt, stream.params)] = stream
        if engine.has_unfinished:
            take(engine.step(), added, clock.now() - began)
        else:
            clock.sleep(waiting[-1].arrival - now)
    wrong = [one for one in streams if len(one.tokens) != one.max_tokens]
    if wrong:
        raise MtpkitError(
            f"{len(wrong)} of {len(streams)} outputs have another length than was asked for, one of them "
            f"{len(wrong[0].tokens)} tokens where {wrong[0].max_tokens} were"
        )
    return max(one.times[-1] for one in streams)


def take(outputs: Sequence[RequestOutput], streams: dict[str, Stream], now: float) -> None:
    """Let streams, by their request's id, record a step's outputs.

    Raises:
        RequestError: the logits of a request are NaN or infinite.
    """
    require_whole(outputs)
    for output in outputs:
        streams[output.request_id].record(output, now)


def percentiles_ms(seconds: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """The 50th and the 99th percentile in milliseconds, between neighbours by a straight line; None of nothing."""
    if not seconds:
        return None, None
    middle, high = np.percentile(seconds, (50, 99)) * 1e3
    return float(middle), float(high)
