"""Bodies of /v1/models and /version."""

from typing import Literal

from mtpkit.server.protocol.base import Body


class Model(Body):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """Seconds since 1970 at which the server was started."""
    owned_by: Literal["mtpkit"] = "mtpkit"
    root: str
    """The model as it was given to `mtpkit serve`."""
    max_model_len: int
    """Most tokens of a prompt and its output together."""


class ModelList(Body):
    """All served models: there is one."""

    object: Literal["list"] = "list"
    data: list[Model]


class Version(Body):
    """mtpkit's version."""

    version: str
