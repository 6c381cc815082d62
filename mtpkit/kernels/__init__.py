"""Operations with a plain-PyTorch reference; each folder is one operation and exports the functions callers use."""

NO_TOKEN = -1
"""In place of a token where a row of logits is invalid: it has NaN or +inf, or nothing but -inf."""
