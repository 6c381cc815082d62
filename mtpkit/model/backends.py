"""Backends by name: the module classes that a model is built from."""

import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Literal

import torch

from mtpkit.errors import UserError, listed
from mtpkit.model.layers.attention import CoreAttention
from mtpkit.model.layers.backend import Backend
from mtpkit.model.layers.experts import SpecProvider
from mtpkit.model.layers.linear import (
    ColumnParallelLinear,
    CopiedLinear,
    NormColumnParallelLinear,
    RowParallelLinear,
)
from mtpkit.model.layers.norm import RMSNorm

BackendName = Literal["local", "te"]
_logger = logging.getLogger(__name__)


def _local() -> Backend:
    return Backend(
        RMSNorm,
        ColumnParallelLinear,
        NormColumnParallelLinear,
        CopiedLinear,
        RowParallelLinear,
        CoreAttention,
        SpecProvider(),
    )


def _te() -> Backend:
    reason = _why_not_te()
    if reason:
        raise UserError(f"backend 'te' needs {reason}; or choose backend 'local'")
    from mtpkit.model.layers import te

    return Backend(
        te.RMSNorm,
        te.ColumnParallelLinear,
        te.NormColumnParallelLinear,
        te.CopiedLinear,
        te.RowParallelLinear,
        te.CoreAttention,
        te.SpecProvider(),
    )


BACKENDS: dict[str, Callable[[], Backend]] = {"local": _local, "te": _te}
"""Lazy factories, so that an optional package is imported only when its backend is chosen."""


def get_backend(name: str) -> Backend:
    """Return the backend called `name`: `local` is torch and mtpkit's kernels, `te` is Transformer
    Engine's modules.

    Raises:
        UserError: no backend has that name, or something that it needs is missing.
    """
    if name not in BACKENDS:
        raise UserError(f"backend {name!r} is unknown; choose one of: {listed(BACKENDS)}")
    return BACKENDS[name]()


def resolve_backend(name: BackendName | Literal["auto"]) -> BackendName:
    """Return `name`, or for `auto` the best backend on this machine: `te` with a GPU and
    Transformer Engine, else `local`. Warn if there is a GPU and Transformer Engine is installed but
    cannot be imported."""
    if name != "auto":
        return name
    reason = _why_not_te()
    if reason and torch.cuda.is_available() and importlib.util.find_spec("transformer_engine"):
        _logger.warning("backend 'local' is used: 'te' needs %s", reason)
    return "local" if reason else "te"


def _why_not_te() -> str | None:
    """Say what backend `te` lacks on this machine; None: nothing."""
    if not torch.cuda.is_available():
        return "a GPU"
    try:
        importlib.import_module("transformer_engine.pytorch")
    # also OSError from a linked library, AssertionError from mixed versions
    except Exception as error:
        reason = " ".join(str(error).split())
        return f"Transformer Engine, which cannot be imported ({reason}): pip install 'mtpkit[te]'"
    return None
