"""`AsyncLLM`: decodes prompts as they come, for programs with an event loop, with the interface of
vLLM's `AsyncLLM`.

The engine runs in a process of its own, or in several of which each holds the whole model, so that
its steps wait for nothing that the program does. A model that is given as an object, or split over
ranks, is decoded in a thread of this process. Prompts are encoded in another thread: the event loop
only sends what is encoded, and hands what comes back to the coroutines that wait for it.
"""

import asyncio
import copy
import itertools
import queue
import threading
import traceback
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from mtpkit.engine import loading
from mtpkit.engine.llm import LLM
from mtpkit.engine.memory import MemoryPlan
from mtpkit.engine.processes import EngineProcesses, Ready
from mtpkit.engine.requests.absent import GENERATE_ARGUMENTS, LLM_ARGUMENTS, answers_absent
from mtpkit.engine.requests.grammar import grammar_of
from mtpkit.engine.requests.log_probs import Logprob
from mtpkit.engine.requests.metrics import Metric, metrics_of
from mtpkit.engine.requests.model_factory import ModelFactory
from mtpkit.engine.requests.options import LLMOptions, takes_fields
from mtpkit.engine.requests.parallel import joined
from mtpkit.engine.requests.params import RequestOutputKind, SamplingParams
from mtpkit.engine.requests.prompts import Prompt, encode, truncated
from mtpkit.engine.requests.request import CompletionOutput, RequestOutput
from mtpkit.engine.requests.stats import EngineStats, RequestStats
from mtpkit.engine.requests.token_texts import Tokenizer
from mtpkit.engine.worker import (
    Abort,
    Add,
    Answer,
    Ask,
    Inbox,
    Message,
    Progress,
    Refused,
    Stop,
    work,
)
from mtpkit.errors import MtpkitError, UserError, shown
from mtpkit.platform import num_processes

_ENDING = 5.0
"""Seconds that an engine has to end its step, before its process is ended."""


class EngineDead(MtpkitError):
    """The engine has failed or was shut down: no request can be served any more."""


