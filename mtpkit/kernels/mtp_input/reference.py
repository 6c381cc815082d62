"""Input of an MTP depth's `eh_proj`."""

import torch
import torch.nn.functional as F
from torch import Tensor


def mtp_input(
    token_ids: Tensor, hidden: Tensor, embedding: Tensor, enorm_weight: Tensor, hnorm_weight: Tensor, eps: float
) -> Tensor:
    """Concatenate enorm(embedding of the token) and hnorm(hidden) (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    Args:
        token_ids: [T] int64, the token `depth` places after each position.
        hidden: [T, h] of any row stride, hidden states of the depth before.
        embedding: [V, h].
        enorm_weight, hnorm_weight: [h], weights of the two RMS norms.

    Returns:
        [T, 2h] in the dtype of `hidden`, embedding first.
    """
    embedded = F.rms_norm(F.embedding(token_ids, embedding), enorm_weight.shape, enorm_weight, eps)
    return torch.cat([embedded, F.rms_norm(hidden, hnorm_weight.shape, hnorm_weight, eps)], -1)
