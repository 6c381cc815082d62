"""Shapes of draft trees: static trees, and dynamic trees that grow by the heads' probabilities.

Token 0 of a tree is the newest token of a request; all other tokens are drafts, in order of depth.
Siblings are in the order of the heads' probabilities, or in the order in which they were drawn.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mtpkit.kernels import MOST_TREE_TOKENS


@dataclass(frozen=True)
class TokenTree:
    """A static tree, the same in every step."""

    parents: tuple[int, ...]
    """The index of each token's parent, -1 for token 0; tokens are in order of depth, siblings
    together."""

    @cached_property
    def depths(self) -> list[int]:
        """Depth of each token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    @property
    def tokens(self) -> int:
        """Tokens of a decode row, token 0 among them."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """K, the drafts on the longest path."""
        return self.depths[-1]

    def children(self, token: int) -> list[int]:
        """The drafts that follow a token."""
        return [child for child, parent in enumerate(self.parents) if parent == token]

    @cached_property
    def expanded(self) -> list[int]:
        """The tokens that have children."""
        return sorted({parent for parent in self.parents if parent >= 0})

    @property
    def most_children(self) -> int:
        """Largest number of children of any token."""
        return max(len(self.children(token)) for token in self.expanded)

    @property
    def entries(self) -> int:
        """Number of drafts that the heads are run on: those with children."""
        return len(self.expanded) - 1

    @property
    def spine(self) -> int:
        """Number of drafts on the path of first children."""
        token = 0
        length = 0
        while families := self.children(token):
            token = families[0]
            length += 1
        return length

    @property
    def is_chain(self) -> bool:
        """Whether every token but the last has exactly one child."""
        return self.parents == tuple(range(-1, self.tokens - 1))


@dataclass(frozen=True)
class DynamicTree:
    """A tree that keeps the drafts with the highest probabilities of their whole paths, as EAGLE-2
    does (Li et al. 2024, arXiv:2406.16858): at each depth the `topk` best drafts get `topk`
    children each."""

    depth: int
    """K, the most drafts on a path."""
    topk: int
    """Drafts that get children at each depth, and children that each of them gets."""
    tokens: int
    """Tokens of a decode row, token 0 among them."""

    @property
    def most_children(self) -> int:
        """Largest number of children of any token."""
        return self.topk

    @property
    def candidates(self) -> int:
        """Number of drafts that are made, of which the tree keeps the best."""
        return self.topk + (self.depth - 1) * self.topk**2

    @property
    def entries(self) -> int:
        """Number of drafts that the heads are run on."""
        return (self.depth - 1) * self.topk


Tree = TokenTree | DynamicTree
DraftShape = int | Tree
"""The drafts of a decode row: K of a chain, or a tree."""


def depth_of(drafts: DraftShape) -> int:
    """K, the drafts on the longest path."""
    return drafts if isinstance(drafts, int) else drafts.depth


def width_of(drafts: DraftShape) -> int:
    """Tokens of a decode row with these drafts, including the request's newest token."""
    return 1 + drafts if isinstance(drafts, int) else drafts.tokens


def parse_tree(given: object) -> TokenTree:
    """Make the tree that a user describes.

    Args:
        given: the number of children per token at each depth, such as [3, 2, 1]; or paths, each a
            list of ranks among siblings, such as [[0], [1], [0, 0]]; or either of these as text.

    Raises:
        ValueError: `given` is none of these, a path lacks its parent or an earlier sibling, or the
            tree is too large.
    """
    if isinstance(given, str):
        try:
            given = ast.literal_eval(given)
        except (ValueError, SyntaxError):
            raise ValueError("must be a list of numbers of children, or of paths") from None
    if not isinstance(given, list | tuple) or not given:
        raise ValueError(
            "must be a list of numbers of children, or of paths, with at least one entry"
        )
    are_counts = all(_is_whole(one, 1) for one in given)
    paths = _paths_of(given) if are_counts else _checked_paths(given)
    if len(paths) > MOST_TREE_TOKENS - 1:
        raise ValueError(f"has more than {MOST_TREE_TOKENS - 1} drafts")

    # By depth, then by path, so that siblings are together, as `TokenTree.parents` needs it.
    ordered = sorted(paths, key=lambda path: (len(path), path))
    places = {(): 0} | {path: place for place, path in enumerate(ordered, 1)}
    return TokenTree((-1, *(places[path[:-1]] for path in ordered)))


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _paths_of(children: Sequence[int]) -> set[tuple[int, ...]]:
    paths: set[tuple[int, ...]] = set()
    level: list[tuple[int, ...]] = [()]
    for count in children:
        # Refused before the level is made: a user's [999, 999, 999] would fill the memory.
        if len(level) * count > MOST_TREE_TOKENS:
            raise ValueError(f"has more than {MOST_TREE_TOKENS - 1} drafts")
        level = [(*path, rank) for path in level for rank in range(count)]
        paths.update(level)
    return paths


def _checked_paths(given: Sequence[object]) -> set[tuple[int, ...]]:
    paths: set[tuple[int, ...]] = set()
    for one in given:
        if (
            not isinstance(one, list | tuple)
            or not one
            or not all(_is_whole(rank, 0) for rank in one)
        ):
            raise ValueError(
                "must hold numbers of children from 1 on, or paths of ranks from 0 on, and not both"
            )
        paths.add(tuple(one))
    for path in sorted(paths):
        needed = [path[:-1]]
        if path[-1] > 0:
            needed.append((*path[:-1], path[-1] - 1))
        if missing := [one for one in needed if one and one not in paths]:
            raise ValueError(f"has the path {list(path)} but not {list(missing[0])}")
    return paths
