"""Several processes that decode with one model, each with a part of it."""

from mtpkit.engine.ranks.follow import Ranks, TensorRanks
from mtpkit.engine.ranks.join import join, of_first_rank, reports

__all__ = ["Ranks", "TensorRanks", "join", "of_first_rank", "reports"]
