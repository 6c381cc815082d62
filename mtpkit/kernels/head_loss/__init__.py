"""Losses of draft heads from a chunk of logits, and the gradient with respect to the logits, in place."""

from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.head_loss import reference
from mtpkit.kernels.head_loss.slices import (
    LossKind,
    draft_tokens,
    fold,
    is_finite,
    log_probs,
    matches,
    number_tokens,
    row_losses,
)

HeadLoss = pick(reference.HeadLoss)

__all__ = [
    "HeadLoss",
    "LossKind",
    "draft_tokens",
    "fold",
    "is_finite",
    "log_probs",
    "matches",
    "number_tokens",
    "row_losses",
]
