"""Log-probabilities of tokens, as requests ask for them and outputs hold them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

MOST_LOG_PROBS = 20
"""Most tokens per position whose log-probabilities a request may ask for."""


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token at a position. Names are vLLM's."""

    logprob: float
    rank: int
    """1: the most probable token."""
    decoded_token: str | None = None
    """Text of the token alone; None without a tokenizer."""


class TokenLogProbs(NamedTuple):
    """Log-probabilities at one position."""

    value: float
    """That of the token there."""
    rank: int
    """Rank of that token, from 1."""
    top_ids: list[int]
    """The `MOST_LOG_PROBS` most probable tokens, the best first; negative where there are fewer."""
    top_values: list[float]
    """Their log-probabilities."""

    def of_tokens(
        self, token_id: int, count: int, text: Callable[[int], str] | None
    ) -> dict[int, Logprob]:
        """The token itself first, then the `count` most probable ones.

        Args:
            text: returns the text of a token; None: there is no tokenizer.
        """

        def entry(token: int, value: float, rank: int) -> Logprob:
            return Logprob(value, rank, None if text is None else text(token))

        found = {token_id: entry(token_id, self.value, self.rank)}
        top = zip(self.top_ids[:count], self.top_values, strict=False)
        for rank, (token, value) in enumerate(top, 1):
            if token >= 0 and token not in found:
                found[token] = entry(token, value, rank)
        return found
