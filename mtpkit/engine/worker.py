"""The loop that decodes for others: takes messages about requests, runs steps, and sends back what
is new after each.

The others are a program in another process or in another thread, see `mtpkit.engine.async_llm` and
`mtpkit.engine.replicas`. Where several ranks hold one model, rank 0 takes the messages and shares
them with all ranks before each step: every rank then has the same requests in the same order.
"""

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mtpkit.engine.llm import LLM
from mtpkit.engine.requests.log_probs import Logprob
from mtpkit.engine.requests.params import SamplingParams
from mtpkit.engine.requests.request import CompletionOutput, RequestOutput
from mtpkit.engine.requests.stats import RequestMetrics, RequestStats
from mtpkit.errors import UserError

_IDLE = 60.0
"""Seconds after which idle ranks hear from rank 0: exchanges that take many minutes fail."""


@dataclass(frozen=True)
class Add:
    """Message: decode a prompt."""

    request_id: str
    """Id that no other request of the sender has had."""
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    """Their `output_kind` says how much is sent back before the end: with `DELTA` what is new
    after each step, with `FINAL_ONLY` nothing."""
    name: str | None = None
    """Name of the prompt in messages."""
    checkpoint_at: int | None = None


@dataclass(frozen=True)
class Abort:
    """Message: drop requests. Ids of requests that have ended are ignored."""

    request_ids: Sequence[str]
    index: int | None = None
    """The only output to end, see `Engine.abort`."""


@dataclass(frozen=True)
class Ask:
    """Message: call a function of the LLM and send back what it returns."""

    number: int
    """Number that the answer will have."""
    function: Callable[[LLM], Any]
    """Called on every rank; rank 0's result is sent. It can be pickled."""


@dataclass(frozen=True)
class Stop:
    """Message: return from the loop. Unfinished requests are dropped."""


type Message = Add | Abort | Ask | Stop
type Inbox = queue.SimpleQueue[Message]


class Refused(NamedTuple):
    """Answer to `Add`: the prompt can never be served."""

    request_id: str
    error: UserError


class Answer(NamedTuple):
    """Answer to `Ask`."""

    number: int
    value: Any
    error: UserError | None = None


class Progress(NamedTuple):
    """What is new of one request after a step."""

    request_id: str
    completions: list[CompletionOutput]
    """Those of the prompt's outputs that have something new, see `joined`."""
    finished: bool
    num_cached_tokens: int | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """Sent with the first tokens."""
    stats: RequestStats | None
    """Sent when the request has ended."""
    metrics: RequestMetrics | None
    """Sent when the request has ended."""

    @classmethod
    def from_piece(cls, piece: "Piece") -> "Progress":
        """What the short form tells."""
        request_id, index, token_ids, text, cached = piece
        completion = CompletionOutput(token_ids, text, None, index)
        return cls(request_id, [completion], False, cached, None, None, None)

    @classmethod
    def of(cls, output: RequestOutput) -> "Progress":
        """What an output of kind `DELTA` or `FINAL_ONLY` tells."""
        return cls(
            output.request_id,
            output.outputs,
            output.finished,
            output.num_cached_tokens,
            output.prompt_logprobs,
            output.stats if output.finished else None,
            output.metrics if output.finished else None,
        )

    def output(self, prompt: str | None, prompt_token_ids: Sequence[int]) -> RequestOutput:
        """The output of a request that has ended, of which this is all there is."""
        assert self.stats is not None
        return RequestOutput(
            self.request_id,
            prompt,
            list(prompt_token_ids),
            self.completions,
            self.stats,
            finished=True,
            prompt_logprobs=self.prompt_logprobs,
            metrics=self.metrics,
        )


type Piece = tuple[str, int, list[int], str, int | None]
"""A short form of `Progress`, since sending one for each request and step takes time: the id of a
request, and of its only completion with something new the place, the new tokens and the new text;
then `num_cached_tokens`."""
type Reply = Refused | Answer | list[Progress | Piece]
"""What the loop sends: answers, and a list after each step with anything new."""


def _told(output: RequestOutput) -> Progress | Piece:
    """What an output tells, in the short form if that has room for it."""
    one = output.outputs[0]
    more = output.finished or len(output.outputs) > 1 or output.prompt_logprobs is not None
    if more or one.finish_reason is not None or one.logprobs is not None:
        return Progress.of(output)
    cached = output.stats.num_cached_tokens
    return output.request_id, one.index, one.token_ids, one.text, cached


def work(llm: LLM, inbox: Inbox, send: Callable[[Reply], None]) -> None:
    """Decode requests until `Stop` comes. Call it on all ranks of a model.

    Args:
        inbox: messages; looked at on rank 0 only.
        send: called on rank 0 only, with all replies.
    """
    first = llm.ranks.rank == 0
    llm.engine.intake.in_background = llm.ranks.size == 1
    while True:
        messages = llm.ranks.share(_taken(llm, inbox) if first else None)
        for message in messages or ():
            if isinstance(message, Stop):
                _stop(llm)
                return
            reply = _handle(llm, message)
            if first and reply is not None:
                send(reply)

        if llm.engine.has_unfinished:
            with llm.on_device:
                outputs = llm.engine.step()
            if first and outputs:
                send([_told(output) for output in outputs])


def _taken(llm: LLM, inbox: Inbox) -> list[Message] | None:
    """All messages that wait. If there is nothing to decode, wait for the first; None if none
    came."""
    messages = []
    if not llm.engine.has_unfinished:
        # Nothing else lets go of what was sent before.
        llm.ranks.wait_for_sends()
        try:
            messages.append(inbox.get(timeout=_IDLE))
        except queue.Empty:
            return None
    while not inbox.empty():
        messages.append(inbox.get())
    return messages or None


def _handle(llm: LLM, message: Add | Abort | Ask) -> Reply | None:
    if isinstance(message, Abort):
        for request_id in message.request_ids:
            llm.engine.abort(request_id, message.index)
        return None

    if isinstance(message, Ask):
        try:
            return Answer(message.number, message.function(llm))
        except UserError as error:
            return Answer(message.number, None, error)

    try:
        request = llm.engine.intake.make(
            message.prompt_token_ids,
            message.params,
            message.request_id,
            place=message.name,
            checkpoint_at=message.checkpoint_at,
        )
        llm.engine.scheduler.add(request)
    except UserError as error:
        return Refused(message.request_id, error)
    return None


def _stop(llm: LLM) -> None:
    """Drop all requests, and complete the exchanges with other ranks."""
    scheduler = llm.engine.scheduler
    for request in [*scheduler.waiting, *scheduler.running]:
        llm.engine.abort(request.request_id)
