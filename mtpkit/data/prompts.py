"""Prompts for the base to answer, from rows with messages or prompts, or cut from texts."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from mtpkit.data.chat import SampleError, render_prompt, require_template
from mtpkit.data.documents import describe
from mtpkit.data.rows import Row, read_rows
from mtpkit.data.samples import NAMING, Columns, lacking, read_messages, read_text_column
from mtpkit.data.sources import find_files
from mtpkit.data.tokenizer import Tokenizer, without_second_bos
from mtpkit.errors import UserError, listed
from mtpkit.files import JsonObject

logger = logging.getLogger(__name__)

Turns = Literal["last", "all"]


@dataclass(frozen=True)
class Prompt:
    """A prompt for the base."""

    name: str
    """File and row (counted from 1) that it comes from."""
    text: str
    token_ids: list[int]
    messages: list[JsonObject] | None = None
    """The conversation that `text` is rendered from."""
    tools: list[JsonObject] | None = None


def read_prompts(
    paths: Iterable[str | Path],
    tokenizer: Tokenizer,
    prompt_length: int | None = None,
    turns: Turns = "last",
    columns: Columns | None = None,
    limit: int | None = None,
) -> tuple[list[Prompt], list[str]]:
    """Read prompts from files, folders and globs, in order; also returns `describe` of the rows without a prompt.

    In a row with messages, the prompt is the conversation before the assistant's last message; with `turns` "all", the
    conversation before each of the assistant's messages is a prompt. A conversation that ends without an answer is a
    prompt as a whole. A row with a prompt gives that prompt. A text is cut into pieces of `prompt_length` tokens; a
    shorter remainder is dropped, unless it is the whole text.

    Args:
        limit: largest number of prompts, spread evenly over all prompts; pieces of texts beyond these are not made.

    Raises:
        UserError: a file cannot be read or has none of the columns, or a text comes without `prompt_length`.
    """
    if prompt_length is not None and prompt_length < 1:
        raise UserError(f"prompt length is {prompt_length}, must be at least 1")
    columns = columns or Columns()
    prompts: list[Callable[[], Prompt]] = []
    refused = []
    texts = False
    for file in find_files(paths):
        for name, row in read_rows(file, columns.text):
            try:
                column = _column(name, row, columns)
                texts = texts or column not in (columns.messages, columns.prompt)
                prompts += _prompts(name, row, column, tokenizer, prompt_length, turns, columns)
            except SampleError as error:
                refused.append(describe(name, str(error)))
    if not prompts:
        first = f", the first is {refused[0]}" if refused else ""
        raise UserError(
            f"data: no prompts: every text, prompt or conversation is empty or refused{first}; check the columns"
        )
    if prompt_length is not None and not texts:
        logger.warning("the prompt length has no effect: no text is cut, all rows have prompts or messages")
    return [make() for make in spread(prompts, limit)], refused


def spread[T](items: Sequence[T], limit: int | None) -> list[T]:
    """At most `limit` items, spread evenly over all."""
    if limit is None or limit >= len(items):
        return list(items)
    if limit < 1:
        raise UserError(f"limit is {limit}, must be at least 1")
    return [items[index * len(items) // limit] for index in range(limit)]


def _column(name: str, row: Row, columns: Columns) -> str:
    """The column that a row's prompts come from: the first that is not empty."""
    known = [column for column in (columns.messages, columns.prompt, columns.text) if column in row]
    if not known:
        raise UserError(
            f"data: {name} has the columns {listed(row)}, but none of {columns.messages!r}, {columns.prompt!r} and"
            f" {columns.text!r}; rename them, or name the ones to use ({NAMING})"
        )
    given = [column for column in known if row[column] is not None]
    if not given:
        raise SampleError(lacking(row, known[0]))
    return given[0]


def _prompts(
    name: str,
    row: Row,
    column: str,
    tokenizer: Tokenizer,
    prompt_length: int | None,
    turns: Turns,
    columns: Columns,
) -> Iterator[Callable[[], Prompt]]:
    """Yield a function for each prompt of a row, which makes the prompt."""
    if column == columns.messages:
        require_template(tokenizer)
        for prompt in _from_messages(name, *read_messages(row, columns.messages, name), tokenizer, turns):
            yield partial(_same, prompt)
        return
    text = read_text_column(row, column, name)
    if not text:
        raise SampleError("empty text")
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    first = _bos(tokenizer)
    if column == columns.prompt:
        yield partial(_same, Prompt(name, text, without_second_bos([*first, *token_ids], text, tokenizer)))
        return
    if prompt_length is None:
        raise UserError(f"data: {name} is a text; say how many of its tokens make a prompt with --prompt-length")
    for start in range(0, len(token_ids), prompt_length):
        if start == 0 or start + prompt_length <= len(token_ids):
            yield partial(_piece, name, tokenizer, first, token_ids, start, prompt_length)


def _same(prompt: Prompt) -> Prompt:
    return prompt


def _piece(
    name: str, tokenizer: Tokenizer, first: list[int], token_ids: list[int], start: int, prompt_length: int
) -> Prompt:
    piece = token_ids[start : start + prompt_length]
    text = tokenizer.decode(piece)
    return Prompt(name, text, without_second_bos([*first, *piece], text, tokenizer))


def _from_messages(
    name: str, messages: list[JsonObject], tools: list[JsonObject] | None, tokenizer: Tokenizer, turns: Turns
) -> Iterator[Prompt]:
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    # A question at the end of a conversation is to be answered too.
    if messages and messages[-1]["role"] != "assistant":
        answers.append(len(messages))
    for index in answers if turns == "all" else answers[-1:]:
        before = messages[:index]
        text = render_prompt(tokenizer, before, tools)
        # The template has already written the tokenizer's first tokens.
        token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        yield Prompt(name, text, token_ids, before, tools)
    if not answers:
        raise SampleError("no messages")


def _bos(tokenizer: Tokenizer) -> list[int]:
    """The BOS token if the tokenizer adds one; a token that it adds at the end does not belong in a prompt."""
    frame = tokenizer("", verbose=False)["input_ids"]
    return [token for token in frame[:1] if token == tokenizer.bos_token_id]