class AsyncLLM:
    """A model that is ready to decode, for programs with an event loop.

    The arguments are the fields of `LLMOptions`, by name or in their order; see
    `help(AsyncLLM.__init__)`. Where ranks split a model, every rank makes an `AsyncLLM`; all but
    rank 0 decode along until rank 0 shuts down, see `wait`.

    Raises:
        UserError: settings that cannot work, or heads that are missing or too few.
        MtpkitError: the engine's process failed or died.
    """

    @answers_absent("AsyncLLM", LLM_ARGUMENTS)
    @takes_fields(LLMOptions)
    def __init__(self, options: LLMOptions) -> None:
        """Load a model and allocate its caches."""
        self._start(options, 1)

    @classmethod
    def with_replicas(cls, options: LLMOptions, count: int) -> "AsyncLLM":
        """Make an `AsyncLLM` of `count` processes that each hold the whole model; a request goes to
        the one with the fewest.

        Raises:
            UserError, MtpkitError: see `EngineProcesses`.
        """
        made = object.__new__(cls)
        made._start(options, count)
        return made

    @classmethod
    def of_engines(cls, engines: "Engines", tokenizer: Tokenizer | None) -> "AsyncLLM":
        """Make an `AsyncLLM` of engines that have been started."""
        made = object.__new__(cls)
        made._begin(engines, tokenizer)
        return made

    def _start(self, options: LLMOptions, count: int) -> None:
        # Once for all processes, which must have the same model.
        options = loading.located(options)
        # A model that is given stays where it is.
        travels = isinstance(options.model, str | Path | ModelFactory)
        if count == 1 and (num_processes() > 1 or not travels):
            engine = _EngineThread(options)
            # Tokenizers serve one thread at a time, and the engine's decodes in its own thread.
            self._begin(engine, copy.deepcopy(engine.llm.tokenizer), engine.llm.ranks.rank == 0)
        else:
            # Before the processes are started, which takes longer.
            tokenizer = loading.tokenizer_of(loading.opened(options.model), options.tokenizer)
            self._begin(EngineProcesses(options, count), tokenizer)

    def _begin(
        self, engines: "Engines", tokenizer: Tokenizer | None, is_first: bool = True
    ) -> None:
        self._engines = engines
        self.tokenizer = tokenizer
        self._first = is_first
        self.max_model_len = self._engines.ready.max_model_len
        """Most tokens of a prompt and its output together."""
        self.memory_plan: MemoryPlan = self._engines.ready.memory_plan
        """The memory plan of one engine."""

        self._error: MtpkitError | None = None
        """Why the engine is dead."""
        self._failed = False
        self._names = itertools.count()
        self._streams: dict[str, _Stream] = {}
        """The unfinished requests, by the names that engines know them by."""
        self._asked: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        """Held while requests come and go."""
        self._encoding = ThreadPoolExecutor(1, "mtpkit-encode")
        # Large grammars take longer than prompts, which are not to wait for them.
        self._checking = ThreadPoolExecutor(1, "mtpkit-grammar")
        self._reader = threading.Thread(target=self._read, name="mtpkit-read", daemon=True)
        self._reader.start()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)

    @answers_absent("AsyncLLM.generate", GENERATE_ARGUMENTS)
    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Decode a prompt. Closing the iterator, or cancelling the task that waits for it, drops
        the request.

        Args:
            prompt: see `LLM.generate`.
            sampling_params: their `output_kind` says what the outputs hold. An output has all that
                is new since the one before: a slow reader gets fewer outputs, and loses nothing.
            request_id: id of the outputs, and the one that `abort` takes. By default, requests are
                numbered.

        Raises:
            UserError: the prompt cannot be served, or an unfinished request has the same id; raised
                when the first output is asked for.
            EngineDead: the engine has failed or was shut down.
        """
        return self._generate(prompt, sampling_params or SamplingParams(), request_id)

    async def _generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None
    ) -> AsyncGenerator[RequestOutput]:
        if not isinstance(params, SamplingParams):
            raise UserError(f"sampling_params is {shown(params)}: give SamplingParams(...)")
        name = str(next(self._names))
        given = name if request_id is None else request_id
        place = prompt.get("name") if isinstance(prompt, dict) else None
        place = place if isinstance(place, str) else f"request {given}"
        loop = asyncio.get_running_loop()
        stream = self._open_stream(name, given, loop)
        try:
            if params.structured_outputs is not None:
                # Refused here: the engine compiles it in the background.
                await loop.run_in_executor(self._checking, grammar_of, params.structured_outputs)
            encoded = await loop.run_in_executor(
                self._encoding, encode, prompt, self.tokenizer, place
            )
            text, token_ids, checkpoint_at = truncated(
                encoded, params.truncate_prompt_tokens, self.max_model_len
            )
            token_ids = list(token_ids)
            # What engines send is what is new; outputs are put together here.
            streamed = params.output_kind != RequestOutputKind.FINAL_ONLY
            kind = RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY
            # Copies are checked like new parameters, which takes time.
            sent = params if params.output_kind == kind else replace(params, output_kind=kind)
            stream.add(Add(name, token_ids, sent, place, checkpoint_at), self._send)
            for index in stream.unwanted:
                self._drop(name, stream, index)

            output = _Output(given, text, token_ids, params)
            while not output.finished:
                yield output.after(await stream.next())
        finally:
            self._close_stream(name, stream)

    async def abort(self, request_id: str | Sequence[str], index: int | None = None) -> None:
        """End requests; each gets a last output with finish reason "abort". Ids of requests that
        have ended are ignored.

        Args:
            index: end only this one of the outputs of each prompt; the others go on.
        """
        ids = {request_id} if isinstance(request_id, str) else set(request_id)
        with self._lock:
            aborted = {
                name: stream for name, stream in self._streams.items() if stream.request_id in ids
            }
        for name, stream in aborted.items():
            if index is None:
                stream.put_from_anywhere(_ABORTED)
            else:
                stream.call_from_anywhere(self._abort_output, name, stream, index)

    def _abort_output(self, name: str, stream: "_Stream", index: int) -> None:
        """End an output of a request; if the engine was not sent the request yet, once it was."""
        if stream.added:
            self._drop(name, stream, index)
        else:
            stream.unwanted.append(index)

    def shutdown(self) -> None:
        """End the engine and all that it decodes: iterators that wait raise `EngineDead`. Later
        calls do nothing. On ranks other than 0, wait until rank 0 shuts down."""
        if self._first and self._error is None:
            self._fail(EngineDead("the engine was shut down"))
            for index in range(self._engines.count):
                with suppress(MtpkitError):
                    self._engines.send(index, Stop())
        self._reader.join(_ENDING if self._first else None)
        if self._reader.is_alive():
            self._engines.close()
        self._reader.join()
        self._encoding.shutdown(wait=False)
        self._checking.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until the engine has ended. It is what ranks other than 0 do."""
        self._reader.join()

    @property
    def is_running(self) -> bool:
        """Whether requests can be served."""
        return self._error is None

    @property
    def errored(self) -> bool:
        """Whether the engine has failed or was shut down."""
        return self._error is not None

    @property
    def failed(self) -> bool:
        """Whether the engine ended although nobody shut it down."""
        return self._failed

    @property
    def dead_error(self) -> MtpkitError:
        """What the calls of a dead engine raise."""
        return self._error or EngineDead("the engine has failed")

    async def check_health(self) -> None:
        """Raise an error if the engine is dead.

        Raises:
            EngineDead: it has failed or was shut down.
        """
        if self._error is not None:
            raise self._error

    async def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if there is none."""
        return self.tokenizer

    async def with_tokenizer[T](self, function: Callable[[Any], T]) -> T:
        """Call a function of the tokenizer, or of None, in the thread that encodes prompts.
        Tokenizers serve one thread at a time, and the event loop goes on meanwhile."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoding, function, self.tokenizer)

    async def stats(self) -> EngineStats:
        """Totals of all engines since they were made or `reset_stats` was called."""
        return EngineStats.together(await self._ask(LLM.stats))

    async def get_metrics(self) -> list[Metric]:
        """The same totals, and gauges, under vLLM's names."""
        return metrics_of(await self.stats())

    async def reset_stats(self) -> None:
        """Reset the totals."""
        await self._ask(LLM.reset_stats)

    async def reset_prefix_cache(self) -> bool:
        """Forget what earlier prompts and outputs left in the prefix cache. Returns False, and
        forgets nothing in an engine that has unfinished requests."""
        return all(await self._ask(LLM.reset_prefix_cache))

    async def _ask(self, function: Callable[[LLM], Any]) -> list[Any]:
        """What a function returns in each engine."""
        await self.check_health()
        answers = []
        for index in range(self._engines.count):
            number = next(self._names)
            answer = Future[Any]()
            with self._lock:
                self._asked[number] = answer
            self._send(index, Ask(number, function))
            answers.append(asyncio.wrap_future(answer))
        return await asyncio.gather(*answers)

    def _open_stream(
        self, name: str, request_id: str, loop: asyncio.AbstractEventLoop
    ) -> "_Stream":
        if not self._first:
            raise UserError("only rank 0 takes requests: call wait() on the other ranks")
        with self._lock:
            if self._error is not None:
                raise self._error
            if any(one.request_id == request_id for one in self._streams.values()):
                raise UserError(
                    f"request {request_id}: an unfinished request has this id, choose another id"
                    " or give none"
                )
            held = [0] * self._engines.count
            for one in self._streams.values():
                held[one.engine] += 1
            stream = _Stream(request_id, held.index(min(held)), loop)
            self._streams[name] = stream
        return stream

    def _close_stream(self, name: str, stream: "_Stream") -> None:
        """Forget a request, and drop it if the engine still decodes it."""
        with self._lock:
            del self._streams[name]
        self._drop(name, stream)

    def _drop(self, name: str, stream: "_Stream", index: int | None = None) -> None:
        """Drop a request, or one of its outputs, if the engine still decodes it."""
        if stream.added and not stream.ended and self._error is None:
            # Streams are told otherwise that the engine is dead.
            with suppress(MtpkitError):
                self._send(stream.engine, Abort((name,), index))

    def _send(self, index: int, message: Message) -> None:
        """Send a message to an engine.

        Raises:
            MtpkitError: it is dead.
        """
        try:
            self._engines.send(index, message)
        except MtpkitError as error:
            self._fail(error)
            raise self.dead_error from error

    def _read(self) -> None:
        """Hand on what engines send, until they end; the main function of a thread."""
        try:
            while True:
                for _, reply in self._engines.receive():
                    self._deliver(reply)
        except (MtpkitError, OSError) as error:
            self._fail(error)
            # Where one of several has died, the others end too.
            self._engines.close()

    def _deliver(self, reply: object) -> None:
        if isinstance(reply, Answer):
            with self._lock:
                future = self._asked.pop(reply.number, None)
            if future is not None:
                _settle(future, reply.value, reply.error)
            return
        if isinstance(reply, Refused):
            stream = self._streams.get(reply.request_id)
            if stream:
                stream.put_from_anywhere(reply.error)
            return

        assert isinstance(reply, list)
        # One call into each event loop for all requests of a step.
        loops = defaultdict[asyncio.AbstractEventLoop, list[tuple[_Stream, Progress]]](list)
        for told in reply:
            progress = told if isinstance(told, Progress) else Progress.from_piece(told)
            stream = self._streams.get(progress.request_id)
            if stream:
                loops[stream.loop].append((stream, progress))
        for loop, pairs in loops.items():
            # The loop of an abandoned stream may be closed.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_put_all, pairs)

    def _fail(self, error: Exception) -> None:
        """End all requests and questions with an error; only the first error counts."""
        with self._lock:
            if self._error is not None:
                return
            # An engine that is shut down says so by an `EngineDead` of its own.
            self._failed = not isinstance(error, EngineDead)
            dead = error if isinstance(error, EngineDead) else EngineDead(str(error))
            self._error = dead
            streams = list(self._streams.values())
            futures = list(self._asked.values())
            self._asked.clear()
        for stream in streams:
            stream.put_from_anywhere(dead)
        for future in futures:
            _settle(future, None, dead)


