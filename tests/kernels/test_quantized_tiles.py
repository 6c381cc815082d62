"""Tiles of quantised products of a few rows."""

import importlib

import pytest

from mtpkit.kernels.device import Tile
from mtpkit.kernels.quantized.tiles import Choice, divided, most_even
from tests.kernels.quantized import RULES, draw_matrix

NARROW = Choice(Tile(64, 128, 4, 4), 5)
WIDE = Choice(Tile(64, 256, 3, 4), 3)
SERVED = [("row", "token"), ("block", "group"), ("int4", "none"), ("nvfp4", "none")]
SIZES = [(21504, 4096), (4096, 21504), (4096, 8192), (10304, 2688), (2688, 4096), (3712, 2688)]


@pytest.mark.parametrize(
    ("width", "step", "most", "splits"),
    [
        (4096, 256, 1, 1),
        (4096, 256, 5, 4),  # parts of 4 steps, as 5 would have
        (4096, 256, 6, 6),
        (4096, 256, 99, 8),
        (1024, 256, 99, 2),  # 512 columns each
        (400, 128, 3, 1),
    ],
)
def test_every_part_has_columns(width: int, step: int, most: int, splits: int) -> None:
    assert divided(width, step, most) == splits


@pytest.mark.parametrize(
    ("outputs", "width", "nbytes", "want"),
    [
        # 384 of the 396 programs that there is room for
        (4096, 21504, 2**26, WIDE.tile._replace(splits=6)),
        # 290 of 660, beside which the next launch finds room
        (18560, 4096, 2**24, NARROW.tile),
        # a large matrix fills the room instead
        (18560, 4096, 2**26, NARROW.tile._replace(splits=2)),
    ],
)
def test_a_launch_takes_the_room_there_is_or_half_of_it(
    outputs: int, width: int, nbytes: int, want: Tile
) -> None:
    found = most_even(
        (WIDE, NARROW), lambda tile: -(-outputs // tile.block_n), width, nbytes, most=8
    )
    assert found == want


def test_splits_may_be_few() -> None:
    found = most_even((WIDE,), lambda tile: 64, 21504, 2**26, most=2)
    assert found.splits == 2


@pytest.mark.parametrize(("name", "rule"), SERVED)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matrices_of_real_models_are_shared_nearly_evenly(name: str, rule: str, size) -> None:
    """All but a few of the programs that a GPU has room for, or that it has room for twice."""
    linear = importlib.import_module("mtpkit.kernels.quantized.linear")
    outputs, width = size
    matrix = draw_matrix(name, outputs, width, device="meta")
    tile = linear.choose_tile(matrix, RULES[rule], 4, wide=False)
    programs = -(-outputs // tile.block_n) * tile.splits
    choices = linear.TILES[linear.kind_of(matrix, RULES[rule])][16]
    rooms = [
        132 * choice.resident
        for choice in choices
        if choice.tile._replace(splits=tile.splits, block_k=tile.block_k) == tile
    ]
    assert any(0.3 <= programs / room <= 0.5 or 0.8 <= programs / room <= 1 for room in rooms)
