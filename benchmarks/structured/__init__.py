"""Speedup of drafts with and without structured outputs."""
