"""Replicas: processes, each with a whole model and its own GPU, that divide a list of prompts among
them.

The process that starts the replicas hands out the prompts and collects the outputs. Each replica
holds as many prompts as it can run and a few that wait, and gets a new one whenever one ends: a
replica with long outputs gets fewer prompts. Tokens do not depend on which replica chooses them:
seeds are given with the prompts. A replica that ends early, for whatever reason, closes its
connection; all other replicas are then ended. They also end with the process that started them.
"""

import io
import logging
import multiprocessing
import os
import queue
import random
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from mtpkit.engine.llm import LLM
from mtpkit.engine.memory import MemoryPlan
from mtpkit.engine.requests.options import LLMOptions
from mtpkit.engine.requests.params import SEED_BITS, SamplingParams
from mtpkit.engine.requests.prompts import (
    Prompt,
    is_prompt,
    list_params,
    list_prompts,
)
from mtpkit.engine.requests.request import PromptError, Request, RequestOutput
from mtpkit.engine.requests.stats import EngineStats
from mtpkit.errors import MtpkitError, UserError
from mtpkit.platform import require_one_process

_ENDING = 3.0
"""Seconds that a process has to end after SIGTERM before it is killed."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class _Work:
    """A prompt with everything that its output depends on besides the model."""

    index: int
    """Place among all prompts, from 0."""
    name: str
    prompt: Prompt
    params: SamplingParams
    text: str | None = None
    token_ids: Sequence[int] = ()
    """The prompt's token ids. `text` and `token_ids` are set once a replica has encoded the
    prompt."""
    checkpoint_at: int | None = None


@dataclass(frozen=True)
class _Loaded:
    """Message of a replica that has loaded the model."""

    memory_plan: MemoryPlan
    has_tokenizer: bool


@dataclass(frozen=True)
class _Checked:
    """Answer of a replica to the prompts that it was sent to check."""

    encoded: list[_Work]
    refused: list[RequestOutput]
    """Outputs of the prompts that cannot be served."""
    errors: dict[int, str]
    """Messages of errors that concern all prompts, such as that there is no tokenizer, by
    `_Work.index`."""


@dataclass(frozen=True)
class _Failed:
    """Last message of a replica that fails."""

    message: str
    exit_code: int


type _Inbox = queue.SimpleQueue[list[_Work] | _Work | None]
"""Messages to a replica: first the list of prompts to check, then single prompts to decode, at last
None."""


class Replicas:
    """`count` processes with the same model. Use it as a context manager, or call `close`.

    Args:
        options: options of every replica. On a machine with GPUs each replica gets one, in the
            order of the GPUs.

    Raises:
        UserError: more replicas than GPUs, a model split over several GPUs, or options that `LLM`
            refuses.
        MtpkitError: a replica failed or died; it is named.
    """

    def __init__(self, options: LLMOptions, count: int) -> None:
        self._seed = options.seed
        self._most = options.max_num_seqs + max(1, options.max_num_seqs // 4)
        """Most prompts that a replica holds at once. Some of them wait, so that the next step can
        fill a free slot."""
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._stats: EngineStats | None = None
        gpus = gpus_of_replicas(options, count)
        try:
            for index in range(count):
                self._start(options, index, count, gpus[index] if gpus else None)
            loaded = self._one_of_each(_Loaded)
        except BaseException:
            self.close()
            raise
        self.memory_plan = loaded[0].memory_plan
        """The memory plan of replica 0."""
        self.has_tokenizer = loaded[0].has_tokenizer

    def _start(self, options: LLMOptions, index: int, count: int, gpu: str | None) -> None:
        # CUDA cannot be used in a process that is forked from one that has looked for GPUs. Without
        # GPUs, replicas are forked from one process that has imported everything.
        context = multiprocessing.get_context("spawn" if gpu else "forkserver")
        context.set_forkserver_preload([__name__])
        own, theirs = context.Pipe()
        name = f"replica {index}"
        process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_run, args=(theirs, index, count, options), name=name, daemon=True
        )
        # A child that is spawned inherits the variable before it imports torch.
        before = os.environ.get(_VISIBLE)
        try:
            if gpu:
                os.environ[_VISIBLE] = gpu
            process.start()
        finally:
            if gpu:
                os.environ.pop(_VISIBLE)
                os.environ |= {} if before is None else {_VISIBLE: before}
        theirs.close()  # so that the connection ends with the replica
        self._processes.append(process)
        self._connections.append(own)

    def __enter__(self) -> "Replicas":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        # All get the signal before the first is waited for, so that they end side by side.
        for process in self._processes:
            process.terminate()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join(_ENDING)
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()
        self._processes = []
        self._connections = []

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield the output of each prompt when it has ended; its request id is the prompt's place.
        Call it only once.

        The outputs are the same as those of `LLM.generate` with the same options, with or without
        seeds.

        Raises:
            UserError: as in `LLM.generate`, raised by the call itself, before any prompt is
                decoded.
            MtpkitError: a replica failed or died; it is named.
        """
        listed = list_prompts(prompts)
        drawn = random.Random(self._seed)
        params = list_params(sampling_params, len(listed))
        # Drawn here, in the order of the prompts: tokens must not depend on the replica.
        seeded = [
            replace(one, seed=drawn.getrandbits(SEED_BITS)) if one.seed is None else one
            for one in params
        ]
        works = [
            _Work(index, *named, one)
            for index, (named, one) in enumerate(zip(listed, seeded, strict=True))
        ]
        encoded, refused = self._check(works)
        if refused and is_prompt(prompts):
            raise PromptError(refused[0].error)
        return chain(refused, self._serve(deque(encoded)))

    def _check(self, works: Sequence[_Work]) -> tuple[list[_Work], list[RequestOutput]]:
        """Have the replicas encode and check the prompts, each an equal share; prompts that cannot
        be served have their outputs already."""
        count = len(self._connections)
        for replica in range(count):
            self._send(replica, works[replica::count])
        checked = self._one_of_each(_Checked)
        errors = {index: message for one in checked for index, message in one.errors.items()}
        if errors:
            raise UserError(errors[min(errors)])
        encoded = sorted(
            (work for one in checked for work in one.encoded), key=lambda work: work.index
        )
        return encoded, [output for one in checked for output in one.refused]

    def _serve(self, waiting: deque[_Work]) -> Iterator[RequestOutput]:
        held = [0] * len(self._connections)
        while waiting or any(held):
            while waiting and min(held) < self._most:
                # The one that holds fewest, so that none is idle while another has prompts that
                # wait.
                replica = held.index(min(held))
                self._send(replica, waiting.popleft())
                held[replica] += 1
            for replica, message in self._receive():
                assert isinstance(message, RequestOutput)
                held[replica] -= 1
                yield message
        for replica in range(len(held)):
            self._send(replica, None)
        self._stats = EngineStats.together(self._one_of_each(EngineStats))

    def stats(self) -> EngineStats:
        """Totals of all replicas, once all prompts have ended."""
        assert self._stats is not None
        return self._stats

    def _one_of_each[M](self, kind: type[M]) -> list[M]:
        """Wait for the next message of every replica; all of them have the type `kind`."""
        found: dict[int, M] = {}
        while len(found) < len(self._connections):
            for replica, message in self._receive():
                assert isinstance(message, kind) and replica not in found
                found[replica] = message
        return [found[replica] for replica in range(len(found))]

    def _receive(self) -> Iterator[tuple[int, object]]:
        """Wait for messages; yield the number of the replica and its message."""
        for connection in wait(self._connections):
            replica = next(
                index for index, one in enumerate(self._connections) if one is connection
            )
            yield replica, self._next(replica)

    def _next(self, replica: int) -> object:
        try:
            message = self._connections[replica].recv()
        except (EOFError, OSError):
            raise self._died(replica) from None
        if isinstance(message, _Failed):
            kind = UserError if message.exit_code == UserError.exit_code else MtpkitError
            raise kind(f"replica {replica} failed: {message.message}")
        return message

    def _send(self, replica: int, message: object) -> None:
        try:
            self._connections[replica].send(message)
        except OSError:
            self._next(replica)  # raises with the replica's last message
            raise self._died(replica) from None

    def _died(self, replica: int) -> MtpkitError:
        process = self._processes[replica]
        process.join(_ENDING)
        code = process.exitcode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return MtpkitError(
            f"replica {replica} (process {process.pid}) has died {how}; its own output may say why,"
            " or the system's log"
        )


