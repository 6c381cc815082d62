"""Operations, one folder each: `reference.py` in plain PyTorch, its Triton twin, and `__init__.py`,
which picks one."""

NO_TOKEN = -1
"""Placeholder for the token of an invalid row of logits: a row with NaN or +inf, or with nothing
but -inf."""
MOST_TREE_TOKENS = 63
"""Most tokens in a tree: each token is one bit of an int64 mask, whose sign bit stays clear."""
