"""Tables of integers against the numbers that they were made from."""

import pytest
import torch

from mtpkit.kernels.integer_rows import IntegerRows

WIDTHS = {8: (1, 17, 128, 500), 4: (2, 62, 128, 384, 500)}
SIZES = [(bits, columns) for bits, widths in WIDTHS.items() for columns in widths]


@pytest.mark.parametrize(("bits", "columns"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_the_nearest_multiples_of_their_scales(bits, columns, dtype):
    """More rows than are rounded at a time; of groups that differ a thousandfold."""
    table = torch.randn(4099, columns).to(dtype)
    table[:, columns // 2 :] *= 1e-3
    rows = IntegerRows.of(table, bits)
    assert (rows.bits, rows.columns) == (bits, columns)
    groups = rows.scales.shape[1]
    assert groups == ({384: 3, 500: 4}.get(columns, 1) if bits == 4 else 1)
    index = torch.tensor([[0, 4098], [1, 4097]])
    have = rows.at(index, torch.float32)
    want = table[index].float()
    largest = (
        table.float()
        .unflatten(1, (groups, -1))
        .abs()
        .amax(-1)[index]
        .repeat_interleave(columns // groups, -1)
    )
    assert ((have - want).abs() <= largest / (2**bits - 2) * 1.001 + 1e-9).all()
    assert rows.at(index, torch.bfloat16).equal(have.bfloat16())


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_zeros_and_of_numbers_that_are_none(bits):
    table = torch.zeros(4, 6)
    table[1, 2], table[2, 0], table[3] = (
        torch.nan,
        torch.inf,
        torch.tensor([7.0, -7.0, 1.0, 0.0, 3.0, -2.0]),
    )
    have = IntegerRows.of(table, bits).at(torch.arange(4), torch.float32)
    assert not have[0].any() and have[1, :4].isnan()[2] and have[2].isnan().any()
    assert bits == 8 or have[3].tolist() == [7.0, -7.0, 1.0, 0.0, 3.0, -2.0]


def test_two_numbers_to_a_byte():
    """Worked example: at scale 1 the numbers 3 and -7 are 11 and 1, that of the even column in the
    low half."""
    rows = IntegerRows.of(torch.tensor([[3.0, -7.0], [7.0, 2.0]]), 4)
    assert rows.values.tolist() == [[11 + 16 * 1], [15 + 16 * 10]]
    with pytest.raises(ValueError, match="3 columns are odd"):
        IntegerRows.of(torch.zeros(2, 3), 4)