def gpus_of_replicas(options: LLMOptions, count: int) -> list[str]:
    """Names of the GPUs of the replicas for CUDA_VISIBLE_DEVICES; empty without GPUs.

    Raises:
        UserError: fewer GPUs than replicas, a split model, a numbered device, or this process is
            one of several.
    """
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (ranks := getattr(options, name)) > 1:
            raise UserError(
                f"each of the {count} replicas holds a whole model, but {name} {ranks} splits it:"
                " leave one of the two options out, or split the file of prompts and start"
                " torchrun for each part"
            )
    require_one_process(f"{count} replicas are started by one")
    if options.device not in (None, "cuda", "cpu"):
        raise UserError(
            f"each of the {count} replicas gets its own device: leave out device {options.device!r}"
        )
    if options.device == "cpu" or not torch.cuda.is_available():
        return []
    visible = os.environ.get(_VISIBLE)
    names = (
        visible.split(",")
        if visible
        else [str(index) for index in range(torch.cuda.device_count())]
    )
    names = names[: torch.cuda.device_count()]
    if count > len(names):
        raise UserError(
            f"{count} replicas need {count} GPUs, but this machine has {len(names)}: start"
            f" {len(names)}"
        )
    return names


def _run(connection: Connection, index: int, count: int, options: LLMOptions) -> None:
    """Main function of a replica's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # runs exit handlers, if it can
    inbox: _Inbox = queue.SimpleQueue()
    threading.Thread(target=_take_in, args=(connection, inbox), daemon=True).start()
    if index:  # all replicas log the same: replica 0 speaks for all
        logging.disable(logging.WARNING)
        sys.stderr = _NoTerminal(sys.stderr.buffer, errors="backslashreplace", line_buffering=True)
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
    try:
        _serve(connection, inbox, options)
    except (MtpkitError, OSError) as error:
        failed = _Failed(str(error), getattr(error, "exit_code", 1))
    except Exception as error:
        traceback.print_exc()
        failed = _Failed(f"{type(error).__name__}: {error}", 1)
    else:
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this process ends by itself
    with suppress(OSError):
        connection.send(failed)
    sys.exit(1)


class _NoTerminal(io.TextIOWrapper):
    """A stream that is never a terminal, so that no progress bar is drawn on it."""

    def isatty(self) -> bool:
        """No."""
        return False


def _take_in(connection: Connection, inbox: _Inbox) -> None:
    """Move messages to the inbox at once, so that no sender waits; end this process when the other
    end is closed."""
    with suppress(EOFError, OSError):
        while True:
            inbox.put(connection.recv())
    os._exit(1)


def _serve(connection: Connection, inbox: _Inbox, options: LLMOptions) -> None:
    llm = LLM(**vars(options))
    engine = llm.engine
    connection.send(_Loaded(llm.memory_plan, llm.has_tokenizer))
    works = inbox.get()
    assert isinstance(works, list)
    connection.send(_checked(llm, works))
    while True:
        while not inbox.empty() or not engine.has_unfinished:
            work = inbox.get()
            if work is None:
                connection.send(llm.stats())
                # wait to be ended: closing the connection here would count as a failure
                inbox.get()
            assert isinstance(work, _Work)
            engine.scheduler.add(_request(llm, work))
        for output in engine.step(finished_only=True):
            connection.send(output)


def _checked(llm: LLM, works: list[_Work]) -> _Checked:
    checked = _Checked([], [], {})
    for work in works:
        try:
            request = llm.engine.intake.read(
                work.prompt, work.params, str(work.index), work.name, refuse=True
            )
        except UserError as error:
            checked.errors[work.index] = str(error)
            continue
        if request.finished:
            checked.refused.append(RequestOutput.of(request))
            continue
        encoded = replace(
            work,
            text=request.prompt,
            token_ids=request.prompt_token_ids,
            checkpoint_at=request.checkpoint_at,
        )
        checked.encoded.append(encoded)
    return checked


def _request(llm: LLM, work: _Work) -> Request:
    name = str(work.index)
    return llm.engine.intake.make(
        work.token_ids, work.params, name, work.text, work.name, work.checkpoint_at
    )
