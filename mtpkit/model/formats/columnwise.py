"""int4 in groups as AWQ and GPTQ pack it: with zero points, and with columns before rows in
files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mtpkit.kernels.quantized import Matrix
from mtpkit.model.formats.base import Format, Part
from mtpkit.model.formats.int4 import PER_WORD, unpack_rows

_SCALES = (torch.float16, torch.bfloat16, torch.float32)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of its eight rows."""


@dataclass(frozen=True, kw_only=True)
class _Columnwise(Format):
    columns: int = 128
    """Columns that share a scale and a zero point."""

    bits: ClassVar[int] = 4
    transposed: ClassVar[bool] = True
    order: ClassVar[Sequence[int]]
    """Place in a word of zero points of each of its eight rows."""

    def parts(self) -> Mapping[str, Part]:
        return {
            "qweight": self._codes(),
            "scales": Part(_SCALES, 1, self.columns),
            "qzeros": Part((torch.int32,), PER_WORD, self.columns, scale=False),
        }

    def _codes(self) -> Part:
        raise NotImplementedError

    def _zeros(self, parts: Mapping[str, Tensor]) -> Tensor:
        return unpack_rows(parts["qzeros"], self.order)

    def _matrix(self, values: Tensor, zeros: Tensor, parts: Mapping[str, Tensor]) -> Matrix:
        scales = parts["scales"].contiguous()
        return Matrix("int4", values.contiguous(), scales, (1, self.columns), None, zeros)

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        raise AssertionError("only read")


@dataclass(frozen=True, kw_only=True)
class Gptq(_Columnwise):
    """`qweight` [K / 8, N] in files: code of column j in bits 4 (j mod 8) of word j // 8.

    An element is (code - zero point) * scale.
    """

    zero_offset: int = 1
    """What zero points are stored minus: 1, or 0 in `gptq_v2`."""

    name: ClassVar[str] = "gptq"
    order = tuple(range(PER_WORD))

    def _codes(self) -> Part:
        return Part((torch.int32,), 1, PER_WORD, scale=False)

    def matrix(self, parts: Mapping[str, Tensor]) -> Matrix:
        # As in `Int4`, bytes already hold neighbouring columns.
        values = parts["qweight"].contiguous().view(torch.uint8)
        return self._matrix(values, self._zeros(parts) + self.zero_offset, parts)


@dataclass(frozen=True, kw_only=True)
class Awq(_Columnwise):
    """`qweight` [K, N / 8] in files: eight neighbouring rows in one word, in the order of the
    kernel that it was made for (`gemm`).

    An element is (code - zero point) * scale.
    """

    name: ClassVar[str] = "awq"
    order = _AWQ_ORDER

    def _codes(self) -> Part:
        return Part((torch.int32,), PER_WORD, 1, scale=False)

    def matrix(self, parts: Mapping[str, Tensor]) -> Matrix:
        codes = unpack_rows(parts["qweight"], self.order)
        values = codes[:, ::2] | codes[:, 1::2] << 4
        return self._matrix(values, self._zeros(parts), parts)
