"""Backends by name: the modules that a model is made of."""

import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider

from mtpkit.errors import UserError, listed
from mtpkit.model.layers.attention import CoreAttention
from mtpkit.model.layers.linear import ColumnParallelLinear, CopiedLinear, NormColumnParallelLinear, RowParallelLinear
from mtpkit.model.layers.norm import RMSNorm

BackendName = Literal["local", "te"]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """Modules with megatron-core's constructor signatures and Megatron's parameter names."""

    norm: type
    column_linear: type
    norm_column_linear: type
    """Column-parallel linear that holds the norm of its input as `layer_norm_weight`."""
    copied_linear: type
    """Linear that every tensor-parallel rank has whole, as (input size, output size, config); called without a bias,
    [..., in] to [..., out]."""
    row_linear: type
    """Row-parallel linear that can add its output to a residual stream, see `layers.linear.RowParallelLinear`."""
    core_attention: type
    """Causal attention over sequences, called as `kernels.attention.sequence_attention`."""
    moe_provider: BackendSpecProvider
    """megatron-core's spec provider for the experts."""


def _local() -> Backend:
    return Backend(
        RMSNorm,
        ColumnParallelLinear,
        NormColumnParallelLinear,
        CopiedLinear,
        RowParallelLinear,
        CoreAttention,
        LocalSpecProvider(),
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
    """The backend called `name`: `local`, torch and mtpkit's kernels; `te`, Transformer Engine's modules.

    Raises:
        UserError: there is none of that name, or what it needs is not there.
    """
    if name not in BACKENDS:
        raise UserError(f"backend {name!r} is unknown; choose one of: {listed(BACKENDS)}")
    return BACKENDS[name]()


def resolve_backend(name: BackendName | Literal["auto"]) -> BackendName:
    """`name`, or for `auto` the name of the backend that this machine has best: `te` with a GPU and Transformer Engine,
    else `local`; with a warning where Transformer Engine is there and does not work."""
    if name != "auto":
        return name
    reason = _why_not_te()
    if reason and torch.cuda.is_available() and importlib.util.find_spec("transformer_engine"):
        _logger.warning("backend 'local' is used: 'te' needs %s", reason)
    return "local" if reason else "te"


def _why_not_te() -> str | None:
    """Say what Transformer Engine lacks on this machine; None: nothing."""
    if not torch.cuda.is_available():
        return "a GPU"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # also OSError of a library that it links to, AssertionError of parts of two versions
        reason = " ".join(str(error).split())
        return f"Transformer Engine, which cannot be imported ({reason}): pip install 'mtpkit[te]'"
    return None
