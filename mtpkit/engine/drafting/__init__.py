"""Drafters, which propose the tokens that the next step verifies: one file per kind of heads.

How many drafts a step has is chosen in `scheduling/adaptive.py`.
"""

from mtpkit.engine.drafting.factory import check_depths, make_drafter
from mtpkit.engine.drafting.protocol import Drafter, NoDrafter

__all__ = ["Drafter", "NoDrafter", "check_depths", "make_drafter"]