class Engines(Protocol):
    """Engines that messages can be sent to."""

    count: int
    ready: Ready

    def send(self, index: int, message: Message) -> None: ...

    def receive(self) -> Iterator[tuple[int, object]]: ...

    def close(self) -> None: ...


class _EngineThread:
    """An engine in a thread of this process."""

    count = 1

    def __init__(self, options: LLMOptions) -> None:
        self.llm = LLM(**vars(options))
        self.ready = Ready.of(self.llm)
        self._inbox: Inbox = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mtpkit-engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            work(self.llm, self._inbox, self._replies.put)
        except MtpkitError as error:
            self._replies.put(error)
        except Exception as error:
            traceback.print_exc()
            failed = f"the engine failed: {type(error).__name__}: {error}"
            self._replies.put(MtpkitError(failed))
        else:
            self._replies.put(EngineDead("the engine was shut down"))

    def send(self, index: int, message: Message) -> None:
        """See `EngineProcesses.send`."""
        self._inbox.put(message)

    def receive(self) -> Iterator[tuple[int, object]]:
        """See `EngineProcesses.receive`."""
        reply = self._replies.get()
        if isinstance(reply, MtpkitError):
            raise reply
        yield 0, reply

    def close(self) -> None:
        """Wait for the engine's last step, and give up model and caches."""
        self._thread.join()
        self.llm.shutdown()


