"""Operations with a plain-PyTorch reference; each folder is one operation and exports the functions callers use."""

NO_TOKEN = -1
"""In place of a token where logits are not to be believed: NaN or +inf among them, or nothing but -inf."""
