"""What changes logits before a token is chosen, in order. A further change is a file here and a place in the list."""

from mtpkit.engine.params import SamplingParams
from mtpkit.engine.processors.base import Columns, Processor
from mtpkit.engine.processors.penalties import Penalties
from mtpkit.engine.processors.shaping import MIN_P, TEMPERATURE, TOP_K, TOP_P, Shaping

PROCESSORS: tuple[Processor, ...] = (Penalties(), TEMPERATURE, MIN_P, TOP_K, TOP_P)

Use = frozenset[str]
"""Names of the processors that any of a set of requests uses; the rest need not be computed."""

GREEDY: Use = frozenset()
_SHAPING: Use = frozenset(processor.name for processor in PROCESSORS if isinstance(processor, Shaping))


def processors_of(params: SamplingParams, vocab_size: int) -> Use:
    """What a request with these parameters uses."""
    return frozenset(processor.name for processor in PROCESSORS if processor.used(params, vocab_size))


def for_graph(use: Use) -> Use:
    """What a CUDA graph computes for `use`: of what shapes distributions all, or none where every row is greedy, so
    that few graphs are captured."""
    return use | _SHAPING if TEMPERATURE.name in use else use - _SHAPING


__all__ = [
    "GREEDY",
    "MIN_P",
    "PROCESSORS",
    "TEMPERATURE",
    "TOP_K",
    "TOP_P",
    "Columns",
    "Processor",
    "Use",
    "for_graph",
    "processors_of",
]
