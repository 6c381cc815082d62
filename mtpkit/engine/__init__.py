"""Decoding with and without multi-token-prediction heads: continuous batching over paged and
recurrent caches.

Importing the package imports only the settings; the engine, and torch with it, is imported on first
use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mtpkit.engine.requests.options import EngineOptions, LLMOptions
from mtpkit.engine.requests.params import COMMAND_DEFAULTS, SamplingParams

if TYPE_CHECKING:
    from mtpkit.engine.engine import Engine
    from mtpkit.engine.llm import LLM
    from mtpkit.engine.replicas import Replicas
    from mtpkit.engine.requests.config import EngineConfig
    from mtpkit.engine.requests.request import (
        CompletionOutput,
        RequestError,
        RequestOutput,
        require_whole,
    )
    from mtpkit.engine.requests.stats import EngineStats

__all__ = [
    "COMMAND_DEFAULTS",
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineOptions",
    "EngineStats",
    "LLMOptions",
    "Replicas",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "require_whole",
]

_MODULES = {
    "Engine": "engine",
    "EngineConfig": "requests.config",
    "EngineStats": "requests.stats",
    "LLM": "llm",
    "Replicas": "replicas",
} | dict.fromkeys(
    ("CompletionOutput", "RequestError", "RequestOutput", "require_whole"), "requests.request"
)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
