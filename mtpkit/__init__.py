"""mtpkit: train, convert and decode with multi-token-prediction heads on hybrid language models."""

from importlib import import_module
from typing import TYPE_CHECKING

from mtpkit.version import __version__

if TYPE_CHECKING:
    from mtpkit.engine import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]

_EXPORTS = {"LLM": "mtpkit.engine", "SamplingParams": "mtpkit.engine"}


def __getattr__(name: str) -> object:
    """Import the names in `_EXPORTS` on first use, so that `import mtpkit` costs nothing."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    # Python calls `__getattr__` only for names that the module lacks.
    globals()[name] = value
    return value
