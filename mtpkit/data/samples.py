"""Turn rows into samples: conversations, prompts with responses, or texts; every row is checked."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtpkit.config.checked import checked
from mtpkit.data.rows import Row, read_rows
from mtpkit.errors import UserError, listed, shown
from mtpkit.files import JsonObject, parse_json

NAMING = "--text-column and the like; data.text_column=.. in training"
"""The options with which users name columns, for error messages."""
_MOST_DEPTH = 64
"""Deepest nesting of lists and objects in messages and tools."""


@checked("columns")
class Columns:
    """Names of the columns to read: a conversation, else prompt and response, else text.

    The first rows of a file decide which of these is read; among conversations, a row without messages may have prompt
    and response. If a file lacks the default column `response`, `completion` is read in its place.
    """

    text: str = "text"
    """Column with the text to learn."""
    prompt: str = "prompt"
    """Column with the prompt, which is masked out."""
    response: str = "response"
    """Column with the response to learn."""
    messages: str = "messages"
    """Column with the messages of a conversation."""


@dataclass(frozen=True)
class Sample:
    """One text to learn, possibly after a prompt that is only context; or a conversation.

    Token ids that a model generated take precedence over their text if the tokenizer is the same.
    """

    text: str = ""
    prompt: str = ""
    messages: list[JsonObject] | None = None
    """Messages for a chat template, in the form of transformers; the assistant's are learnt."""
    tools: list[JsonObject] | None = None
    """JSON schemas of the functions that a conversation may call."""
    prompt_token_ids: list[int] | None = None
    """Token ids of the prompt, at least 0; not yet checked against a vocabulary."""
    completion_token_ids: list[int] | None = None
    """Token ids of the completion, likewise; given if and only if `prompt_token_ids` is."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer that the token ids belong to."""
    complete: bool = True
    """False: the text was cut off, so that no end-of-sequence token follows."""
    name: str = field(default="", compare=False)
    """File and line or row (counted from 1) that it comes from."""
    problem: str = field(default="", compare=False)
    """Reason why there is no text, if it is known."""


def read_samples(files: Iterable[Path], columns: Columns | None = None) -> Iterator[Sample]:
    """Yield the samples of `files` in order: one per row of a file with columns, one per text file.

    Raises:
        UserError: a file cannot be read as its suffix says or has none of the columns, or a row has a value of a wrong
            type; the file or row is named.
    """
    columns = columns or Columns()
    for file in files:
        make: Callable[[Row, str], Sample] | None = None
        for name, row in read_rows(file, columns.text):
            make = make or _choose(file, row, columns)
            yield make(row, name)


def read_messages(row: Row, column: str, name: str) -> tuple[list[JsonObject], list[dict] | None]:
    """Read the messages and tools of a row, which are lists or JSON strings.

    Raises:
        UserError: one of them has a wrong type.
    """
    messages, tools = (_read_objects(row.get(key), key, name) for key in (column, "tools"))
    for number, message in enumerate(messages, start=1):
        where = f"data: {name}: message {number} of {column!r}"
        if not isinstance(message.get("role"), str):
            raise UserError(f"{where} has no role; {column!r} must be a list of messages, each with role and content")
        content = message.get("content")
        parts = isinstance(content, list) and all(isinstance(part, str | dict) for part in content)
        if not parts and not isinstance(content, str | None):
            raise UserError(f"{where} has the content {shown(content)}, which is not text")
        calls = message.get("tool_calls")
        if not isinstance(calls, list | None) or not all(
            isinstance(call, dict) and isinstance(call.get("function", call), dict) for call in calls or []
        ):
            raise UserError(f"{where} has the tool_calls {shown(calls)}, must be a list of objects")
    return messages, tools or None


def read_text_column(row: Row, column: str, name: str) -> str:
    """The text in a column; "" if there is none.

    Raises:
        UserError: the column holds something other than text.
    """
    value = row.get(column)
    if not isinstance(value, str | None):
        raise UserError(f"data: {name}: column {column!r} holds {type(value).__name__}, not text")
    return _require_unicode(value or "", column, name)


def lacking(row: Row, column: str) -> str:
    """Say which columns a row without `column` has; columns that only other rows have are None and not listed."""
    others = listed(key for key, value in row.items() if value is not None)
    return f"no column {column!r}; it has: {others}" if others else "empty row"


