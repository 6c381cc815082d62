"""Sampling from logits, with randomness that depends on seed and position alone."""

from mtpkit.kernels.sampling.reference import apply_penalties, philox, probabilities, sample, uniform

__all__ = ["apply_penalties", "philox", "probabilities", "sample", "uniform"]
