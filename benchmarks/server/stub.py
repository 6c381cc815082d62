"""An engine that computes nothing: each of its steps tells every request some tokens, at a fixed
pace.

It has a process of its own, and takes and sends messages as real engines do. What that process
computes is what streaming adds to the steps of a real engine.
"""

import itertools
import multiprocessing
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.engine.intake import Intake
from mtpkit.engine.memory import MemoryPlan
from mtpkit.engine.processes import Ready, take_in
from mtpkit.engine.ranks import Ranks
from mtpkit.engine.requests.config import EngineConfig
from mtpkit.engine.requests.parallel import outputs_after
from mtpkit.engine.requests.request import Request, RequestOutput
from mtpkit.engine.requests.stats import AcceptanceStats, EngineStats
from mtpkit.engine.worker import Inbox, Message, work
from mtpkit.errors import MtpkitError

_TOKENS = 256
"""Tokens that outputs are made of, from this id on: those before it are bytes and markers."""


_LONGEST = 1 << 17
"""Most tokens of a prompt and its output."""


class StubProcess:
    """A process with the engine that computes nothing, with the methods of `EngineProcesses`.

    Args:
        tokenizer: directory of the tokenizer.
        pace: seconds from one step to the next.
        tokens_per_step: tokens that each request gets in a step.
        max_num_seqs: most requests that run at once.
    """

    count = 1

    def __init__(
        self,
        tokenizer: Path,
        pace: float,
        tokens_per_step: int,
        max_num_seqs: int,
    ) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        config = EngineConfig(max_model_len=_LONGEST, max_num_seqs=max_num_seqs)
        self.process = multiprocessing.get_context("spawn").Process(
            target=_run, args=(theirs, tokenizer, config, pace, tokens_per_step), daemon=True
        )
        self.process.start()
        theirs.close()
        self.ready: Ready = self._connection.recv()

    def send(self, index: int, message: Message) -> None:
        """See `EngineProcesses.send`."""
        self._connection.send(message)

    def receive(self) -> Iterator[tuple[int, object]]:
        """See `EngineProcesses.receive`."""
        try:
            message = self._connection.recv()
        except EOFError:
            raise MtpkitError("the stub has ended") from None
        yield 0, message

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.join()


def _run(
    connection: Connection, tokenizer: Path, config: EngineConfig, pace: float, tokens: int
) -> None:
    """Main function of the process."""
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=take_in, args=(connection, inbox), daemon=True).start()
    llm: Any = _StubLLM(config, load_tokenizer(tokenizer), pace, tokens)
    nothing = MemoryPlan(**dict.fromkeys((one.name for one in fields(MemoryPlan)), 0))
    size = llm.engine.intake.vocab_size
    connection.send(Ready(nothing, True, False, config.max_model_len, size))
    work(llm, inbox, connection.send)


class _StubLLM:
    """What `work` knows of an `LLM`."""

    def __init__(self, config: EngineConfig, tokenizer: Any, pace: float, tokens: int) -> None:
        self.ranks = Ranks()
        self.engine = _StubEngine(config, tokenizer, pace, tokens)
        self.on_device = nullcontext()


class _StubEngine:
    """What `work` knows of an `Engine`, whose scheduler this is, too."""

    def __init__(self, config: EngineConfig, tokenizer: Any, pace: float, tokens: int) -> None:
        self.intake = Intake(config, 1 << 20, len(tokenizer), tokenizer, (), 0)
        self.scheduler = self
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self._most = config.max_num_seqs
        self._pace = pace
        self._tokens = tokens
        self._next_ids = itertools.cycle(range(_TOKENS, len(tokenizer)))
        self._generated = 0
        self._due = 0.0
        """When the next step ends."""

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request. Each has one output, so that `index` says nothing more."""
        for requests in (self.running, self.waiting):
            requests[:] = [one for one in requests if one.request_id != request_id]

    def step(self) -> list[RequestOutput]:
        """Wait until the step would have ended; its outputs."""
        while self.waiting and len(self.running) < self._most:
            request = self.waiting.pop(0)
            request.metrics.note_scheduled()
            request.stats.num_cached_tokens = 0
            self.running.append(request)
        self._due = max(time.perf_counter(), self._due + self._pace)
        time.sleep(max(0.0, self._due - time.perf_counter()))

        changed = list(self.running)
        for request in changed:
            self._generated += request.emit([next(self._next_ids) for _ in range(self._tokens)])
            if request.finished:
                request.end()
                self.running.remove(request)
        return outputs_after(changed)

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return EngineStats(
            AcceptanceStats(),
            self._generated,
            seconds=0.0,
            preemptions=0,
            state_bytes=0,
            state_bytes_per_request=0,
            kv_bytes=0,
            running=len(self.running),
            waiting=len(self.waiting),
        )
