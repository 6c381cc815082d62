"""Acceptance of drafts: greedy, and exact rejection sampling."""

from mtpkit.kernels.acceptance import reference
from mtpkit.kernels.dispatch import pick

accept_matching = pick(reference.accept_matching)
accept_rejection = pick(reference.accept_rejection)
