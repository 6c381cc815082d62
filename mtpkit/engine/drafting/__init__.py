"""Proposing the tokens that the next step verifies: one file per kind of heads."""

from mtpkit.engine.drafting.factory import adaptive_depths, check_depths, default_depths, make_drafter
from mtpkit.engine.drafting.protocol import Drafter, NoDrafter

__all__ = ["Drafter", "NoDrafter", "adaptive_depths", "check_depths", "default_depths", "make_drafter"]
