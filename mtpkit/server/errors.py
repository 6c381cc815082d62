"""Errors as responses: `{"error": {"message", "type", "param", "code"}}`, whatever goes wrong."""

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from mtpkit.config.checked import WrongValues
from mtpkit.engine import EngineDead
from mtpkit.errors import UserError, listed
from mtpkit.server.protocol.errors import Error, ErrorResponse

_KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_BODY = {"model": ErrorResponse}
RESPONSES: dict[int | str, dict[str, Any]] = {
    400: _BODY | {"description": "The request is wrong, or asks for what there is not"},
    401: _BODY | {"description": "No API key, or a wrong one"},
    404: _BODY | {"description": "No such model or path"},
    429: _BODY | {"description": "Too many prompts wait"},
    503: _BODY | {"description": "The engine is dead"},
    "4XX": _BODY | {"description": "The request is wrong"},
}
"""Responses of every route, for its schema."""
STREAM: dict[str, Any] = {"content": {"text/event-stream": {}}}
"""The form of a response that is streamed."""
_logger = logging.getLogger(__name__)


class ApiError(Exception):
    """A response with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.headers = headers


def error_body(error: Exception) -> ErrorResponse:
    """Describe an error to a client. Errors that are no one's fault but ours are logged, and
    described by their type alone."""
    status, param = 500, None
    message = " ".join(str(error).split())
    match error:
        case ApiError():
            status = error.status
            param = error.param
        case UserError():
            status = 400
            if isinstance(error, WrongValues) and len(error.clauses) == 1:
                param = error.clauses[0].split()[0]
        case EngineDead():
            status = 503
        case HTTPException():
            status = error.status_code
            message = str(error.detail)
        case RequestValidationError():
            status = 400
            clauses = list(map(_clause, error.errors()))
            message = listed(clauses, most=3, separator="; ")
            param = clauses[0].partition(":")[0] if len(clauses) == 1 else None
        case _:
            _logger.error("a request failed", exc_info=error)
            message = f"the server failed: {type(error).__name__}"
    # Messages may quote what clients sent, even texts that are no Unicode.
    message = message.encode("utf-8", "backslashreplace").decode()
    kind = _KINDS.get(status) or HTTPStatus(status).phrase
    return ErrorResponse(error=Error(message=message, type=kind, param=param, code=status))


def _clause(problem: Any) -> str:
    """What is wrong with one field."""
    place = ".".join(str(part) for part in problem["loc"] if part != "body")
    text = problem["msg"].removeprefix("Value error, ")
    return f"{place}: {text}" if place else text


def error_response(error: Exception) -> JSONResponse:
    """The response to a request that fails."""
    body = error_body(error)
    headers = getattr(error, "headers", None)
    return JSONResponse(body.model_dump(), body.error.code, headers=headers)


def handle_errors(app: FastAPI) -> None:
    """Let an app answer with `error_response` whatever is raised."""

    async def answer(_: Request, error: Exception) -> JSONResponse:
        return error_response(error)

    for kind in (ApiError, UserError, EngineDead, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer)
