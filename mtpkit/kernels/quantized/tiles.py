"""Tiles of products of a few rows, which multiprocessors share evenly."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import triton

from mtpkit.kernels.device import Tile, evenness, multiprocessors

_MOST_SPLITS = 8
_LEAST_COLUMNS = 512
"""Fewest columns that a program of a split keeps; with fewer, there is little to overlap."""
_SMALL = 2**25
"""Bytes of weights from which on a launch that fills the GPU alone is better than launches that
overlap, each as even."""
_LESS = 0.95
"""Factor of the evenness of the worse of the two."""


class Choice(NamedTuple):
    """A tile, before `splits` is chosen, and how many of its programs share a multiprocessor."""

    tile: Tile
    resident: int

    def of_step(self, step: int) -> "Choice":
        """The choice with `step` columns per step."""
        return self._replace(tile=self.tile._replace(block_k=step))


def divided(width: int, step: int, most: int) -> int:
    """Number of programs, at most `most`, that share the columns of a tile: as many as have work
    when each takes as many whole steps as the first."""
    steps = triton.cdiv(width, step)
    least = triton.cdiv(_LEAST_COLUMNS, step)
    splits = max(1, min(_MOST_SPLITS, most, steps // least))
    return triton.cdiv(steps, triton.cdiv(steps, splits))


def most_even(
    choices: Iterable[Choice], tiles_of: Callable[[Tile], int], width: int, nbytes: int, most: int
) -> Tile:
    """Choose a tile and its splits by `evenness`: either as many programs as a GPU has room for, or
    half as many, so that the next launch finds as much room.

    Args:
        tiles_of: number of programs without splits.
        nbytes: bytes of weights that the launch reads.
        most: most splits.
    """
    options = []
    for tile, resident in choices:
        room = resident * multiprocessors()
        tiles = tiles_of(tile)
        for programs in (room, room // 2):
            splits = divided(width, tile.block_k, min(most, programs // tiles))
            options.append(Choice(tile._replace(splits=splits), resident))

    def worth(option: Choice) -> float:
        programs = tiles_of(option.tile) * option.tile.splits
        overlaps = 2 * programs <= option.resident * multiprocessors()
        share = evenness(programs, option.resident)
        return share if overlaps == (nbytes < _SMALL) else _LESS * share

    return max(options, key=worth).tile
