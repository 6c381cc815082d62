"""Prompts and sampling parameters in the forms that users may give."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mtpkit.config.checked import are_whole, is_list, is_whole
from mtpkit.data.tokenizer import without_second_bos
from mtpkit.engine.requests.messages import encode_messages
from mtpkit.engine.requests.params import SamplingParams
from mtpkit.engine.requests.request import PromptError
from mtpkit.engine.requests.token_texts import Tokenizer
from mtpkit.errors import UserError, listed, shown

Prompt = str | Sequence[int] | dict[str, Any]
"""A text, token ids, or a dict.

A dict has `prompt_token_ids`, `prompt` (a text or token ids) or `messages`, and may have a `name`
for error messages and `checkpoint_at`. The prefix cache keeps a checkpoint after that number of
prompt tokens, besides the checkpoint at the end.

`messages` is a conversation, which the tokenizer's chat template renders; its checkpoint is before
the generation prompt by default. The arguments of `LLM.chat` about rendering may stand beside it:
`tools`, `chat_template_kwargs`, `chat_template`, `add_generation_prompt` and
`continue_final_message`."""


class Encoded(NamedTuple):
    """What a prompt becomes."""

    text: str | None
    """None for token ids."""
    token_ids: Sequence[int]
    checkpoint_at: int | None = None
    """The prompt's own, see `Prompt`, or the tokens of a conversation without its generation
    prompt."""


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[tuple[str, Prompt]]:
    """(name, prompt) pairs. Messages use the name: the prompt's own, or its place in the list.

    Raises:
        UserError: `prompts` is neither a prompt nor a list.
    """
    if is_prompt(prompts):
        return [(_name(prompts) or "the prompt", prompts)]  # type: ignore[arg-type, list-item]
    if not isinstance(prompts, Sequence) or not is_list(prompts):
        raise UserError(
            f"prompts are of type {type(prompts).__name__}: give texts, or lists of token ids"
        )
    return [(_name(one) or f"prompts[{index}]", one) for index, one in enumerate(prompts)]  # type: ignore[arg-type, misc]


def is_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt, and not a list of prompts."""
    if isinstance(prompts, str | dict):
        return True
    if not isinstance(prompts, Sequence) or not is_list(prompts) or not prompts:
        return False
    # The first entry decides. A list such as [1, "a"] is taken for token ids, and refused as such.
    return is_whole(prompts[0])


def _name(prompt: Prompt) -> str | None:
    """The name that a prompt brings with it."""
    name = prompt.get("name") if isinstance(prompt, dict) else None
    return name if isinstance(name, str) else None


def _checkpoint_of(prompt: dict[str, Any], name: str) -> int | None:
    """The `checkpoint_at` of a prompt, see `Prompt`; None if it has none.

    Raises:
        PromptError: it is not a whole number.
    """
    at = prompt.get("checkpoint_at")
    if at is not None and not is_whole(at):
        raise PromptError(
            f"{name}: checkpoint_at is {shown(at)}, must be a whole number of the prompt's tokens"
        )
    return at


def list_params(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One `SamplingParams` per prompt, by default `SamplingParams()`.

    Raises:
        UserError: a value that is not `SamplingParams`, or a list whose length is not
            `num_prompts`.
    """
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * num_prompts
    if not isinstance(sampling_params, Sequence) or not is_list(sampling_params):
        raise UserError(
            f"sampling_params is {shown(sampling_params)}: give SamplingParams(...), or a list of"
            " them"
        )
    wrong = [
        f"[{i}] is {shown(one)}"
        for i, one in enumerate(sampling_params)
        if not isinstance(one, SamplingParams)
    ]
    if wrong:
        raise UserError(f"sampling_params{listed(wrong)}: give SamplingParams(...) for each prompt")
    if len(sampling_params) != num_prompts:
        raise UserError(
            f"{num_prompts} prompts but {len(sampling_params)} sampling parameters: give one, or"
            " one per prompt"
        )
    return list(sampling_params)


def encode(prompt: Prompt, tokenizer: Tokenizer | None, name: str) -> Encoded:
    """The text, the token ids and the checkpoint of a prompt.

    Args:
        name: name of the prompt in messages.

    Raises:
        PromptError: token ids, a text or a dict with values that cannot be right.
        UserError: `prompt` is none of these, or is a text and there is no tokenizer.
    """
    if isinstance(prompt, dict):
        given = prompt.get("name")
        if given is not None and not isinstance(given, str):
            raise PromptError(
                f"{name}: name is {shown(given)}, must be a text: messages use it for the prompt"
            )
        # Ids before a text: where a dict has both, the ids say exactly what is meant.
        known = [
            key for key in ("prompt_token_ids", "prompt", "messages") if prompt.get(key) is not None
        ]
        if not known:
            raise PromptError(
                f"{name} is {shown(prompt)}, which has neither 'prompt' nor 'prompt_token_ids'"
                " nor 'messages'"
            )
        if known[0] == "messages":
            encoded = Encoded(*encode_messages(prompt, tokenizer, name))
        else:
            encoded = encode(prompt[known[0]], tokenizer, name)
        at = _checkpoint_of(prompt, name)
        return encoded if at is None else encoded._replace(checkpoint_at=at)

    if isinstance(prompt, str):
        # No other prompt of the list can be served either: this is no `PromptError`.
        if tokenizer is None:
            raise UserError(
                f"{name} is a text, which needs a tokenizer: put one beside the model, or give"
                " prompt_token_ids"
            )
        _check_unicode(prompt, name)
        return Encoded(prompt, without_second_bos(tokenizer.encode(prompt), prompt, tokenizer))

    wrong = f"{name} is a {type(prompt).__name__}: give a text, or token ids as a list of integers"
    if not isinstance(prompt, Sequence) or not is_list(prompt):
        raise UserError(wrong)
    if not are_whole(prompt):
        raise PromptError(wrong)
    return Encoded(None, prompt)  # type: ignore[arg-type]


def truncated(encoded: Encoded, most: int | None, max_model_len: int) -> Encoded:
    """The last `most` tokens of a prompt, see `SamplingParams.truncate_prompt_tokens`. A checkpoint
    stays at its token; one before these tokens is dropped."""
    if most is None:
        return encoded
    dropped = len(encoded.token_ids) - (max_model_len - 1 if most == -1 else most)
    if dropped <= 0:
        return encoded
    at = encoded.checkpoint_at
    return encoded._replace(
        token_ids=encoded.token_ids[dropped:],
        checkpoint_at=None if at is None or at <= dropped else at - dropped,
    )


def _check_unicode(text: str, name: str) -> None:
    """Refuse lone surrogates, which Python's strings can contain but UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{name} is not valid Unicode: character {error.start} is the lone surrogate"
            f" {text[error.start]!a}; decode its bytes with errors='replace'"
        ) from error
