"""From logits to tokens, with the parameters and the randomness of each request.

Shape legend: S rows that sample, N logits rows (a row of the step has 1 or 1 + K of them), K drafts, V vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor

from mtpkit.engine.processors import MIN_P, PROCESSORS, TEMPERATURE, TOP_K, TOP_P, Columns, Use
from mtpkit.kernels import sampling as ops
from mtpkit.kernels.draft_head import argmax

TOKEN_STREAM, ACCEPT_STREAM, DRAFT_STREAM = range(3)
"""Independent random numbers of a token: the token itself, the acceptance of its draft, the draft."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of S rows are chosen: where `DeviceState` keeps what their requests ask for."""

    use: Use
    """The processors that any of the rows uses."""
    slots: Tensor
    """[S] int64; -1 of null rows."""
    all_seeds: Tensor
    """[slots] int64."""
    columns: Columns
    """What the processors keep, of all slots."""

    @property
    def seeds(self) -> Tensor:
        """[S] int64."""
        return self.all_seeds[self.slots]


def process(logits: Tensor, sampling: Sampling, rows: Tensor, drafts: Tensor) -> Tensor:
    """[N, V] logits as the processors in use change them.

    Args:
        logits: [N, V]; the first D * (1 + K) belong to the decode rows.
        sampling: of S rows, the decode rows first.
        rows: [N] int64, row of each.
        drafts: [D, K] int64, of which each logit sees those before its position.
    """
    for processor in PROCESSORS:
        if processor.name in sampling.use:
            logits = processor.apply(logits, sampling.columns, sampling.slots[rows], drafts)
    return logits


def probabilities(logits: Tensor, sampling: Sampling, rows: Tensor) -> Tensor:
    """[N, V] float32 distributions that the rows sample from."""
    return ops.probabilities(logits, *_shaping(sampling, rows))


def _shaping(sampling: Sampling, rows: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """[N] temperature, top-k, top-p and min-p; None: a filter that no row uses."""
    slots = sampling.slots[rows]
    top_k, top_p, min_p = (
        sampling.columns[one.name][slots] if one.name in sampling.use else None for one in (TOP_K, TOP_P, MIN_P)
    )
    return sampling.columns[TEMPERATURE.name][slots], top_k, top_p, min_p


def uniforms(
    sampling: Sampling, rows: Tensor, positions: Tensor, stream: int, branches: Tensor | None = None
) -> Tensor:
    """[N] float64 random numbers for the tokens at `positions` [N], and `branches` [N] where rows are no chains."""
    return ops.uniform(sampling.seeds[rows], positions, stream, branches)


def sample(logits: Tensor, sampling: Sampling, rows: Tensor, positions: Tensor) -> Tensor:
    """[N] int64 tokens for `positions` [N] int64: the best ones of greedy rows, draws for the others."""
    if TEMPERATURE.name not in sampling.use:
        return argmax(logits)
    numbers = uniforms(sampling, rows, positions, TOKEN_STREAM)
    return ops.sample_logits(logits, *_shaping(sampling, rows), numbers)
