"""Acceptance of drafts: greedy, and exact rejection sampling."""

from mtpkit.kernels.acceptance import reference
from mtpkit.kernels.acceptance.drawn_tree import Whole, accept_drawn_tree, without
from mtpkit.kernels.dispatch import pick

accept_matching = pick(reference.accept_matching)
accept_rejection = pick(reference.accept_rejection)
accept_tree = pick(reference.accept_tree)

__all__ = [
    "Whole",
    "accept_drawn_tree",
    "accept_matching",
    "accept_rejection",
    "accept_tree",
    "without",
]
