from mtpkit.kernels.all_reduce import reference
from mtpkit.kernels.all_reduce.window import CHANNELS, MOST_RANKS, Windows
from mtpkit.kernels.dispatch import pick

sum_over_ranks = pick(reference.sum_over_ranks)

__all__ = ["CHANNELS", "MOST_RANKS", "Windows", "sum_over_ranks"]
