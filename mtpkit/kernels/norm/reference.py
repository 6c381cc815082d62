"""Root mean square norms (Zhang and Sennrich 2019, arXiv:1910.07467) over the last dimension."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.kernels.integer_rows import IntegerRows


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight for x [..., h] and weight [h], in the dtype of x.

    Args:
        zero_centered: multiply by 1 + weight instead, in fp32 (Megatron's
            `layernorm_zero_centered_gamma`).
    """
    if not zero_centered:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, group_size: int, eps: float) -> Tensor:
    """Normalise x * silu(z) over groups of `group_size` channels, as Mamba2 does before its output
    projection.

    Args:
        x, z: [..., h] of any strides; z may be a slice of a wider projection.
        weight: [h].

    Returns:
        [..., h] in the dtype of x, computed in fp32.
    """
    gated = (x.float() * F.silu(z.float())).unflatten(-1, (-1, group_size))
    return F.rms_norm(gated, (group_size,), eps=eps).flatten(-2).to(x.dtype) * weight


def norm_gate(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, zero_centered: bool = False
) -> Tensor:
    """Normalise each head of x, then multiply it by silu(z), as gated delta nets do before their
    output projection.

    Args:
        x, z: [..., heads * width] of any strides; z may be a slice of a wider projection.
        weight: [width], the same for all heads.
        zero_centered: as for `rms_norm`.

    Returns:
        [..., heads * width] in the dtype of x, computed in fp32.
    """
    factor = 1 + weight.float() if zero_centered else weight.float()
    heads = x.float().unflatten(-1, (-1, len(weight)))
    normed = F.rms_norm(heads, weight.shape, factor, eps).flatten(-2)
    return (normed * F.silu(z.float())).to(x.dtype)


def mtp_input(
    token_ids: Tensor,
    hidden: Tensor,
    embedding: Tensor | IntegerRows,
    enorm_weight: Tensor,
    hnorm_weight: Tensor,
    eps: float,
    zero_centered: bool = False,
    positions: Tensor | None = None,
) -> Tensor:
    """Concatenate enorm(embedding of the token) and hnorm(hidden), the input of an MTP depth's
    `eh_proj` (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    Args:
        token_ids: [T] int64, the token `depth` places after each position.
        hidden: [T, h] of any row stride, hidden states of the previous depth.
        embedding: [V, h], or a table of integers.
        enorm_weight, hnorm_weight: [h], weights of the two RMS norms.
        zero_centered: as for `rms_norm`.
        positions: [T] int64; zeros replace the embedding at position 0. None: no embedding is
            replaced.

    Returns:
        [T, 2h] in the dtype of `hidden`, embedding first.
    """
    if isinstance(embedding, IntegerRows):
        embedded = embedding.at(token_ids, hidden.dtype)
    else:
        embedded = F.embedding(token_ids, embedding)
    if positions is not None:
        embedded = embedded.masked_fill((positions == 0)[:, None], 0)
    embedded = rms_norm(embedded, enorm_weight, eps, zero_centered)
    return torch.cat([embedded, rms_norm(hidden, hnorm_weight, eps, zero_centered)], -1)
