"""Decoding with one model that is split over several processes."""

from mtpkit.engine.ranks.follow import Ranks, SplitRanks
from mtpkit.engine.ranks.join import join, reports, run_on_first_rank
from mtpkit.engine.ranks.stages import Stage

__all__ = ["Ranks", "SplitRanks", "Stage", "join", "reports", "run_on_first_rank"]
