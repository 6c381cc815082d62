"""The application: all routes, behind the API key, with ids of requests."""

import secrets
from uuid import uuid4

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtpkit import __version__
from mtpkit.server import chat, completions, page, status, tokens
from mtpkit.server.errors import ApiError, error_response, handle_errors
from mtpkit.server.service import Service

_OPEN = ("/", "/health", "/ping", "/version", "/metrics")
"""Paths without an API key: probes, collectors and the page that shows their numbers have none."""
_LONGEST_ID = 128
"""Most characters of a request's id."""


def make_app(service: Service, api_key: str | None = None) -> FastAPI:
    """Put an application together.

    Args:
        api_key: key that requests must have; None: requests need none.
    """
    app = FastAPI(title="mtpkit", version=__version__)
    app.state.service = service
    for room in (completions, chat, tokens, status, page):
        app.include_router(room.router)
    handle_errors(app)
    app.add_middleware(_Door, api_key=api_key)
    return app


class _Door:
    """Gives each request an id, and lets in those that have the key."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._key = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")[:_LONGEST_ID] or uuid4().hex
        scope.setdefault("state", {})["id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        given = headers.get("authorization", "").encode("latin-1")
        closed = self._key is not None and scope["path"] not in _OPEN
        if closed and not secrets.compare_digest(given, self._key or b""):
            wrong = ApiError(401, "the API key is missing or wrong: send it as bearer token")
            await error_response(wrong)(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)
