"""Which modules a model is made of, by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.models.backends import LocalSpecProvider

from mtpkit.errors import UserError
from mtpkit.model.layers.linear import ColumnParallelLinear, RowParallelLinear
from mtpkit.model.layers.norm import NormColumnParallelLinear, RMSNorm


@dataclass(frozen=True)
class Backend:
    """Modules with megatron-core's constructor signatures and Megatron's parameter names."""

    norm: type
    column_linear: type
    norm_column_linear: type
    """Column-parallel linear that holds the norm of its input as `layer_norm_weight`."""
    row_linear: type
    """Row-parallel linear that can add its output to a residual stream, see `RowParallelLinear.adding_to`."""
    moe_provider: Any
    """megatron-core's spec provider for the experts."""


def _local() -> Backend:
    return Backend(RMSNorm, ColumnParallelLinear, NormColumnParallelLinear, RowParallelLinear, LocalSpecProvider())


BACKENDS: dict[str, Callable[[], Backend]] = {"local": _local}
"""Lazy factories, so that an optional package is imported only when its backend is chosen."""


def get_backend(name: str) -> Backend:
    """The backend called `name`.

    Raises:
        UserError: there is none of that name.
    """
    if name not in BACKENDS:
        raise UserError(f"backend {name!r} is unknown; choose one of: {', '.join(BACKENDS)}")
    return BACKENDS[name]()
