from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.exchange import reference
from mtpkit.kernels.exchange.window import CHANNELS, MOST_RANKS, Windows

best_of_ranks = pick(reference.best_of_ranks)
gather_ranks = pick(reference.gather_ranks)
sum_over_ranks = pick(reference.sum_over_ranks)

__all__ = ["CHANNELS", "MOST_RANKS", "Windows", "best_of_ranks", "gather_ranks", "sum_over_ranks"]
