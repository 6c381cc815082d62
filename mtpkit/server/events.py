"""Responses that may take long: streams of events, and answers that are given up when their client
has gone."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Send

from mtpkit.server.errors import error_body
from mtpkit.server.protocol.base import Body

_GONE = Response(status_code=499)
"""What nobody reads."""


class EventStream(StreamingResponse):
    """A stream of server-sent events, which ends with `[DONE]`. An error is sent as an event.

    Args:
        first: what the first event holds, in JSON.
        others: what the other events hold; closed when the client has gone.
    """

    def __init__(self, first: str, others: AsyncGenerator[str]) -> None:
        self._events = _events(first, others)
        super().__init__(self._events, media_type="text/event-stream; charset=utf-8")
        self.headers["Cache-Control"] = "no-cache"

    async def stream_response(self, send: Send) -> None:
        """Send all events; close what they are made of at once where this is cancelled."""
        async with aclosing(self._events):
            await super().stream_response(send)


async def _events(first: str, others: AsyncGenerator[str]) -> AsyncGenerator[bytes]:
    async with aclosing(others):
        yield _event(first)
        try:
            async for text in others:
                yield _event(text)
        except Exception as error:
            yield _event(error_body(error).model_dump_json())
        yield _event("[DONE]")


def _event(text: str) -> bytes:
    return f"data: {text}\n\n".encode()


async def answered(request: Request, answer: Awaitable[Body]) -> Response:
    """Wait for the body of a response; give it up when the client has gone."""
    body = await _unless_gone(request, answer)
    if body is None:
        return _GONE
    return Response(body.model_dump_json(), media_type="application/json")


async def streamed(request: Request, chunks: AsyncGenerator[str]) -> Response:
    """Wait for the first chunk of a stream, whose errors can still be answered with their status;
    the others are sent as they come.

    Args:
        chunks: in JSON.
    """
    first = await _unless_gone(request, anext(chunks))
    if first is None:
        await chunks.aclose()
        return _GONE
    return EventStream(first, chunks)


async def _unless_gone[T](request: Request, result: Awaitable[T]) -> T | None:
    """Wait for a result; cancel it and return None when the client has gone."""
    task = asyncio.ensure_future(result)
    gone = asyncio.ensure_future(_wait_for_end(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for each in (task, gone):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def _wait_for_end(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
