"""Log-probabilities of outputs as responses have them."""

from collections.abc import Callable, Sequence

from mtpkit.engine import CompletionOutput, RequestOutput
from mtpkit.engine.requests.log_probs import Logprob
from mtpkit.server.protocol.log_probs import (
    ChatLogProb,
    ChatLogProbs,
    CompletionLogProbs,
    PromptLogProb,
    PromptLogProbs,
    TokenLogProb,
)

type Positions = Sequence[dict[int, Logprob] | None]
"""For each token of a text, log-probabilities by token id; None: they are unknown."""


def for_completion(
    token_ids: Sequence[int], positions: Positions, offset: int, text_of: Callable[[int], str]
) -> CompletionLogProbs:
    """The log-probabilities of tokens that begin at a place in the text of all tokens.

    Args:
        text_of: returns the text of a token whose log-probability is unknown.
    """
    found = CompletionLogProbs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token_id, tokens in zip(token_ids, positions, strict=True):
        found.text_offset.append(offset)
        if tokens is None:
            found.tokens.append(text_of(token_id))
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
        else:
            own = tokens[token_id]
            found.tokens.append(_text(token_id, own))
            found.token_logprobs.append(own.logprob)
            # Parts of characters have the same text: that of the token itself counts.
            top = {_text(one, each): each.logprob for one, each in tokens.items()}
            found.top_logprobs.append(top | {found.tokens[-1]: own.logprob})
        offset += len(found.tokens[-1])
    return found


def of_prompt(output: RequestOutput) -> PromptLogProbs | None:
    """The log-probabilities of a prompt; None: they are not known."""
    if output.prompt_logprobs is None:
        return None
    return [None if tokens is None else _of_place(tokens) for tokens in output.prompt_logprobs]


def _of_place(tokens: dict[int, Logprob]) -> dict[int, PromptLogProb]:
    return {
        token_id: PromptLogProb(logprob=one.logprob, rank=one.rank, decoded_token=one.decoded_token)
        for token_id, one in tokens.items()
    }


def for_chat(completion: CompletionOutput, most: int) -> ChatLogProbs:
    """The log-probabilities of an output, with those of so many most probable tokens."""
    found = []
    positions = completion.logprobs or []
    for token_id, tokens in zip(completion.token_ids, positions, strict=True):
        best = sorted(tokens.items(), key=lambda pair: pair[1].rank)
        top = [_token(one, each) for one, each in best if each.rank <= most]
        own = _token(token_id, tokens[token_id])
        found.append(
            ChatLogProb(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top)
        )
    return ChatLogProbs(content=found)


def _token(token_id: int, log_prob: Logprob) -> TokenLogProb:
    text = _text(token_id, log_prob)
    return TokenLogProb(token=text, logprob=log_prob.logprob, bytes=list(text.encode()))


def _text(token_id: int, log_prob: Logprob) -> str:
    """The text of a token, or its id where there is no tokenizer."""
    text = log_prob.decoded_token
    return f"token_id:{token_id}" if text is None else text
