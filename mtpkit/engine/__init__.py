"""Decoding with and without multi-token-prediction heads: continuous batching over paged and
recurrent caches.

Importing the package imports only the settings; the engine, and torch with it, is imported on first
use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mtpkit.engine.requests.options import EngineOptions, LLMOptions
from mtpkit.engine.requests.params import (
    COMMAND_DEFAULTS,
    NOT_OPTIONS,
    RequestOutputKind,
    SamplingParams,
)
from mtpkit.engine.requests.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from mtpkit.engine.async_llm import AsyncLLM, EngineDead
    from mtpkit.engine.engine import Engine
    from mtpkit.engine.llm import LLM
    from mtpkit.engine.replicas import Replicas
    from mtpkit.engine.requests.config import EngineConfig
    from mtpkit.engine.requests.log_probs import Logprob
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
    "NOT_OPTIONS",
    "AsyncLLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineDead",
    "EngineOptions",
    "EngineStats",
    "LLMOptions",
    "Logprob",
    "Replicas",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "require_whole",
]

_MODULES = {
    "AsyncLLM": "async_llm",
    "EngineDead": "async_llm",
    "Engine": "engine",
    "EngineConfig": "requests.config",
    "EngineStats": "requests.stats",
    "LLM": "llm",
    "Logprob": "requests.log_probs",
    "Replicas": "replicas",
} | dict.fromkeys(
    ("CompletionOutput", "RequestError", "RequestOutput", "require_whole"), "requests.request"
)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