_ABORTED = Progress("", [], True, None, None, None, None)
"""What an aborted request is told last."""


class _Stream:
    """What one request is told, from the thread that reads to the coroutine that waits."""

    def __init__(self, request_id: str, engine: int, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id
        self.engine = engine
        """Number of the engine that decodes the request."""
        self.loop = loop
        self.added = False
        """Whether the engine was sent the request."""
        self.unwanted: list[int] = []
        """Outputs that were aborted before that."""
        self.ended = False
        """Whether the engine has told the end of the request."""
        self._new: Progress | None = None
        """What was not read yet."""
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        """What `next` waits for."""

    def add(self, message: Add, send: Callable[[int, Message], None]) -> None:
        """Send the request to its engine, unless it has ended before."""
        if self._new is None and self._error is None:
            send(self.engine, message)
            self.added = True

    def put_from_anywhere(self, told: Progress | Exception) -> None:
        """Tell something new from any thread."""
        self.call_from_anywhere(self.put, told)

    def call_from_anywhere(self, function: Callable[..., None], *args: object) -> None:
        """Call a function in the event loop, from any thread."""
        with suppress(RuntimeError):  # the loop of an abandoned stream may be closed
            self.loop.call_soon_threadsafe(function, *args)

    def put(self, told: Progress | Exception) -> None:
        """Tell something new from the event loop."""
        if isinstance(told, Exception):
            self._error = told
            self.ended = self.ended or isinstance(told, UserError)
        elif self._new is None:
            self._take(told)
        elif not self._new.finished:
            self._take(_joined(self._new, told))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self, told: Progress) -> None:
        self._new = told
        # The engine has told nothing of the end of an aborted request.
        self.ended = told.stats is not None

    async def next(self) -> Progress:
        """Wait for something new; all that came since the last call is joined.

        Raises:
            UserError: the prompt is refused.
            EngineDead: no more will come.
        """
        if self._new is None and self._error is None:
            self._waiter = self.loop.create_future()
            await self._waiter
        new = self._new
        # Tokens before an error are told first.
        if new is None:
            assert self._error is not None
            raise self._error
        self._new = None
        return new


