"""Acceptance of drafts: greedy, and exact rejection sampling."""

from mtpkit.kernels.acceptance.reference import accept_matching, accept_rejection

__all__ = ["accept_matching", "accept_rejection"]
