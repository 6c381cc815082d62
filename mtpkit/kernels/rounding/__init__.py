"""Stochastic rounding of recurrent states to float16, with noise that depends only on layer,
request and position."""

from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.rounding import reference
from mtpkit.kernels.rounding.reference import Noise

narrow_units = pick(reference.narrow_units)

__all__ = ["Noise", "narrow_units"]
