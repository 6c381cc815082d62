"""Prompts for the base to answer, from rows with messages or prompts, or cut from texts."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from mtpkit.data.cells import lacking, read_text_cell
from mtpkit.data.chat import Chat, NothingToLearn, SampleError
from mtpkit.data.conversations import Conversation, conversation_column, read_conversation
from mtpkit.data.options import SKIPPING, DataOptions
from mtpkit.data.rows import Row, RowError, read_table
from mtpkit.data.samples import NAMING, Columns
from mtpkit.data.sources import find_files
from mtpkit.data.tally import Tally
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
    template_kwargs: JsonObject | None = None
    """Variables of the chat template that `text` is rendered with, if there are any."""


def read_prompts(
    paths: Iterable[str | Path],
    tokenizer: Tokenizer,
    prompt_length: int | None = None,
    turns: Turns = "last",
    columns: Columns | None = None,
    limit: int | None = None,
    options: DataOptions | None = None,
) -> tuple[list[Prompt], list[str]]:
    """Read prompts from files, folders and globs, in order; also returns `describe` of the rows
    without a prompt.

    In a row with messages, the prompt is the conversation before the assistant's last message; with
    `turns` "all", the conversation before each of the assistant's messages is a prompt. A
    conversation that ends without an answer is a prompt as a whole. A row with a prompt gives that
    prompt. A text is cut into pieces of `prompt_length` tokens; a shorter remainder is dropped,
    unless it is the whole text.

    Args:
        limit: largest number of prompts, spread evenly over all prompts; pieces of texts beyond
            these are not made.

    Raises:
        UserError: a file cannot be read or has none of the columns, a text comes without
            `prompt_length`, or too many rows cannot be used.
        RowError: by the options no row is to be skipped, and one cannot be used.
    """
    if prompt_length is not None and prompt_length < 1:
        raise UserError(f"prompt length is {prompt_length}, must be at least 1")
    reader = _Reader(
        tokenizer, prompt_length, turns, columns or Columns(), options or DataOptions()
    )
    prompts: list[Callable[[], Prompt]] = []
    for file in find_files(paths):
        prompts += reader.read(file)
    reader.tally.check(reader.options)
    refused = reader.tally.left_out
    if not prompts:
        first = f", the first is {refused[0]}" if refused else ""
        raise UserError(
            f"data: no prompts: every text, prompt or conversation is empty or refused{first};"
            " check the columns"
        )
    if prompt_length is not None and not reader.texts:
        logger.warning(
            "the prompt length has no effect: no text is cut, all rows have prompts or messages"
        )
    return [make() for make in spread(prompts, limit)], refused


def spread[T](items: Sequence[T], limit: int | None) -> list[T]:
    """At most `limit` items, spread evenly over all."""
    if limit is None or limit >= len(items):
        return list(items)
    if limit < 1:
        raise UserError(f"limit is {limit}, must be at least 1")
    return [items[index * len(items) // limit] for index in range(limit)]


class _Reader:
    """Reads prompts from files, and counts rows without one."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_length: int | None,
        turns: Turns,
        columns: Columns,
        options: DataOptions,
    ) -> None:
        self.options = options
        self.tally = Tally("prompts")
        self.texts = False
        """Whether there are texts, from which prompts are cut."""
        self._tokenizer = tokenizer
        self._prompt_length = prompt_length
        self._turns = turns
        self._columns = columns
        self._first = _bos(tokenizer)

    def read(self, file: Path) -> Iterator[Callable[[], Prompt]]:
        """Yield a function for each prompt of a file, which makes the prompt."""
        table = read_table(file, self._columns.text)
        talk = conversation_column(table.columns, self._columns.messages)
        wanted = (talk, self._columns.prompt, self._columns.text)
        known = [column for column in wanted if column is not None and column in table.columns]
        for name, row in table.rows:
            self.tally.count({"num_documents": 1, "num_rows": 1})
            try:
                if isinstance(row, RowError):
                    raise row
                if not known:
                    raise UserError(
                        f"data: {name} has the columns {listed(table.columns)}, but none of"
                        f" {self._columns.messages!r}, {self._columns.prompt!r} and"
                        f" {self._columns.text!r}; rename them, or name the ones to use ({NAMING})"
                    )
                yield from self._prompts(name, row, known, talk)
            except NothingToLearn as reason:
                self.tally.leave_out(name, str(reason), bad=False)
            except (RowError, SampleError) as error:
                told = str(error) if isinstance(error, RowError) else f"data: {name}: {error}"
                if self.options.on_bad_row == "stop":
                    raise RowError(f"{told}; {SKIPPING}") from error
                problem = told.removeprefix(f"data: {name}").lstrip(": ")
                self.tally.count({"num_bad_rows": 1})
                self.tally.leave_out(name, problem, bad=True)

    def _prompts(
        self, name: str, row: Row, known: list[str], talk: str | None
    ) -> list[Callable[[], Prompt]]:
        """The prompts of a row, from the first of its columns that is not empty."""
        column = next((column for column in known if row.get(column) is not None), None)
        if column is None:
            problem = lacking(row, known[0])
            empty = any(one in row for one in known) or all(value is None for value in row.values())
            raise NothingToLearn(problem) if empty else RowError(f"data: {name}: {problem}")
        if column == talk:
            return [
                partial(_same, one)
                for one in self._from_messages(name, read_conversation(row, talk, name))
            ]
        text = read_text_cell(row, column, name)
        if not text:
            raise NothingToLearn("empty text")
        token_ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if column == self._columns.prompt:
            whole = without_second_bos([*self._first, *token_ids], text, self._tokenizer)
            return [partial(_same, Prompt(name, text, whole))]
        self.texts = True
        length = self._prompt_length
        if length is None:
            raise UserError(
                f"data: {name} is a text; say how many of its tokens make a prompt with"
                " --prompt-length"
            )
        starts = range(0, len(token_ids), length)
        return [
            partial(_piece, name, self._tokenizer, self._first, token_ids, start, length)
            for start in starts
            if start == 0 or start + length <= len(token_ids)
        ]

    def _from_messages(self, name: str, conversation: Conversation) -> Iterator[Prompt]:
        messages = conversation.messages
        # A greeting at the beginning answers nothing.
        answers = [
            index
            for index, message in enumerate(messages)
            if index and message["role"] == "assistant"
        ]
        # A question at the end of a conversation is to be answered too.
        if messages and messages[-1]["role"] != "assistant":
            answers.append(len(messages))
        if not answers:
            raise NothingToLearn("no question" if messages else "no messages")
        values = {**self.options.chat_template_kwargs, **conversation.template_kwargs}
        chat = Chat(self._tokenizer, values)
        for index in answers if self._turns == "all" else answers[-1:]:
            before = messages[:index]
            text = chat.prompt(before, conversation.tools)
            # The template has already written the tokenizer's first tokens.
            token_ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            yield Prompt(name, text, token_ids, before, conversation.tools, values or None)


def _same(prompt: Prompt) -> Prompt:
    return prompt


def _piece(
    name: str,
    tokenizer: Tokenizer,
    first: list[int],
    token_ids: list[int],
    start: int,
    prompt_length: int,
) -> Prompt:
    piece = token_ids[start : start + prompt_length]
    text = tokenizer.decode(piece)
    return Prompt(name, text, without_second_bos([*first, *piece], text, tokenizer))


def _bos(tokenizer: Tokenizer) -> list[int]:
    """The BOS token if the tokenizer adds one; a token that it adds at the end does not belong in a
    prompt."""
    frame = tokenizer("", verbose=False)["input_ids"]
    return [token for token in frame[:1] if token == tokenizer.bos_token_id]
