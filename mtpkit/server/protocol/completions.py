"""Bodies of /v1/completions."""

from typing import Any, Literal

from mtpkit.server.protocol.base import Body
from mtpkit.server.protocol.log_probs import CompletionLogProbs, PromptLogProbs
from mtpkit.server.protocol.sampling import DecodingRequest
from mtpkit.server.protocol.usage import Usage


class CompletionRequest(DecodingRequest):
    """Prompts to continue."""

    prompt: str | list[str] | list[int] | list[list[int]]
    """A text or token ids, or a list of them."""
    echo: bool | None = None
    """Begin each choice with its prompt. With `max_tokens` 0, the prompt is all of it."""
    logprobs: int | None = None
    """Number of most probable tokens whose log-probabilities are sent for each token."""

    @property
    def prompt_only(self) -> bool:
        """Whether choices have the prompt and nothing else."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt."""
        prompt: Any = self.prompt
        single = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        return [prompt] if single else prompt


class CompletionChoice(Body):
    """The output of one prompt, or what is new of it."""

    index: int
    """Place of the prompt in the request, times n, and the output's place among those of the
    prompt."""
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    """Why the output has ended; null in a stream before the end."""
    stop_reason: int | str | None = None
    """The stop string, or the token of `stop_token_ids`, that ended the output."""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogProbs | None = None


class CompletionResponse(Body):
    """The outputs of all prompts, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    """Seconds since 1970 at which the request came."""
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
