"""Conversations as prompts: messages that the tokenizer's chat template renders."""

from typing import Any, NamedTuple

from mtpkit.data.chat import Chat, SampleError
from mtpkit.data.conversations import read_conversation
from mtpkit.data.rows import RowError
from mtpkit.engine.requests.request import PromptError
from mtpkit.engine.requests.token_texts import Tokenizer
from mtpkit.errors import UserError, shown

_ROW = ("messages", "tools", "chat_template_kwargs")
"""Entries of a prompt that rows of data have, too."""
RENDERING = (
    "tools",
    "chat_template_kwargs",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
)
"""Entries of a prompt that say how its messages are rendered."""


class Rendered(NamedTuple):
    """A conversation as a model reads it."""

    text: str
    token_ids: list[int]
    checkpoint_at: int | None
    """Number of tokens that do not depend on the generation prompt; None if there are none, or all
    tokens."""


def as_prompts(messages: list[Any], **arguments: Any) -> dict[str, Any] | list[dict[str, Any]]:
    """Make a prompt of a conversation, or a list of prompts of a list of conversations.

    Args:
        arguments: entries that each prompt gets, see `Prompt`; None is left out.

    Raises:
        UserError: `messages` is no list.
    """
    if not isinstance(messages, list | tuple):
        raise UserError(
            f"messages is {shown(messages)}: give a list of messages, or a list of such lists"
        )
    given = {key: value for key, value in arguments.items() if value is not None}
    # The first entry decides, as for prompts.
    if messages and isinstance(messages[0], list | tuple):
        return [
            {"messages": one, "name": f"messages[{index}]", **given}
            for index, one in enumerate(messages)
        ]
    return {"messages": messages, "name": "the conversation", **given}


def encode_messages(prompt: dict[str, Any], tokenizer: Tokenizer | None, name: str) -> Rendered:
    """Render and tokenise the messages of a prompt, see `Prompt`.

    Args:
        name: name of the prompt in messages.

    Raises:
        PromptError: messages that are none, or that the template refuses.
        UserError: there is no tokenizer, or no template.
    """
    template = prompt.get("chat_template")
    add_generation_prompt = prompt.get("add_generation_prompt", True)
    continue_final_message = prompt.get("continue_final_message", False)
    _check_template(tokenizer, template, name)
    for key, value in (
        ("add_generation_prompt", add_generation_prompt),
        ("continue_final_message", continue_final_message),
    ):
        if not isinstance(value, bool):
            raise PromptError(f"{name}: {key} is {shown(value)}, must be True or False")
    if add_generation_prompt and continue_final_message:
        raise PromptError(
            f"{name}: continue_final_message goes on with the last message, and"
            " add_generation_prompt begins a new one: set add_generation_prompt=False"
        )

    given = prompt["messages"]
    row = {key: prompt.get(key) for key in _ROW}
    row["messages"] = list(given) if isinstance(given, tuple) else given
    try:
        conversation = read_conversation(row, "messages", name)
        if not conversation.messages:
            raise PromptError(f"{name} has no messages: give at least one")
        chat = Chat(tokenizer, conversation.template_kwargs, template)
        text = chat.prompt(
            conversation.messages,
            conversation.tools,
            add_generation_prompt,
            continue_final_message,
        )
    except RowError as error:
        # Errors about rows of data begin so.
        raise PromptError(str(error).removeprefix("data: ")) from error
    except SampleError as error:
        raise PromptError(f"{name}: {error}") from error

    token_ids = _tokens(text, tokenizer)
    if not add_generation_prompt:
        return Rendered(text, token_ids, None)
    try:
        before = chat.prompt(conversation.messages, conversation.tools, False)
    except SampleError:  # a template may insist on a generation prompt
        return Rendered(text, token_ids, None)
    # Tokens at the border may hold characters of both sides: those count that are the same in both.
    common = _common(token_ids, _tokens(before, tokenizer))
    return Rendered(text, token_ids, common if 0 < common < len(token_ids) else None)


def _check_template(tokenizer: Any, template: Any, name: str) -> None:
    """Refuse a conversation for which there is no template."""
    if tokenizer is None:
        raise UserError(
            f"{name} is a conversation, which needs a tokenizer: put one beside the model, or give"
            " prompt_token_ids"
        )
    if template is not None and not isinstance(template, str):
        raise UserError(f"{name}: chat_template is {shown(template)}, must be a text")
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{name} is a conversation, but the tokenizer in {tokenizer.name_or_path} has no chat"
            " template: add chat_template.jinja to it, or give prompt, a text"
        )


def _tokens(text: str, tokenizer: Any) -> list[int]:
    # The template has already written the tokenizer's first tokens.
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _common(left: list[int], right: list[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(left), len(right)))
