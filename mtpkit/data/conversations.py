"""Read conversations from rows: messages with role and content, ShareGPT's turns, and Alpaca's
instructions."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from mtpkit.data.cells import read_list, read_object, read_objects, read_text_cell
from mtpkit.data.options import reserved
from mtpkit.data.rows import Row, RowError
from mtpkit.errors import UserError, listed, shown
from mtpkit.files import JsonObject, parse_json

SHAREGPT = "conversations"
"""Column of ShareGPT's turns, each `{"from": "human", "value": "..."}`."""
ALPACA = ("instruction", "output")
"""Columns of Alpaca's rows; `input`, `system` and `history`, a list of questions with answers, may
stand beside."""
LEARNT_FLAGS = ("weight", "loss_mask", "trainable", "train", "loss")
"""Entries of an assistant's message that say whether it is learnt: 0 or false if not."""
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "bot", "chatgpt", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
"""The role of each speaker that ShareGPT's turns are from."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a content that hold text."""


@dataclass(frozen=True)
class Conversation:
    """The messages of a row, and what its chat template reads beside them."""

    messages: list[JsonObject]
    """In the form of transformers; a content is a text or None."""
    tools: list[JsonObject] | None = None
    """JSON schemas of the functions that may be called."""
    template_kwargs: JsonObject = field(default_factory=dict)
    """Variables of the chat template."""


def conversation_column(known: Collection[str], messages: str) -> str | None:
    """The column from which `read_conversation` reads, if a file with the columns `known` has one.

    Args:
        messages: the column in which the user has messages.
    """
    if messages in known:
        return messages
    if SHAREGPT in known:
        return SHAREGPT
    return ALPACA[0] if set(ALPACA) <= set(known) else None


def read_conversation(row: Row, column: str, name: str) -> Conversation:
    """Read the conversation of a row from `conversation_column`; lists and objects may be written
    as JSON.

    Raises:
        RowError: something has a wrong type, or is no text.
    """
    if column == ALPACA[0]:
        messages = _alpaca(row, name)
    else:
        turns = read_objects(row, column, name)
        messages = [
            _message(turn, f"data: {name}: message {n} of {column!r}")
            for n, turn in enumerate(turns, start=1)
        ]
        if any("from" in turn for turn in turns):
            messages = [*_system(row, name), *messages]
    tools = read_objects(row, "tools", name)
    template_kwargs = read_object(row, "chat_template_kwargs", name)
    if taken := reserved(template_kwargs):
        raise RowError(
            f"data: {name}: 'chat_template_kwargs' has {taken[0]!r}, no variable of chat templates"
        )
    return Conversation(messages, tools or None, template_kwargs)


def is_learnt(message: JsonObject) -> bool:
    """Whether an assistant's message is to be learnt, as far as its own entries say."""
    return all(message[flag] for flag in LEARNT_FLAGS if message.get(flag) is not None)


def _message(turn: JsonObject, where: str) -> JsonObject:
    """Check a message, make one of a turn of ShareGPT's, and join the parts of its content."""
    message = _from_sharegpt(turn, where) if "from" in turn and "role" not in turn else turn
    if not isinstance(message.get("role"), str):
        raise RowError(f"{where} has no role; a message has role and content, or from and value")
    calls = message.get("tool_calls")
    if not isinstance(calls, list | None) or not all(
        isinstance(call, dict) and isinstance(call.get("function", call), dict)
        for call in calls or []
    ):
        raise RowError(f"{where} has the tool_calls {shown(calls)}, must be a list of objects")
    for flag in LEARNT_FLAGS if message["role"] == "assistant" else ():
        if message.get(flag) not in (None, 0, 1):
            raise RowError(
                f"{where} has the {flag} {shown(message[flag])}, must be 0, 1, false or true"
            )
    if "content" not in message:
        return message
    return {**message, "content": _text(message["content"], where)}


def _text(content: object, where: str) -> str | None:
    """The text of a content, whose parts are joined; None stays None."""
    if isinstance(content, str | None):
        return content
    if not isinstance(content, list) or not all(isinstance(part, str | dict) for part in content):
        raise RowError(f"{where} has the content {shown(content)}, which is not text")
    return "".join(_part(part, where) for part in content)


def _part(part: str | JsonObject, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text")
    text = part.get("text")
    if kind not in _TEXT_PARTS:
        raise RowError(
            f"{where} has a part of the type {shown(kind)}; models read and write text only"
        )
    if not isinstance(text, str):
        raise RowError(f"{where} has a part whose text is {shown(text)}; give a text")
    return text


def _from_sharegpt(turn: JsonObject, where: str) -> JsonObject:
    speaker = turn["from"]
    value = turn.get("value")
    if not isinstance(speaker, str) or speaker not in _ROLES:
        raise RowError(f"{where} is from {shown(speaker)}, must be from {listed(_ROLES)}")
    rest = {key: entry for key, entry in turn.items() if key not in ("from", "value")}
    message = {"role": _ROLES[speaker], "content": value, **rest}
    return (
        {**message, "content": None, "tool_calls": _calls(value, where)}
        if speaker == "function_call"
        else message
    )


def _calls(value: Any, where: str) -> list[JsonObject]:
    """The calls that a turn from `function_call` holds, as JSON of one object or a list of
    objects."""
    try:
        parsed = parse_json(value, where) if isinstance(value, str) else value
    except UserError as error:
        raise RowError(str(error)) from error
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise RowError(
            f"{where} has the value {shown(value)}, must be a call, JSON of name and arguments"
        )
    return calls


def _system(row: Row, name: str) -> list[JsonObject]:
    text = read_text_cell(row, "system", name)
    return [{"role": "system", "content": text}] if text else []


def _alpaca(row: Row, name: str) -> list[JsonObject]:
    question, more, answer = (
        read_text_cell(row, key, name) for key in (ALPACA[0], "input", ALPACA[1])
    )
    return [
        *_system(row, name),
        *_history(row, name),
        {"role": "user", "content": f"{question}\n{more}" if more else question},
        {"role": "assistant", "content": answer},
    ]


def _history(row: Row, name: str) -> Iterator[JsonObject]:
    for pair in read_list(row, "history", name) or []:
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(text, str) for text in pair)
        ):
            raise RowError(
                f"data: {name}: 'history' holds {shown(pair)}, must be pairs of a question and its"
                " answer"
            )
        yield {"role": "user", "content": pair[0]}
        yield {"role": "assistant", "content": pair[1]}
