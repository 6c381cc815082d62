"""NVFP4: fp4 e2m1 in groups of 16 with e4m3 scales and one fp32 scale per matrix (NVIDIA), as
ModelOpt and compressed-tensors write it. Inputs stay as they are, also where a file has scales for
them: no GPU that runs mtpkit multiplies fp4."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mtpkit.kernels.division import quotient
from mtpkit.kernels.linear import FP8, FP8_MAX
from mtpkit.kernels.quantized import Matrix
from mtpkit.kernels.quantized.reference import E2M1
from mtpkit.model.formats.base import Format, Part

GROUP = 16
"""Columns that share a scale."""


@dataclass(frozen=True, kw_only=True)
class Nvfp4(Format):
    """Codes of columns 2j and 2j + 1 in the lower and upper half of byte j. An element is its code
    times the scale of its group times that of the matrix."""

    packed: str = "weight"
    """Name of the codes: ModelOpt's, or `weight_packed` of compressed-tensors."""
    whole: str = "weight_scale_2"
    """Name of the scale of the matrix: ModelOpt's, or `weight_global_scale` of compressed-tensors,
    which is the reciprocal."""
    input_scale: str = ""
    """Name of the scale of inputs, which is kept for export and not used; empty: there is none."""

    name: ClassVar[str] = "nvfp4"
    bits: ClassVar[int] = 4

    def parts(self) -> Mapping[str, Part]:
        parts = {
            self.packed: Part((torch.uint8,), 1, 2, scale=False),
            "weight_scale": Part((FP8,), 1, GROUP),
            self.whole: Part((torch.float32,), None, None),
        }
        if self.input_scale:
            parts[self.input_scale] = Part((torch.float32,), None, None, of_inputs=True)
        return parts

    def matrix(self, parts: Mapping[str, Tensor]) -> Matrix:
        values = parts[self.packed]
        whole = parts[self.whole].flatten()
        if self.whole == "weight_global_scale":
            whole = 1 / whole
        rows = whole.expand(len(values)).contiguous()
        return Matrix("e2m1", values, parts["weight_scale"], (1, GROUP), rows)

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """As in `Format`, by ModelOpt's rule: the matrix's scale takes the largest scale of a group
        to 448."""
        wide = weight.float()
        groups = wide.unflatten(1, (-1, GROUP))
        largest = groups.abs().amax(-1)
        whole = quotient(largest.amax(), E2M1[-1] * FP8_MAX)
        whole = torch.where(whole > 0, whole, torch.ones_like(whole))
        scales = (largest / (E2M1[-1] * whole)).clamp(max=FP8_MAX).to(FP8)
        # A group of tiny values would have scale 0 in e4m3.
        scales = torch.where(scales.float() > 0, scales.float(), torch.ones_like(largest)).to(FP8)
        scaled = groups / (scales.float() * whole)[..., None]
        nibbles = _nearest(scaled).flatten(1)
        if self.whole == "weight_global_scale":
            whole = 1 / whole
        return {
            self.packed: (nibbles[:, ::2] | nibbles[:, 1::2] << 4).contiguous(),
            "weight_scale": scales,
            self.whole: whole.reshape(1, 1),
        }


def _nearest(x: Tensor) -> Tensor:
    """Codes uint8 of the nearest fp4 numbers; of two, the one with the even code."""
    magnitudes = torch.tensor(E2M1, device=x.device)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    low = torch.bucketize(x.abs(), middles)
    high = torch.bucketize(x.abs(), middles, right=True)
    codes = torch.where(low % 2 == 0, low, high)
    return (codes + 8 * (x < 0)).to(torch.uint8)
