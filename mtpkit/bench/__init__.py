"""Measurements of the whole: speed runs of decoding, prefill, training and kernels, each a module
of that name."""
