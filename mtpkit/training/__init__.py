"""Training of multi-token-prediction heads on a frozen base. Importing `config` alone does not import torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpkit.training.cache_write import write_cache
    from mtpkit.training.config import TrainConfig, load_config
    from mtpkit.training.evaluation import served_acceptance
    from mtpkit.training.loop import train

__all__ = ["TrainConfig", "load_config", "served_acceptance", "train", "write_cache"]

_EXPORTS = {
    "TrainConfig": "config",
    "load_config": "config",
    "served_acceptance": "evaluation",
    "train": "loop",
    "write_cache": "cache_write",
}


def __getattr__(name: str) -> Any:
    """Import what `_EXPORTS` lists on first use."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
