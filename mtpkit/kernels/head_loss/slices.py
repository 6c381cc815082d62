"""What one pass over logits tells of a slice of the vocabulary, how slices become the whole, and the losses from it.

A slice is what one program of a kernel reads, or what one tensor-parallel rank holds: both are folded alike. Everything
is laid out by student row; the rows that one teacher row teaches repeat its numbers.

Shape legend: S student rows, P slices, t and s the logits of teacher and student, T the temperature.
"""

from typing import Literal

import torch
from torch import Tensor

LossKind = Literal["kl", "tv", "ce"]

PEAK, TOKEN, TOTAL, BASE_PEAK, BASE_TOKEN, BASE_TOTAL, CROSS = range(7)
"""Statistics of a slice. The student's largest logit; its column, the first of equals; the sum of the weights
exp((s - PEAK) / T). The same of the teacher, whose total is of the tokens that its support keeps; for `ce` it is 0, or
NaN where one of the teacher's logits is NaN or infinity. CROSS is for `kl` the sum of the teacher's weights times
((t - BASE_PEAK) - (s - PEAK)) / T, for `ce` the target's logit, or 0 where another slice has the target.

A logit of NaN or infinity makes one of these numbers one, whatever the kind, and the row's loss with it. A logit of
minus infinity is a probability of 0."""
NUM_STATISTICS = 7


def fold(parts: Tensor, kind: LossKind, temperature: float = 1.0) -> Tensor:
    """Statistics [7, S] of the whole from those of its slices [P, 7, S], which may be folded again with others."""
    if len(parts) == 1:
        return parts[0]
    whole = torch.zeros_like(parts[0])
    rises = []  # how far each slice's peak is above the whole's, times 1 / T
    for peak, token, total in ((PEAK, TOKEN, TOTAL), (BASE_PEAK, BASE_TOKEN, BASE_TOTAL)):
        peaks = parts[:, peak]
        whole[peak] = peaks.amax(0)
        whole[token] = parts[:, token].masked_fill(peaks < whole[peak], torch.inf).amin(0)
        rises.append((peaks - whole[peak]) / temperature)
        whole[total] = (parts[:, total] * rises[-1].exp()).sum(0)
    cross = parts[:, CROSS]
    if kind == "kl":
        rise, base_rise = rises
        cross = (cross + parts[:, BASE_TOTAL] * (base_rise - rise)) * base_rise.exp()
    whole[CROSS] = cross.sum(0)
    return whole


def number_tokens(whole: Tensor, first: int) -> Tensor:
    """Statistics [7, S] whose slice begins at token `first`, with tokens in place of columns. Exact below 2^24."""
    offset = whole.new_zeros(NUM_STATISTICS, 1)
    offset[TOKEN] = offset[BASE_TOKEN] = first
    return whole + offset


def row_losses(whole: Tensor, kind: LossKind, temperature: float = 1.0) -> Tensor:
    """[S], of `kl` and `ce`; `tv` has its losses from `HeadLoss.overlap`."""
    if kind == "ce":
        return whole[PEAK] + whole[TOTAL].log() - whole[CROSS] + whole[BASE_TOTAL]
    assert kind == "kl", kind
    divergence = whole[CROSS] / whole[BASE_TOTAL] + (whole[TOTAL] / whole[BASE_TOTAL]).log()
    return divergence * temperature**2


def matches(whole: Tensor) -> Tensor:
    """[S] bool: the student's best token is the teacher's. Logits that are not finite have no best token."""
    return (whole[TOKEN] == whole[BASE_TOKEN]) & is_finite(whole)


def is_finite(whole: Tensor) -> Tensor:
    """[S] bool: the logits of student and teacher give probabilities."""
    return whole.isfinite().all(0)


def draft_tokens(whole: Tensor) -> Tensor:
    """[S] int64: the student's best token."""
    return whole[TOKEN].long()


def log_probs(whole: Tensor, logits: Tensor, base_logits: Tensor) -> tuple[Tensor, Tensor]:
    """A token's logits [S] as log-probabilities of student and teacher, [S] each; of `kl` at temperature 1."""
    own = logits - whole[PEAK] - whole[TOTAL].log()
    return own, base_logits - whole[BASE_PEAK] - whole[BASE_TOTAL].log()
