"""int4 in groups along a row, packed by compressed-tensors (`pack-quantized`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mtpkit.kernels.division import quotient
from mtpkit.kernels.quantized import Matrix
from mtpkit.kernels.quantized.reference import INT4_ZERO
from mtpkit.model.formats.base import Format, Part

PER_WORD = 8
"""Codes in an int32."""


@dataclass(frozen=True, kw_only=True)
class Int4(Format):
    """`weight_packed`: code of column j in bits 4 (j mod 8) of word j // 8, stored plus 8.

    With zero points an element is (code - zero point) * scale; they are packed along the rows.
    """

    columns: int = 128
    """Columns that share a scale."""
    asymmetric: bool = False
    """Whether there are zero points."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4

    def parts(self) -> Mapping[str, Part]:
        parts = {
            "weight_packed": Part((torch.int32,), 1, PER_WORD, scale=False),
            "weight_scale": Part((torch.bfloat16, torch.float16, torch.float32), 1, self.columns),
        }
        if self.asymmetric:
            parts["weight_zero_point"] = Part((torch.int32,), PER_WORD, self.columns, scale=False)
        return parts

    def matrix(self, parts: Mapping[str, Tensor]) -> Matrix:
        # Words are little-endian on every machine that runs this, so that their bytes already hold
        # neighbouring columns, the even one in the lower half.
        values = parts["weight_packed"].contiguous().view(torch.uint8)
        zeros = None
        if self.asymmetric:
            zeros = unpack_rows(parts["weight_zero_point"])[: len(values)].contiguous()
        scales = parts["weight_scale"]
        return Matrix("int4", values, scales, (1, self.columns), None, zeros)

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """As in `Format`, without zero points: a group reaches 7 or -8 steps."""
        assert not self.asymmetric, "written without zero points"
        groups = weight.float().unflatten(1, (-1, self.columns))
        low = groups.amin(-1)
        high = groups.amax(-1)
        scales = torch.maximum(quotient(high, 7), quotient(low, -8)).to(torch.bfloat16).float()
        scales = torch.where(scales > 0, scales, torch.ones_like(scales))
        codes = (groups / scales[..., None]).round().clamp(-8, 7).flatten(1)
        nibbles = (codes + INT4_ZERO).to(torch.uint8)
        values = nibbles[:, ::2] | nibbles[:, 1::2] << 4
        return {
            "weight_packed": values.contiguous().view(torch.int32),
            "weight_scale": scales.to(torch.bfloat16),
        }


def unpack_rows(words: Tensor, places: Sequence[int] = range(PER_WORD)) -> Tensor:
    """Codes [8 n, m] uint8 of words [n, m] that hold eight rows each.

    Args:
        places: place in the word of each row.
    """
    shifts = 4 * torch.tensor(places, device=words.device)
    codes = words[:, None] >> shifts[None, :, None] & 15
    return codes.flatten(0, 1).to(torch.uint8)
