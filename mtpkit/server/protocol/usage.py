"""Counts of tokens, and how streams report them."""

from mtpkit.server.protocol.base import Body


class PromptTokens(Body):
    """Where the tokens of prompts came from."""

    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""


class Usage(Body):
    """Tokens of all prompts and outputs of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokens


class StreamOptions(Body):
    """How a stream reports its usage."""

    include_usage: bool | None = None
    """Send the usage in a last chunk without choices."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far in every chunk."""
