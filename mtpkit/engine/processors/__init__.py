"""What changes logits before a token is chosen, in order. A further change is a file here and a place in the list."""

from collections.abc import Sequence

from mtpkit.engine.processors.base import Columns, Processor
from mtpkit.engine.processors.penalties import Penalties
from mtpkit.engine.processors.shaping import MIN_P, TEMPERATURE, TOP_K, TOP_P, Shaping
from mtpkit.engine.request import Request

PROCESSORS: tuple[Processor, ...] = (Penalties(), TEMPERATURE, MIN_P, TOP_K, TOP_P)

Use = frozenset[str]
"""Names of the processors that any of a set of requests uses; the rest need not be computed."""

GREEDY: Use = frozenset()
_SHAPING: Use = frozenset(processor.name for processor in PROCESSORS if isinstance(processor, Shaping))


def processors_of(requests: Sequence[Request], vocab_size: int) -> Use:
    """What `requests` use."""
    return frozenset(p.name for p in PROCESSORS if any(p.used(request.params, vocab_size) for request in requests))


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
