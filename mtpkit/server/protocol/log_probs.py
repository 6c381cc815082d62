"""Log-probabilities of tokens, in the forms of completions and of chats."""

from mtpkit.server.protocol.base import Body


class CompletionLogProbs(Body):
    """One entry per token in each list."""

    text_offset: list[int]
    """Where the token begins in the texts of all tokens."""
    token_logprobs: list[float | None]
    """Null for the first token of a prompt."""
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]
    """The most probable tokens, and the token itself; null as above."""


class PromptLogProb(Body):
    """A token in the place of one of a prompt."""

    logprob: float
    rank: int
    """1: the most probable token of the place."""
    decoded_token: str | None


type PromptLogProbs = list[dict[int, PromptLogProb] | None]
"""For each token of a prompt, tokens by their ids: its own, and the most probable ones; null for
the first."""


class TokenLogProb(Body):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]
    """The token in UTF-8."""


class ChatLogProb(TokenLogProb):
    """A token of the answer."""

    top_logprobs: list[TokenLogProb]
    """The most probable tokens at its place."""


class ChatLogProbs(Body):
    """One entry per token of the answer, reasoning and calls included."""

    content: list[ChatLogProb]
