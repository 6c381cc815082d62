"""Sampling from logits, with random numbers that depend only on seed, position, stream and
branch."""

from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.sampling import reference

uniform = pick(reference.uniform)
apply_penalties = pick(reference.apply_penalties)
probabilities = pick(reference.probabilities)
sample = pick(reference.sample)
sample_logits = pick(reference.sample_logits)
