"""Tables stored as 8-bit or 4-bit integers with scales, for lookups of single rows.

Numbers are rounded to the nearest multiple of a scale, symmetrically around zero (absmax
quantisation: Dettmers et al. 2022, arXiv:2208.07339). 8-bit tables have one scale per row, 4-bit
tables one per group of neighbouring columns.

Shape legend: V rows, h columns, G groups of h / G columns.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mtpkit.kernels.division import quotient

IntegerBits = Literal[8, 4]
_MOST_COLUMNS = 128
"""Most columns in a group of 4-bit numbers."""
_ROWS_AT_ONCE = 4096
"""Rows that are rounded at a time, which bounds the memory that rounding needs."""
OFFSET = 8
"""Added to 4-bit numbers, which are stored without a sign."""


class IntegerRows(NamedTuple):
    """A table of integers with scales."""

    values: Tensor
    """[V, h] int8; or [V, h / 2] uint8, each byte with two numbers plus `OFFSET`, the even column's
    in the low half."""
    scales: Tensor
    """[V, G] float32."""

    @property
    def bits(self) -> IntegerBits:
        """Bits per number."""
        return 8 if self.values.dtype == torch.int8 else 4

    @property
    def columns(self) -> int:
        """Number of columns, h."""
        return self.values.shape[1] * 8 // self.bits

    @classmethod
    def of(cls, table: Tensor, bits: IntegerBits) -> "IntegerRows":
        """Round a table [V, h]. NaN or an infinity makes its whole row NaN with 8 bits, its whole
        group with 4 bits.

        Raises:
            ValueError: `bits` is 4, and the number of columns is odd.
        """
        columns = table.shape[1]
        if bits == 4 and columns % 2:
            raise ValueError(f"{columns} columns are odd: 4-bit numbers are stored in pairs")
        groups = 1 if bits == 8 else columns // _group_columns(columns)
        parts = [_rounded(rows, bits, groups) for rows in table.split(_ROWS_AT_ONCE)]
        return cls(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def at(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Look up the rows at `index` [...]; return [..., h] in `dtype`."""
        values = self.values[index]
        scales = self.scales[index]
        if self.bits == 4:
            values = torch.stack([values & 15, values >> 4], -1).flatten(-2).to(torch.int8) - OFFSET
        grouped = values.float().unflatten(-1, (scales.shape[-1], -1))
        return (grouped * scales[..., None]).flatten(-2).to(dtype)


def _group_columns(columns: int) -> int:
    """Columns per group: the largest divisor of `columns` up to `_MOST_COLUMNS`."""
    return next(count for count in range(_MOST_COLUMNS, 0, -1) if columns % count == 0)


def _rounded(table: Tensor, bits: IntegerBits, groups: int) -> tuple[Tensor, Tensor]:
    """`IntegerRows.values` and `.scales` of some rows."""
    grouped = table.detach().float().unflatten(1, (groups, -1))
    largest = 2 ** (bits - 1) - 1
    scales = quotient(grouped.abs().amax(-1), largest)
    # A group of zeros has the scale 0. What is not finite has a scale that is not finite, which
    # makes the group NaN; NaN as an integer would be undefined.
    numbers = (grouped / scales.where(scales != 0, 1)[..., None]).nan_to_num(0).round()
    values = numbers.clamp(-largest, largest).flatten(1).to(torch.int8)
    if bits == 4:
        low, high = (values + OFFSET).to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
        values = low | high << 4
    return values, scales
