"""Bodies of errors."""

from mtpkit.server.protocol.base import Body


class Error(Body):
    """What is wrong."""

    message: str
    """One line for people."""
    type: str
    """Kind of the error, such as `BadRequestError`."""
    param: str | None = None
    """The field of the request that is wrong."""
    code: int
    """The status."""


class ErrorResponse(Body):
    """Body of every response that has no status 200, and event of a stream that fails."""

    error: Error