def _choose(file: Path, row: Row, columns: Columns) -> Callable[[Row, str], Sample]:
    """Choose how the rows of a file become samples, by the columns of its first row."""
    response = columns.response
    if response == Columns.response and response not in row:
        response = "completion"

    def pair(row: Row, name: str) -> Sample:
        sample = _sample(row, response, name)
        return _with_tokens(replace(sample, prompt=read_text_column(row, columns.prompt, name)), row)

    def conversation(row: Row, name: str) -> Sample:
        if row.get(columns.messages) is not None:
            messages, tools = read_messages(row, columns.messages, name)
            return _with_tokens(Sample(messages=messages, tools=tools, name=name), row)
        # A prompt with a response may stand among conversations.
        if row.get(columns.prompt) is not None and row.get(response) is not None:
            return pair(row, name)
        return _with_tokens(Sample(name=name, problem=lacking(row, columns.messages)), row)

    if columns.messages in row:
        return conversation
    if columns.prompt in row and response in row:
        return pair
    if columns.text in row:
        return lambda row, name: _sample(row, columns.text, name)
    raise UserError(
        f"data: {file} has the columns {listed(row)}, but neither {columns.messages!r}, nor both {columns.prompt!r}"
        f" and {columns.response!r}, nor {columns.text!r}; rename them, or name the ones to use ({NAMING})"
    )


def _sample(row: Row, column: str, name: str) -> Sample:
    """Make a sample from the text in a column; if there is no text, the sample names the reason."""
    problem = lacking(row, column) if row.get(column) is None else ""
    return Sample(read_text_column(row, column, name), name=name, problem=problem)


def _with_tokens(sample: Sample, row: Row) -> Sample:
    """Add the columns that `mtpkit data regenerate` writes to a sample, if the row has them."""
    sample = replace(sample, complete=row.get("finish_reason") != "length")
    prompt, completion = (_read_token_ids(row, f"{part}_token_ids", sample.name) for part in ("prompt", "completion"))
    if prompt is None and completion is None:
        return sample
    if prompt is None or completion is None:
        has, lacks = ("prompt", "completion") if completion is None else ("completion", "prompt")
        raise UserError(f"data: {sample.name} has {has}_token_ids, but no {lacks}_token_ids; give both or neither")
    tokenizer = read_text_column(row, "tokenizer", sample.name)
    return replace(sample, prompt_token_ids=prompt, completion_token_ids=completion, tokenizer=tokenizer)


def _read_token_ids(row: Row, column: str, name: str) -> list[int] | None:
    """The token ids in a column, a list or a JSON string; None if there are none."""
    token_ids = _parse(row.get(column), column, name)
    if token_ids is None:
        return None
    if wrong := [token for token in token_ids if type(token) is not int or token < 0]:
        raise UserError(f"data: {name}: {column!r} holds {shown(wrong[0])}; token ids are integers, at least 0")
    return token_ids


def _read_objects(value: object, column: str, name: str) -> list[JsonObject]:
    objects = _parse(value, column, name) or []
    _check_nested(objects, column, name)
    if odd := [entry for entry in objects if not isinstance(entry, dict)]:
        raise UserError(f"data: {name}: {column!r} must be a list of objects, not of {shown(odd[0])}")
    return objects


def _parse(value: object, column: str, name: str) -> list[Any] | None:
    """A list, possibly from a JSON string; None stays None."""
    if isinstance(value, str):
        value = parse_json(value, f"data: {name}: the text in {column!r}")
    if not isinstance(value, list | None):
        raise UserError(f"data: {name}: {column!r} holds {type(value).__name__}, not a list")
    return value


def _check_nested(value: object, column: str, name: str, depth: int = 0) -> None:
    """Refuse values that chat templates or JSON cannot represent."""
    if depth > _MOST_DEPTH:
        raise UserError(f"data: {name}: {column!r} is nested more than {_MOST_DEPTH} deep")
    if isinstance(value, str):
        _require_unicode(value, column, name)
    elif isinstance(value, list | dict):
        for entry in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_nested(entry, column, name, depth + 1)


def _require_unicode(text: str, column: str, name: str) -> str:
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise UserError(
            f"data: {name}: column {column!r} has {half}, half of a surrogate pair, which is not valid text"
        ) from error
    return text
