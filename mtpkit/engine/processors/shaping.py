"""Temperature and the filters that cut a distribution: one number per request, which the sampling kernels take."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mtpkit.engine.params import SamplingParams
from mtpkit.engine.processors.base import Column, Processor


@dataclass(frozen=True)
class Shaping(Processor):
    """A parameter of the sampling kernels. The column of its name holds the number of each request."""

    name: str
    dtype: torch.dtype
    fill: float
    value: Callable[[SamplingParams, int], float]
    """A request's number, given the size of the vocabulary."""
    off: Callable[[int], float] = lambda vocab_size: 0.0
    """The number that changes nothing."""

    def columns(self, vocab_size: int) -> dict[str, Column]:
        """One number per request."""
        return {self.name: Column((), self.dtype, self.fill)}

    def used(self, params: SamplingParams, vocab_size: int) -> bool:
        """See `Processor.used`."""
        return self.value(params, vocab_size) != self.off(vocab_size)

    def numbers(self, params: SamplingParams, vocab_size: int) -> dict[str, float]:
        """See `Processor.numbers`."""
        return {self.name: self.value(params, vocab_size)}


def _top_k(params: SamplingParams, vocab_size: int) -> int:
    return min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size


TEMPERATURE = Shaping("temperature", torch.float32, 0.0, lambda p, _: 0.0 if p.greedy else p.temperature)
"""0: greedy."""
MIN_P = Shaping("min_p", torch.float32, 0.0, lambda p, _: p.min_p)
TOP_K = Shaping("top_k", torch.int64, 1, _top_k, lambda vocab_size: vocab_size)
TOP_P = Shaping("top_p", torch.float32, 1.0, lambda p, _: p.top_p, lambda _: 1.0)
