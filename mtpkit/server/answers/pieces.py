"""What answers consist of."""

from typing import NamedTuple


class Reasoning(NamedTuple):
    """Text that the model thinks before it answers."""

    text: str


class Content(NamedTuple):
    """Text of the answer."""

    text: str


class Call(NamedTuple):
    """A tool that the model calls."""

    name: str
    arguments: str
    """JSON of an object."""


type Piece = Reasoning | Content | Call


def held_back(text: str, marker: str) -> int:
    """Number of characters at the end of a text with which a marker may begin.

    >>> held_back("1 <thi", "<think>")
    4
    """
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
