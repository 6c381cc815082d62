"""fp8 e4m3 with a scale per block, per row or per matrix: published checkpoints of DeepSeek and
Qwen, ModelOpt, compressed-tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.kernels.linear import FP8, FP8_MAX
from mtpkit.kernels.linear.reference import scale_of
from mtpkit.kernels.quantized import NOT_QUANTIZED, Inputs, Matrix
from mtpkit.model.formats.base import INPUT_SCALE, Format, Part

_SCALES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 128
"""Rows and columns of a block in all published checkpoints."""
_BY_BLOCK = Inputs("group", BLOCK)


@dataclass(frozen=True, kw_only=True)
class Fp8(Format):
    """e4m3 `weight`, whose scales are in `scale`: an element is its code times the scale, despite
    the name `weight_scale_inv`."""

    rows: int | None = BLOCK
    """Rows that share a scale; None: all."""
    columns: int | None = BLOCK
    """Columns that share a scale; None: all."""
    scale: str = "weight_scale_inv"
    """Name of the scales: DeepSeek's, or `weight_scale` of ModelOpt and compressed-tensors."""
    inputs: Inputs = _BY_BLOCK

    name: ClassVar[str] = "fp8"
    bits: ClassVar[int] = 8

    def parts(self) -> Mapping[str, Part]:
        parts = {
            "weight": Part((FP8,), scale=False),
            self.scale: Part(_SCALES, self.rows, self.columns),
        }
        if self.inputs.rule == "static":
            parts[INPUT_SCALE] = Part(_SCALES, None, None, of_inputs=True)
        return parts

    def matrix(self, parts: Mapping[str, Tensor]) -> Matrix:
        values = parts["weight"]
        scales = parts[self.scale]
        rows, columns = self.rows, self.columns
        if rows is None:
            rows = 1 if len(scales) == len(values) else len(values)
        return Matrix("e4m3", values, scales, (rows, columns or values.shape[1]))

    def by_row(self) -> "Fp8":
        return self if self.rows is None else replace(self, rows=1)

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """As in `Format`, with the largest magnitude of a group at 448 (a group of zeros has scale
        1). A scale of inputs is not among the parts, since it follows from data."""
        outputs, width = weight.shape
        rows = self.rows or outputs
        columns = self.columns or width
        padded = F.pad(weight.float(), (0, -width % columns, 0, -outputs % rows))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scales = scale_of(blocks.abs().amax((1, 3)))
        codes = (blocks / scales[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
        codes = codes.flatten(2).flatten(0, 1)[:outputs, :width]
        return {"weight": codes.to(FP8).contiguous(), self.scale: scales}


ONLINE = Fp8(inputs=Inputs("token"), rows=1, columns=None, scale="weight_scale")
"""Format of bf16 checkpoints that are quantised when they are loaded: a scale per row, and inputs
with a scale per token."""
WEIGHTS_ALONE = replace(ONLINE, inputs=NOT_QUANTIZED)
"""Format of the lm_head's copy for drafts: a scale per row, and inputs as they are."""
