"""Measurements of the whole: how much faster a model decodes with its heads, and whether the tokens are the same.

Settings are imported with the package; what measures, and torch with it, on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mtpkit.bench.settings import SpeedupConfig

if TYPE_CHECKING:
    from mtpkit.bench.shapes import read_named_prompts, read_prompts
    from mtpkit.bench.speedup import SpeedupReport, SpeedupRow, measure_speedup

__all__ = ["SpeedupConfig", "SpeedupReport", "SpeedupRow", "measure_speedup", "read_named_prompts", "read_prompts"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'shapes' if name.startswith('read') else 'speedup'}"), name)
