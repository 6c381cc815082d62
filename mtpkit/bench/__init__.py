"""Measurements of the whole: speedup, decoding, serving, training; each has a module of its own."""
