"""Sampling of tokens from logits, with the parameters and random numbers of each request.

Shape legend: S rows that sample, N logits rows (a row of the step has 1 or 1 + K of them), K
drafts, V vocabulary, or the part of it that this rank holds.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpkit.engine.steps.processors import (
    MIN_P,
    PROCESSORS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Columns,
    Seen,
    Use,
)
from mtpkit.engine.steps.vocabulary import RowShaping, Vocabulary
from mtpkit.kernels import sampling as ops

TOKEN_STREAM, ACCEPT_STREAM, DRAFT_STREAM = range(3)
"""Independent streams of random numbers per token: for the token, the acceptance of its draft, and
the draft."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of S rows: the slots of the rows, and the tensors of `DeviceState` that
    hold them by slot."""

    use: Use
    """Names of the processors that at least one row uses."""
    slots: Tensor
    """[S] int64; -1 for null rows."""
    all_seeds: Tensor
    """[slots] int64, seeds of all slots."""
    columns: Columns
    """Columns of the processors, for all slots."""
    vocabulary: Vocabulary
    """The vocabulary that the logits cover, or this rank's part of it."""

    @property
    def seeds(self) -> Tensor:
        """[S] int64, seeds of the rows."""
        return self.all_seeds[self.slots]


def process(logits: Tensor, sampling: Sampling, rows: Tensor, seen: Seen) -> Tensor:
    """Apply the processors in use to [N, V] logits.

    Args:
        logits: [N, V]; the first D * (1 + K) belong to the decode rows.
        sampling: parameters of S rows, the decode rows first.
        rows: [N] int64, the row of each logit.
    """
    for processor in PROCESSORS:
        if processor.name in sampling.use:
            logits = processor.apply(logits, sampling.columns, sampling.slots[rows], seen)
    return logits


def probabilities(logits: Tensor, sampling: Sampling, rows: Tensor) -> Tensor:
    """[N, V] float32 distributions from which the rows sample."""
    return sampling.vocabulary.probabilities(logits, _shaping(sampling, rows))


def log_distributions(logits: Tensor, sampling: Sampling, rows: Tensor) -> Tensor:
    """[N, V] float32, logarithms of the distributions from which the rows sample, for greedy rows
    of those at temperature 1."""
    temperature, top_k, top_p, min_p = _shaping(sampling, rows)
    shaping = (torch.where(temperature == 0, 1.0, temperature), top_k, top_p, min_p)
    return sampling.vocabulary.probabilities(logits, shaping).log()


def _shaping(sampling: Sampling, rows: Tensor) -> RowShaping:
    slots = sampling.slots[rows]
    # A filter that no row uses is left out: each one searches the whole vocabulary.
    top_k, top_p, min_p = (
        sampling.columns[one.name][slots] if one.name in sampling.use else None
        for one in (TOP_K, TOP_P, MIN_P)
    )
    return sampling.columns[TEMPERATURE.name][slots], top_k, top_p, min_p


def uniforms(
    sampling: Sampling, rows: Tensor, positions: Tensor, stream: int, branches: Tensor | None = None
) -> Tensor:
    """[N] float64 random numbers for the tokens at `positions` [N] and, in trees, `branches` [N]
    (None: chains)."""
    return ops.uniform(sampling.seeds[rows], positions, stream, branches)


def sample(
    logits: Tensor, sampling: Sampling, rows: Tensor, positions: Callable[[], Tensor]
) -> Tensor:
    """[N] int64 tokens: the most likely one for greedy rows, a draw for all other rows. `positions`
    returns the tokens' positions [N] int64; it is called only if a row draws."""
    if TEMPERATURE.name not in sampling.use:
        return sampling.vocabulary.argmax(logits)
    numbers = uniforms(sampling, rows, positions(), TOKEN_STREAM)
    return sampling.vocabulary.sample_logits(logits, _shaping(sampling, rows), numbers)
