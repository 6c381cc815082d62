"""Decoding with and without multi-token-prediction heads: continuous batching over paged and recurrent caches."""

from mtpkit.engine.engine import Engine
from mtpkit.engine.llm import LLM
from mtpkit.engine.params import EngineConfig, SamplingParams
from mtpkit.engine.request import CompletionOutput, EngineStats, RequestError, RequestOutput, require_whole

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "require_whole",
]
