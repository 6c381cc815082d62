"""The best token: of logits, and of a head's hidden states."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.kernels import NO_TOKEN


def argmax(logits: Tensor) -> Tensor:
    """[M] int64, the first of the largest of logits [M, V]; `NO_TOKEN` in an invalid row: with NaN or +inf, or of
    nothing but -inf."""
    best, index = logits.max(-1)
    return torch.where(best.abs() < torch.inf, index, NO_TOKEN)


def linear_argmax(hidden: Tensor, weight: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """The best token of hidden @ weight.T, the smallest row of `weight` among equals.

    What is compared may be the fp32 sums rather than logits rounded to the model's dtype: two tokens whose logits round
    to one value are told apart, where `argmax` of the logits takes the smaller. That is well for drafts, which are
    guesses that verification checks; the base's own greedy choice is `argmax` of its rounded logits.

    Args:
        hidden: [M, h] of any row stride.
        weight: [V, h], the lm_head or some rows of it.
        token_ids: [V] int64, the token of each row of `weight`; None: the row's index.

    Returns:
        [M] int64; `NO_TOKEN` as `argmax` has it.
    """
    return to_token_ids(argmax(F.linear(hidden, weight)), token_ids)


def to_token_ids(best: Tensor, token_ids: Tensor | None) -> Tensor:
    """The tokens of `best` [M], rows of a weight or `NO_TOKEN`."""
    return best if token_ids is None else torch.where(best < 0, best, token_ids[best])
