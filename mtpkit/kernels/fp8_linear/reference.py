"""Linears in fp8 (e4m3; Micikevicius et al. 2022, arXiv:2209.05433) with one scale per row."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x [..., n] to fp8, each row scaled so that its largest magnitude becomes 448.

    An entry x of a row with largest magnitude a is restored as x (1 + d) + e with |d| <= 1/16, |e| <= a / 448 / 1024.

    Returns:
        values [..., n] e4m3, and the scales that restore them, [..., 1] fp32; 1 for a row of zeros.
    """
    wide = x.float()
    scale = wide.abs().amax(dim=-1, keepdim=True) / FP8_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Multiply x by the transpose of an fp8 weight, with sums and scaling in fp32. No gradient.

    Args:
        x: [M, in], quantised here.
        weight, scale: [out, in] e4m3 and [out, 1] fp32, from `quantize_rows`.

    Returns:
        [M, out] in the dtype of x.
    """
    values, rows = quantize_rows(x)
    return (values.float() @ weight.float().t() * rows * scale.t()).to(x.dtype)