def _settle(future: Future[Any], value: Any, error: Exception | None) -> None:
    """Give a question its answer or its error; whoever asked may have gone."""
    with suppress(InvalidStateError):
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


def _put_all(pairs: Sequence[tuple[_Stream, Progress]]) -> None:
    for stream, progress in pairs:
        stream.put(progress)


def _joined(earlier: Progress, later: Progress) -> Progress:
    """What two pieces of progress tell together."""
    return later._replace(
        completions=joined(earlier.completions, later.completions),
        num_cached_tokens=later.num_cached_tokens or earlier.num_cached_tokens,
        prompt_logprobs=earlier.prompt_logprobs or later.prompt_logprobs,
    )


class _Output:
    """The outputs of a prompt, put together from what is new in each."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
    ) -> None:
        self.finished = False
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._kind = params.output_kind
        self._growing = set(range(params.n))
        """Places of the outputs that have not ended."""
        self._whole: list[CompletionOutput] = []
        """All so far, unless outputs hold what is new."""
        self._prompt_log_probs: list[dict[int, Logprob] | None] | None = None
        self._stats = RequestStats()

    def after(self, progress: Progress) -> RequestOutput:
        """The next output."""
        new = progress.completions
        self._growing -= {one.index for one in new if one.finish_reason is not None}
        if progress.finished:
            # The engine tells nothing of the end of what was aborted.
            new = joined(new, [CompletionOutput([], "", "abort", i) for i in self._growing])
        outputs = new
        prompt_log_probs = progress.prompt_logprobs
        if self._kind != RequestOutputKind.DELTA:
            self._whole = joined(self._whole, new)
            changed = {one.index for one in new}
            self._prompt_log_probs = self._prompt_log_probs or prompt_log_probs
            prompt_log_probs = self._prompt_log_probs
            outputs = [one for one in self._whole if one.index in changed]

        if progress.num_cached_tokens is not None:
            self._stats.num_cached_tokens = progress.num_cached_tokens
        self.finished = progress.finished
        return RequestOutput(
            self._request_id,
            self._prompt,
            self._prompt_token_ids,
            outputs,
            progress.stats or self._stats,
            self.finished,
            prompt_log_probs,
            progress.metrics,
        )
