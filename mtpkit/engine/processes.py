"""Processes that each hold a whole model and decode for the process that started them.

Each has its own GPU, where there are GPUs. A process that ends early, for whatever reason, closes
its connection, which the others' owner notices. They also end with the process that started them.
"""

import io
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from mtpkit.engine.llm import LLM
from mtpkit.engine.memory import MemoryPlan
from mtpkit.engine.requests.options import LLMOptions
from mtpkit.engine.worker import Inbox, Message, work
from mtpkit.errors import MtpkitError, UserError
from mtpkit.platform import require_one_process

_END = signal.SIGUSR1
"""Signal with which a process is ended by the one that started it."""
_ENDING = 3.0
"""Seconds that a process has to end after this signal before it is killed."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Ready:
    """First message of a process: it has loaded the model."""

    memory_plan: MemoryPlan
    has_tokenizer: bool
    has_chat_template: bool
    max_model_len: int
    vocab_size: int

    @classmethod
    def of(cls, llm: LLM) -> "Ready":
        """What a program must know of an LLM that it cannot reach."""
        engine = llm.engine
        return cls(
            llm.memory_plan,
            llm.has_tokenizer,
            llm.has_chat_template,
            engine.config.max_model_len,
            engine.intake.vocab_size,
        )


@dataclass(frozen=True)
class _Failed:
    """Last message of a process that fails."""

    message: str
    exit_code: int


class EngineProcesses:
    """`count` processes with the same model. Use it as a context manager, or call `close`.

    Args:
        options: options of every process. On a machine with GPUs each process gets one, in the
            order of the GPUs.

    Raises:
        UserError: more processes than GPUs, a model split over several GPUs, or options that `LLM`
            refuses.
        MtpkitError: a process failed or died; it is named.
    """

    def __init__(self, options: LLMOptions, count: int) -> None:
        self.count = count
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        gpus = gpus_of_replicas(options, count)
        try:
            for index in range(count):
                self._start(options, index, gpus[index] if gpus else None)
            loaded = self.one_of_each(Ready)
        except BaseException:
            self.close()
            raise
        self.ready = loaded[0]
        """What process 0 said of its model; all have the same."""

    def _start(self, options: LLMOptions, index: int, gpu: str | None) -> None:
        # CUDA cannot be used in a process that is forked from one that has looked for GPUs. Without
        # GPUs, processes are forked from one that has imported everything.
        context = multiprocessing.get_context("spawn" if gpu else "forkserver")
        context.set_forkserver_preload([__name__])
        own, theirs = context.Pipe()
        process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_run,
            args=(theirs, index, self.count, options),
            name=f"replica {index}",
            daemon=True,
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
        theirs.close()  # so that the connection ends with the process
        self._processes.append(process)
        self._connections.append(own)

    def __enter__(self) -> "EngineProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        # All get the signal before the first is waited for, so that they end side by side.
        for process in self._processes:
            if process.is_alive():
                assert process.pid is not None
                with suppress(ProcessLookupError):
                    os.kill(process.pid, _END)
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join(_ENDING)
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()
        self._processes = []
        self._connections = []

    def send(self, index: int, message: Message) -> None:
        """Send a message to a process, which takes it in at once.

        Raises:
            MtpkitError: the process has failed or died.
        """
        try:
            self._connections[index].send(message)
        except OSError:
            self._next(index)  # raises with the process's last message
            raise self._died(index) from None

    def receive(self) -> Iterator[tuple[int, object]]:
        """Wait for messages; yield the number of each process that has one, and the message.

        Raises:
            MtpkitError: a process has failed or died.
        """
        for connection in wait(self._connections):
            index = next(place for place, one in enumerate(self._connections) if one is connection)
            yield index, self._next(index)

    def one_of_each[M](self, kind: type[M]) -> list[M]:
        """Wait for the next message of every process; all of them have the type `kind`."""
        found: dict[int, M] = {}
        while len(found) < self.count:
            for index, message in self.receive():
                assert isinstance(message, kind) and index not in found
                found[index] = message
        return [found[index] for index in range(self.count)]

    def _next(self, index: int) -> object:
        try:
            message = self._connections[index].recv()
        except (EOFError, OSError):
            raise self._died(index) from None
        if isinstance(message, _Failed):
            kind = UserError if message.exit_code == UserError.exit_code else MtpkitError
            raise kind(f"{self._name(index)} failed: {message.message}")
        return message

    def _died(self, index: int) -> MtpkitError:
        process = self._processes[index]
        process.join(_ENDING)
        code = process.exitcode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return MtpkitError(
            f"{self._name(index)} (process {process.pid}) has died {how}; its own output may say"
            " why, or the system's log"
        )

    def _name(self, index: int) -> str:
        """Name of a process in messages."""
        return f"replica {index}" if self.count > 1 else "the engine"


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
    """Main function of a process."""
    # Both may go to all processes of a terminal or of a service. They are for the process that
    # started this one, which may let requests end before it ends this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(_END, lambda *_: sys.exit(0))  # runs exit handlers, if it can
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=take_in, args=(connection, inbox), daemon=True).start()
    if index:  # all processes log the same: process 0 speaks for all
        logging.disable(logging.WARNING)
        sys.stderr = _NoTerminal(sys.stderr.buffer, errors="backslashreplace", line_buffering=True)
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
    try:
        llm = LLM(**vars(options))
        connection.send(Ready.of(llm))
        work(llm, inbox, connection.send)
    except (MtpkitError, OSError) as error:
        failed = _Failed(str(error), getattr(error, "exit_code", 1))
    except Exception as error:
        traceback.print_exc()
        failed = _Failed(f"{type(error).__name__}: {error}", 1)
    else:
        return
    signal.signal(_END, signal.SIG_IGN)  # this process ends by itself
    with suppress(OSError):
        connection.send(failed)
    sys.exit(1)


class _NoTerminal(io.TextIOWrapper):
    """A stream that is never a terminal, so that no progress bar is drawn on it."""

    def isatty(self) -> bool:
        """No."""
        return False


def take_in(connection: Connection, inbox: Inbox) -> None:
    """Move messages to the inbox at once, so that no sender waits; end this process when the other
    end is closed."""
    with suppress(EOFError, OSError):
        while True:
            inbox.put(connection.recv())
    os._exit(1)
