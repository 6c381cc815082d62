"""Turn rows into samples: conversations, prompts with responses, or texts; every row is checked."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from mtpkit.config.checked import checked
from mtpkit.data.cells import lacking, read_list, read_text_cell
from mtpkit.data.conversations import ALPACA, SHAREGPT, conversation_column, read_conversation
from mtpkit.data.options import SKIPPING, OnBadRow
from mtpkit.data.rows import Row, RowError, Table, read_table
from mtpkit.errors import UserError, listed, shown
from mtpkit.files import JsonObject

NAMING = "--text-column and the like; data.text_column=.. in training"
"""The options with which users name columns, for error messages."""


@checked("columns")
class Columns:
    """Names of the columns to read: a conversation, else prompt and response, else text.

    The first rows of a file decide which of these is read; among conversations, a row without
    messages may have prompt and response. If a file lacks the default column `response`,
    `completion` is read in its place. If it lacks the column of messages, ShareGPT's column and
    then Alpaca's columns are read in its place.
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
    template_kwargs: JsonObject = field(default_factory=dict)
    """Variables of the chat template that this row gives."""
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
    bad: bool = field(default=False, compare=False)
    """True: the row cannot be used, and `problem` says why. False: it can be, though it may hold no
    text."""


def read_samples(
    files: Iterable[Path], columns: Columns | None = None, on_bad_row: OnBadRow = "stop"
) -> Iterator[Sample]:
    """Yield the samples of `files` in order: one per row of a file with columns, one per text file.

    A text that is null or empty gives a sample without text. In files with a cell for each column
    of each row, such as CSV and Parquet, this holds for responses only: other empty cells are
    columns that the row lacks.

    Args:
        on_bad_row: `skip`: a row that cannot be used becomes a sample with `bad`.

    Raises:
        UserError: a file cannot be read as its suffix says or has none of the columns.
        RowError: a row cannot be read, lacks its column, or has a value of a wrong type; it is
            named.
    """
    columns = columns or Columns()
    for file in files:
        make: Callable[[Row, str], Sample] | None = None
        table = read_table(file, columns.text)
        for name, row in table.rows:
            try:
                if isinstance(row, RowError):
                    raise row
                make = make or _choose(file, table, columns)
                yield make(row, name)
            except RowError as error:
                if on_bad_row == "stop":
                    raise RowError(f"{error}; {SKIPPING}") from error
                problem = str(error).removeprefix(f"data: {name}").lstrip(": ")
                yield Sample(name=name, problem=problem, bad=True)


def _choose(file: Path, table: Table, columns: Columns) -> Callable[[Row, str], Sample]:
    """Choose how the rows of a file become samples, by the columns of its first rows."""
    known = table.columns
    talk = conversation_column(known, columns.messages)
    response = columns.response
    if response == Columns.response and response not in known:
        response = "completion"
    are_pairs = columns.prompt in known and response in known

    def pair(row: Row, name: str) -> Sample:
        # A cell for the answer that is empty is an empty answer.
        for column in (columns.prompt,) if table.blanks else (columns.prompt, response):
            _require_column(row, column, name)
        text, prompt = (read_text_cell(row, column, name) for column in (response, columns.prompt))
        return _with_tokens(Sample(text, prompt, name=name), row)

    def conversation(row: Row, name: str) -> Sample:
        assert talk is not None
        # A prompt with a response may stand among conversations.
        if (
            row.get(talk) is None
            and row.get(columns.prompt) is not None
            and row.get(response) is not None
        ):
            return pair(row, name)
        required = ALPACA if talk == ALPACA[0] and not table.blanks else (talk,)
        for column in required:
            _require_column(row, column, name)
        found = read_conversation(row, talk, name)
        return _with_tokens(
            Sample(
                messages=found.messages,
                tools=found.tools,
                template_kwargs=found.template_kwargs,
                name=name,
            ),
            row,
        )

    def plain(row: Row, name: str) -> Sample:
        _require_column(row, columns.text, name)
        return Sample(read_text_cell(row, columns.text, name), name=name)

    if are_pairs and talk != columns.messages:
        return pair
    if talk is not None:
        return conversation
    if columns.text in known:
        return plain
    raise UserError(
        f"data: {file} has the columns {listed(known)}, but neither {columns.messages!r} or"
        f" {SHAREGPT!r}, nor both {columns.prompt!r} and {columns.response!r}, or {ALPACA[0]!r} and"
        f" {ALPACA[1]!r}, nor {columns.text!r}; rename them, or name the ones to use ({NAMING})"
    )


def _require_column(row: Row, column: str, name: str) -> None:
    """Refuse a row without a column, unless it has nothing at all."""
    if column not in row and any(value is not None for value in row.values()):
        raise RowError(f"data: {name}: {lacking(row, column)}")


def _with_tokens(sample: Sample, row: Row) -> Sample:
    """Add the columns that `mtpkit data regenerate` writes to a sample, if the row has them."""
    sample = replace(sample, complete=row.get("finish_reason") != "length")
    prompt, completion = (
        _read_token_ids(row, f"{part}_token_ids", sample.name) for part in ("prompt", "completion")
    )
    if prompt is None and completion is None:
        return sample
    if prompt is None or completion is None:
        has, lacks = ("prompt", "completion") if completion is None else ("completion", "prompt")
        raise RowError(
            f"data: {sample.name} has {has}_token_ids, but no {lacks}_token_ids; give both or"
            " neither"
        )
    tokenizer = read_text_cell(row, "tokenizer", sample.name)
    return replace(
        sample, prompt_token_ids=prompt, completion_token_ids=completion, tokenizer=tokenizer
    )


def _read_token_ids(row: Row, column: str, name: str) -> list[int] | None:
    """The token ids in a column, a list or a JSON string; None if there are none."""
    token_ids = read_list(row, column, name)
    if token_ids is None:
        return None
    if wrong := [token for token in token_ids if type(token) is not int or token < 0]:
        raise RowError(
            f"data: {name}: {column!r} holds {shown(wrong[0])}; token ids are integers, at least 0"
        )
    return token_ids
