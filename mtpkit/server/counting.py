"""Counts the tokens of a request's outputs."""

from mtpkit.engine import RequestOutput
from mtpkit.server.protocol.usage import PromptTokens, Usage


class Counter:
    """Tokens of the prompts and outputs of a request so far.

    Args:
        outputs: whether tokens of outputs count: the client gets them.
    """

    def __init__(self, outputs: bool = True) -> None:
        self._outputs = outputs
        self._prompts = dict[int, int]()
        self._cached = dict[int, int]()
        self._completion = 0

    def note(self, index: int, output: RequestOutput) -> None:
        """Count an output, which holds what is new of prompt `index`."""
        self._prompts[index] = len(output.prompt_token_ids)
        self._cached[index] = output.num_cached_tokens or 0
        if not self._outputs:
            return
        self._completion += sum(len(one.token_ids) for one in output.outputs)

    def usage(self) -> Usage:
        """The counts."""
        prompts = sum(self._prompts.values())
        return Usage(
            prompt_tokens=prompts,
            completion_tokens=self._completion,
            total_tokens=prompts + self._completion,
            prompt_tokens_details=PromptTokens(cached_tokens=sum(self._cached.values())),
        )
