"""Linear layers with the ops around them (norm, activation, residual), and rows in fp8."""

from types import ModuleType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.kernels.activation import reference as activations
from mtpkit.kernels.division import quotient
from mtpkit.kernels.norm import reference as norms

FP8 = torch.float8_e4m3fn
"""e4m3 (Micikevicius et al. 2022, arXiv:2209.05433); tensors in it have one scale per row."""
FP8_MAX = torch.finfo(FP8).max


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-5,
    zero_centered: bool = False,
    group_size: int | None = None,
    gate: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Literal["relu2"] | None = None,
    residual: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Compute activation(norm(x) @ weight.T + bias) + residual.

    Args:
        x: [M, K], rows of any stride.
        weight: [N, K].
        norm_weight: [K], weight of the RMS norm of x; None: no norm.
        zero_centered: the norm multiplies by 1 + norm_weight; not for the gated norm.
        group_size, gate: arguments of Mamba2's gated norm, which normalises x * silu(gate) in
            groups of `group_size` channels. gate [M, K] may be a slice of a wider projection.
        bias: [N]; must be None if there is a residual.
        activation: `relu2` is max(y, 0)^2.
        residual: [M, N]; the result may overwrite it.
        early: let the kernel for several rows start before the previous kernel has ended, and
            prefetch its weight into the L2 cache meanwhile. Results are the same. This pays off
            after an exchange with other GPUs. The kernel for one row always starts early where the
            GPU supports it.

    Returns:
        [M, N] in the dtype of x. The reference rounds after every op, but if a residual directly
        follows the product, it adds the residual before it rounds.
    """
    return compose(
        norms,
        activations,
        x,
        weight,
        norm_weight,
        eps,
        zero_centered,
        group_size,
        gate,
        bias,
        activation,
        residual,
    )


def compose(
    norms: ModuleType,
    activations: ModuleType,
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    zero_centered: bool,
    group_size: int | None,
    gate: Tensor | None,
    bias: Tensor | None,
    activation: Literal["relu2"] | None,
    residual: Tensor | None,
) -> Tensor:
    """Compute `linear` as separate ops, with the norms and activations of the two given modules."""
    assert (gate is None) == (group_size is None), "a gated norm needs both gate and group_size"
    assert gate is None or not zero_centered, "a gated norm multiplies by its weight"
    assert bias is None or residual is None
    if gate is not None:
        x = norms.gated_rms_norm(x, gate, norm_weight, group_size, eps)
    elif norm_weight is not None:
        x = norms.rms_norm(x, norm_weight, eps, zero_centered)
    if activation is None:
        return F.linear(x, weight, bias) if residual is None else residual.addmm_(x, weight.t())
    y = activations.relu2(F.linear(x, weight, bias))
    return y if residual is None else y + residual


def scale_of(largest: Tensor) -> Tensor:
    """Scales of numbers with these largest magnitudes, fp32, which become 448 in fp8; 1 for
    zeros."""
    scales = quotient(largest, FP8_MAX)
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x [..., n] to fp8, each row scaled so that its largest magnitude becomes 448.

    An entry x of a row with largest magnitude a is restored as x (1 + d) + e with |d| <= 1/16 and
    |e| <= a / 448 / 1024.

    Returns:
        values [..., n] e4m3, and the scales that restore them, [..., 1] fp32; 1 for a row of zeros.
    """
    wide = x.float()
    scale = scale_of(wide.abs().amax(dim=-1, keepdim=True))
    return (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale
