"""Statistics of slices of the vocabulary from one pass over logits, their reduction to the whole,
and the losses.

A slice is the part that one program of a kernel reads, or that one tensor-parallel rank holds; both
kinds of slices are reduced in the same way. All statistics have one column per student row; student
rows with the same teacher row repeat the teacher's numbers.

Shape legend: S student rows, P slices, t and s the logits of teacher and student, T the
temperature.
"""

import torch
from torch import Tensor

from mtpkit.config import LossKind

PEAK, TOKEN, TOTAL, BASE_PEAK, BASE_TOKEN, BASE_TOTAL, CROSS = range(7)
"""Statistics of a slice. PEAK is the student's largest logit; TOKEN is its column, the first among
equals; TOTAL is the sum of the weights exp((s - PEAK) / T). BASE_* are the same statistics of the
teacher. BASE_TOTAL leaves out tokens below the floor; for `ce` it is 0, or NaN if a teacher logit
is NaN or +inf. CROSS is, for `kl`, the sum of the teacher's weights times ((t - BASE_PEAK) - (s -
PEAK)) / T; for `ce`, the student's logit of the target, or 0 if the target lies in another slice.

A logit of NaN or +inf makes one of these statistics, and so the row's loss, NaN or infinite,
whatever the kind of loss. A logit of -inf is a probability of 0."""
NUM_STATISTICS = 7


def fold(parts: Tensor, kind: LossKind, temperature: float = 1.0) -> Tensor:
    """Reduce the statistics [P, 7, S] of slices to the statistics [7, S] of their union, which may
    be reduced again."""
    if len(parts) == 1:
        return parts[0]

    whole = torch.zeros_like(parts[0])
    rises = []  # (peak of the slice - peak of the whole) / T
    for peak, token, total in ((PEAK, TOKEN, TOTAL), (BASE_PEAK, BASE_TOKEN, BASE_TOTAL)):
        peaks = parts[:, peak]
        whole[peak] = peaks.amax(0)

        # Of slices in a tie, the one with the smallest token wins, as within a slice.
        tokens = parts[:, token].masked_fill(peaks < whole[peak], torch.inf)
        whole[token] = tokens.amin(0)

        # Weights of a slice are relative to its own peak.
        rise = (peaks - whole[peak]) / temperature
        whole[total] = (parts[:, total] * rise.exp()).sum(0)
        rises.append(rise)

    cross = parts[:, CROSS]
    if kind == "kl":
        rise, base_rise = rises
        # CROSS is relative to the slice's peaks, both in its weights and in its differences.
        cross = (cross + parts[:, BASE_TOTAL] * (base_rise - rise)) * base_rise.exp()
    whole[CROSS] = cross.sum(0)
    return whole


def number_tokens(whole: Tensor, first: int) -> Tensor:
    """Replace columns by tokens in the statistics [7, S] of a slice that begins at token `first`;
    exact for tokens below 2^24."""
    offset = whole.new_zeros(NUM_STATISTICS, 1)
    offset[TOKEN] = offset[BASE_TOKEN] = first
    return whole + offset


def row_losses(whole: Tensor, kind: LossKind, temperature: float = 1.0) -> Tensor:
    """[S], losses of `kl` or `ce`; the losses of `tv` come from `HeadLoss.overlap`."""
    if kind == "ce":
        return whole[PEAK] + whole[TOTAL].log() - whole[CROSS] + whole[BASE_TOTAL]
    assert kind == "kl", kind

    # The mean of log p_t - log p_s under the teacher: CROSS has the part of the logits, the
    # logarithm that of the normalisers.
    divergence = whole[CROSS] / whole[BASE_TOTAL] + (whole[TOTAL] / whole[BASE_TOTAL]).log()
    # Gradients shrink with 1 / T^2 (Hinton et al. 2015, arXiv:1503.02531).
    return divergence * temperature**2


def matches(whole: Tensor) -> Tensor:
    """[S] bool, whether the student's best token is the teacher's; False if one of the two rows is
    invalid."""
    return (whole[TOKEN] == whole[BASE_TOKEN]) & is_finite(whole)


def is_finite(whole: Tensor) -> Tensor:
    """[S] bool, whether the logits of student and teacher are valid."""
    return whole.isfinite().all(0)


def draft_tokens(whole: Tensor) -> Tensor:
    """[S] int64, the student's best token."""
    return whole[TOKEN].long()


def base_tokens(whole: Tensor) -> Tensor:
    """[S] int64, the teacher's best token; -1 if the logits of student or teacher are invalid."""
    return whole[BASE_TOKEN].masked_fill(~is_finite(whole), -1).long()


def log_probs(whole: Tensor, logits: Tensor, base_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Turn the student's and the teacher's logits [S] of one token per row into log-probabilities,
    [S] each. `whole` must be statistics of `kl` at temperature 1."""
    own = logits - whole[PEAK] - whole[TOTAL].log()
    base = base_logits - whole[BASE_PEAK] - whole[BASE_TOTAL].log()
    return own, base
