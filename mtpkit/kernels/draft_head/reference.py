"""The best token: of logits, and of a head's hidden states."""

import torch.nn.functional as F
from torch import Tensor


def argmax(logits: Tensor) -> Tensor:
    """[M] int64, the first of the largest of logits [M, V]; in a row with NaN, any index below V."""
    return logits.argmax(-1)


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
        [M] int64. A row of `hidden` with NaN has some token of the vocabulary.
    """
    best = argmax(F.linear(hidden, weight))
    return best if token_ids is None else token_ids[best]
