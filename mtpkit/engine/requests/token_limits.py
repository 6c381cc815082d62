"""How much a request may ask of rules about single tokens, which have columns of fixed size on the
device."""

MOST_BIASED = 512
"""Most entries of `logit_bias`."""
MOST_END_TOKENS_OF_MIN = 32
"""Most end tokens of a request with `min_tokens`."""
MOST_BAD_WORDS = 64
"""Most sequences of tokens that `bad_words` may stand for; a word is one or two."""
MOST_TOKENS_OF_BAD_WORD = 16
"""Most tokens of such a sequence."""
