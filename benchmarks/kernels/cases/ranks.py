"""Exchanges of tensor-parallel ranks, here of one rank with itself: the kernel's time without waits
for others."""

from collections.abc import Iterator

import torch

from benchmarks.kernels.case import Args, Case, Shapes, size
from mtpkit.kernels import exchange
from mtpkit.kernels.embedding import embedding_part
from mtpkit.kernels.exchange import CHANNELS, Windows

_LIMIT = 8 << 20
"""Bytes of the largest tensor, as for two ranks."""


def exchanges(shapes: Shapes) -> Iterator[Case]:
    """Sums and gathers of a step's hidden states, as far as they fit, and the best tokens of its
    logits."""
    count = min(shapes.count, _LIMIT // (shapes.config.hidden_size * shapes.dtype.itemsize))
    hidden = [count, shapes.config.hidden_size]
    for call in (exchange.sum_over_ranks, exchange.gather_ranks):
        yield Case(
            call,
            str(hidden),
            lambda: (shapes.normal(*hidden), windows(shapes)),
            lambda args: 4 * size(args[0]),
        )
    yield Case(
        exchange.best_of_ranks,
        f"[{shapes.count}]",
        lambda: (
            shapes.normal(shapes.count, dtype=torch.float32),
            shapes.ints(shapes.config.vocab_size, shapes.count),
            0,
            windows(shapes),
        ),
        lambda args: 4 * size(args[0], args[1]),
    )


def windows(shapes: Shapes) -> Windows:
    """Windows of a group of one rank."""
    window = torch.zeros(Windows.nbytes(_LIMIT), dtype=torch.uint8, device=shapes.device)
    return Windows(
        0, (window,), torch.zeros(CHANNELS, dtype=torch.int64, device=shapes.device), _LIMIT
    )


def embedding(shapes: Shapes) -> Case:
    """The embeddings of a step's tokens; this rank holds half of the vocabulary."""
    half = shapes.config.vocab_size // 2
    hidden = shapes.config.hidden_size

    def more(args: Args) -> Args:
        return shapes.ints(2 * half, shapes.count), args[1], half

    return Case(
        embedding_part,
        f"[{shapes.count}, {hidden}]",
        lambda: more((None, shapes.normal(half, hidden))),
        lambda args: 1.5 * len(args[0]) * hidden * args[1].element_size(),
        more=more,
    )
