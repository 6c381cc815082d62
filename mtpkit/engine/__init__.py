"""Decoding with and without multi-token-prediction heads: continuous batching over paged and recurrent caches."""

from mtpkit.engine.engine import Engine
from mtpkit.engine.llm import LLM
from mtpkit.engine.params import EngineConfig, SamplingParams
from mtpkit.engine.request import CompletionOutput, EngineStats, RequestOutput

__all__ = ["LLM", "CompletionOutput", "Engine", "EngineConfig", "EngineStats", "RequestOutput", "SamplingParams"]
