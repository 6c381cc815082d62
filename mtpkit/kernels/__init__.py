"""Operations, a folder for each: `reference.py` in plain PyTorch, `triton.py` its Triton twin, and what callers use."""

NO_TOKEN = -1
"""Stands for the token of an invalid row of logits: one with NaN or +inf, or with -inf alone."""
MOST_TREE_TOKENS = 63
"""Most tokens of a tree: masks of them are int64, whose sign bit stays clear."""
