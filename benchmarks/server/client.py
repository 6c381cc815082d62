"""A client with some streams at once, each of which asks for the next completion when its last one
has ended and the next one is due.

It does little more than read from its connections, so that it is not what limits a benchmark. As a
program, `python -m benchmarks.server.client`, it reads a `Job` from stdin and prints a `Report`,
both as JSON.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import TypedDict
from urllib.parse import urlsplit


class Completion(TypedDict):
    """A completion to ask for."""

    prompt: list[int]
    max_tokens: int
    due: float
    """Seconds after the start before which it is not asked for."""


class Job(TypedDict):
    """What the client does."""

    url: str
    streams: int
    completions: list[Completion]


class Report(TypedDict):
    """What the client saw. Times are in seconds, one list entry per completion."""

    seconds: float
    """From the first request to the last token."""
    first: list[float]
    """From a request, or from when it was due if that is later, to its first token."""
    gaps: list[float]
    """Between chunks of a stream."""
    chunks: int
    tokens: int
    cpu: float
    """Processor time of the client."""


class _Stream(asyncio.Protocol):
    """A connection, which asks for one completion after the other."""

    def __init__(self, completions: Iterator[Completion], began: float, report: Report) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self._completions = completions
        self._began = began
        self._report = report
        self._received: list[bytes] = []
        self._times: list[float] = []
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the first completion."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        completion = next(self._completions, None)
        if completion is None:
            self._transport.close()
            self.ended.set_result(None)
            return
        due = self._began + completion["due"]
        # At once, unless it must wait: a timer would cost some of the first token's time.
        if due <= time.perf_counter():
            self._send(completion)
        else:
            wait = due - time.perf_counter()
            asyncio.get_running_loop().call_later(wait, self._send, completion)

    def _send(self, completion: Completion) -> None:
        fixed = {"stream": True, "stream_options": {"include_usage": True}}
        asked = {name: completion[name] for name in ("prompt", "max_tokens")}
        body = {**asked, **fixed, "temperature": 0, "ignore_eos": True}
        content = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: benchmark\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self._wanted = completion["max_tokens"]
        self._asked = time.perf_counter()
        self._transport.write(head.encode() + content)

    def data_received(self, data: bytes) -> None:
        """Note the time; everything else waits for the end of the response."""
        self._times.append(time.perf_counter())
        self._received.append(data)
        self._tail = (self._tail + data)[-7:]
        if self._tail == b"\r\n0\r\n\r\n":
            self._note_response()
            self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        """Fail where a response was cut off."""
        if not self.ended.done():
            self.ended.set_exception(error or ConnectionError("the server closed a connection"))

    def _note_response(self) -> None:
        events = b"".join(self._received).split(b"data: ")[1:]
        usage = json.loads(events[-2].partition(b"\r\n")[0])["usage"]
        if usage["completion_tokens"] != self._wanted:
            raise ValueError(f"asked for {self._wanted} tokens, got {usage}")
        # Those of the usage and of the end come at once after the last chunk.
        with_tokens = zip(self._times, self._received, strict=True)
        times = [when for when, data in with_tokens if b'"choices":[{' in data]
        report = self._report
        report["first"].append(times[0] - self._asked)
        report["gaps"] += [later - earlier for earlier, later in pairwise(times)]
        # The last two hold the usage and the end.
        report["chunks"] += len(events) - 2
        report["tokens"] += self._wanted
        self._received = []
        self._times = []


async def load(job: Job) -> Report:
    """Ask for all completions."""
    report = Report(seconds=0.0, first=[], gaps=[], chunks=0, tokens=0, cpu=0.0)
    completions = iter(job["completions"])
    place = urlsplit(job["url"])
    loop = asyncio.get_running_loop()
    cpu = time.process_time()
    began = time.perf_counter()
    connections = [
        await loop.create_connection(
            lambda: _Stream(completions, began, report), place.hostname, place.port
        )
        for _ in range(job["streams"])
    ]
    await asyncio.gather(*(stream.ended for _, stream in connections))
    report["seconds"] = time.perf_counter() - began
    report["cpu"] = time.process_time() - cpu
    return report


if __name__ == "__main__":
    print(json.dumps(asyncio.run(load(json.load(sys.stdin)))))
