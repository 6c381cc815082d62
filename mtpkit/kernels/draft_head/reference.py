"""Best tokens by logits, or by the hidden states of a draft head."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.kernels import NO_TOKEN


def argmax(logits: Tensor) -> Tensor:
    """[M] int64, the first token with the largest of logits [M, V]. An invalid row, which has NaN
    or +inf or only -inf, gets `NO_TOKEN`."""
    best, index = logits.max(-1)
    return torch.where(best.abs() < torch.inf, index, NO_TOKEN)


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of logits [M, V] and its token, for one part of a vocabulary.

    Returns:
        [M] float32, +inf in a row with NaN or +inf; and [M] int64, the result of `argmax`.
    """
    top = logits.amax(-1).float()
    return torch.where(top.isnan(), torch.inf, top), argmax(logits)


def linear_best(
    hidden: Tensor, weight: Tensor, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The largest of hidden @ weight.T and the token of `linear_argmax`, in the form of `best`: [M]
    float32 and [M] int64. A `weight` without rows gives -inf and `NO_TOKEN`."""
    if not len(weight):
        values = torch.full((len(hidden),), -torch.inf, device=hidden.device)
        return values, torch.full_like(values, NO_TOKEN, dtype=torch.int64)
    values, tokens = best(F.linear(hidden, weight))
    return values, to_token_ids(tokens, token_ids)


def linear_argmax(hidden: Tensor, weight: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """The token with the largest of hidden @ weight.T; among equals, the token of the first row of
    `weight`.

    The Triton twin may compare fp32 sums instead of logits rounded to the model's dtype. It then
    tells apart two tokens whose rounded logits are equal, where `argmax` takes the first one.
    Drafts may differ in this way, since they are verified; the base model's own greedy choice is
    always `argmax` of its rounded logits.

    Args:
        hidden: [M, h] of any row stride.
        weight: [V, h], the lm_head or some rows of it.
        token_ids: [V] int64, the token of each row of `weight`; None: the row's index.

    Returns:
        [M] int64; `NO_TOKEN` in the rows where `argmax` of the logits gives `NO_TOKEN`.
    """
    return to_token_ids(argmax(F.linear(hidden, weight)), token_ids)


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` tokens with the largest of logits [M, V], the best first; among equals, the
    smaller token first.

    Returns:
        [M, count] int64 tokens and [M, count] float32 log-probabilities; `NO_TOKEN` and NaN in an
        invalid row, see `argmax`, and for logits of -inf.
    """
    values, tokens = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    values = values[:, :count]
    tokens = tokens[:, :count]
    total = logits.float().logsumexp(-1, keepdim=True)
    valid = (argmax(logits) != NO_TOKEN)[:, None] & (values > -torch.inf)
    return torch.where(valid, tokens, NO_TOKEN), torch.where(valid, values - total, torch.nan)


def to_token_ids(best: Tensor, token_ids: Tensor | None) -> Tensor:
    """Map `best` [M], which holds row indices of a weight or `NO_TOKEN`, to token ids."""
    return best if token_ids is None else torch.where(best < 0, best, token_ids[best])
