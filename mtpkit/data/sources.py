"""Files of text, JSON lines and Parquet, read into samples."""

import glob
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtpkit.errors import UserError

TABLE_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
"""What `datasets` calls the format of a file with columns; a file of any other suffix is plain text."""
TEXT_SUFFIXES = {".txt", ".text", ".md", ".rst", ".py"}
"""Text files that are picked from a folder; a file named by itself or by a glob may have any suffix."""
NAMING = "--text-column and the like; data.text_column=.. in training"
"""How columns are named."""
MANIFEST = "mtpkit_data.json"
"""File that makes a directory one of `mtpkit data prepare`."""


@dataclass(frozen=True)
class Columns:
    """Names of the columns that are read: a conversation, else prompt and response, else text.

    The first row of a file decides; a row without messages among conversations may have prompt and response. A file
    without the default `response` may call it `completion`.
    """

    text: str = "text"
    prompt: str = "prompt"
    response: str = "response"
    messages: str = "messages"


@dataclass(frozen=True)
class Sample:
    """One text to learn, which may follow a prompt that is only context; or a conversation.

    Tokens that a model has generated count more than their text: they are learnt as they are by whoever has the same
    tokenizer.
    """

    text: str = ""
    prompt: str = ""
    messages: list[dict[str, Any]] | None = None
    """Of a chat template, in the form of transformers; the assistant's are learnt."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions that a conversation may call."""
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    tokenizer: str = ""
    """Fingerprint of the tokenizer that the token ids belong to."""
    complete: bool = True
    """False: the text was cut off, so that no end-of-sequence token follows."""
    name: str = field(default="", compare=False)
    """Where it comes from: the file and the row, counted from 1."""
    problem: str = field(default="", compare=False)
    """Why there is no text, if it is known."""


@dataclass(frozen=True)
class Source:
    """A named part of the data, whose acceptance can be reported by itself."""

    name: str
    files: tuple[Path, ...] = ()
    prepared: Path | None = None
    """A directory of `mtpkit data prepare`, in place of files; `name` is empty if it keeps the names of its own."""


def find_sources(paths: Iterable[str | Path]) -> list[Source]:
    """What `paths` name: files, folders (searched through), globs (`**` too), directories of prepared data.

    A source is called what its file or folder is, without suffix, or as `name=path` says. A file that is named twice
    belongs to the first source.

    Raises:
        UserError: paths where nothing is, or nothing but empty files; it names all of them.
    """
    sources: list[Source] = []
    taken: set[Path] = set()
    problems = []
    for given in paths:
        name, path = _split_name(given)
        if (path / MANIFEST).is_file():
            sources.append(Source(name if str(given).startswith(f"{name}=") else "", prepared=path))
            continue
        found, problem = _find(path)
        if problem:
            problems.append(problem)
        found = [file for file in dict.fromkeys(found) if file not in taken]
        taken.update(found)
        if found:
            sources.append(Source(name, tuple(found)))
    if problems:
        raise UserError(f"data: {'; '.join(problems)}; mend the data paths")
    if not sources:
        raise UserError("data: no files; name files, folders or globs")
    return sources


def find_files(paths: Iterable[str | Path]) -> list[Path]:
    """The files of `find_sources`, in order and each once.

    Raises:
        UserError: as `find_sources`; prepared data, which has no text.
    """
    sources = find_sources(paths)
    prepared = [str(source.prepared) for source in sources if source.prepared]
    if prepared:
        raise UserError(f"data: {', '.join(prepared)} is prepared data, tokens without text; name the files it is from")
    return [file for source in sources for file in source.files]


def _split_name(given: str | Path) -> tuple[str, Path]:
    """Name and path of `name=path`, or of a path."""
    match = re.fullmatch(r"([\w.-]+)=(.+)", str(given), re.DOTALL)
    if match and not Path(given).exists():
        return match[1], Path(match[2])
    path = Path(given)
    plain = [part for part in path.parts if not glob.has_magic(part)]
    if len(plain) < len(path.parts) and not path.exists():
        return (plain[-1] if plain else str(path)), path
    return (path.resolve().name if path.is_dir() else path.stem), path


def _find(path: Path) -> tuple[list[Path], str]:
    """Files that hold something, and what is wrong if there are none."""
    if path.is_file():
        found, problem = [path], f"{path} is empty"
    elif path.is_dir():
        found = sorted(p for p in path.rglob("*") if _is_data(p.relative_to(path)) and p.is_file())
        inside = [p.parent for p in found if p.name == MANIFEST]
        if inside:
            return [], f"folder {path} holds prepared data in {inside[0]}, to be named by itself"
        suffixes = " ".join(sorted(TEXT_SUFFIXES | set(TABLE_FORMATS)))
        problem = f"folder {path} has no data files ({suffixes}); a glob may name others"
    else:
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        problem = f"{path} holds no data" if found else f"{path} does not exist"
    # Among others an empty file is ordinary (an __init__.py).
    found = [p for p in found if p.stat().st_size]
    return found, "" if found else problem


def _is_data(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and (path.suffix.lower() in TEXT_SUFFIXES or path.suffix.lower() in TABLE_FORMATS)


def read_samples(files: Iterable[Path], columns: Columns | None = None) -> Iterator[Sample]:
    """Samples of `files` in order: the rows of a file with columns, the whole of a text file.

    Raises:
        UserError: a file that cannot be read as what its suffix says, or has none of the columns; it is named.
    """
    for file in files:
        make: Callable[[dict[str, Any], str], Sample] | None = None
        for name, row in read_rows(file):
            if "" in row:
                yield Sample(row[""], name=name)
                continue
            make = make or _choose(file, row, columns or Columns())
            yield make(row, name)


def read_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, row) of a file with columns; the text of another file as the only column "".

    Raises:
        UserError: it cannot be read as what its suffix says.
    """
    kind = TABLE_FORMATS.get(file.suffix.lower())
    if kind is None:
        yield str(file), {"": _read_text(file)}
        return
    for number, row in enumerate(_read_table(file, kind), start=1):
        yield f"{file}:{number}", row


def read_messages(row: dict[str, Any], column: str, name: str) -> tuple[list[dict[str, Any]], list[dict] | None]:
    """Messages and tools of a row, either of which may be JSON in a text.

    Raises:
        UserError: they are something else.
    """
    messages, tools = (_parse(row.get(key), key, name) or [] for key in (column, "tools"))
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        raise UserError(f"data: {name}: {column!r} must be a list of messages, each with role and content")
    return messages, tools or None


def lacking(row: dict[str, Any], column: str) -> str:
    """What a row without a column has instead; readers give null for what a row lacks and others have."""
    others = ", ".join(key for key, value in row.items() if value is not None)
    return f"no column {column!r}; it has: {others}" if others else "empty row"


def _parse(value: Any, column: str, name: str) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UserError(f"data: {name}: {column!r} is a text that is not JSON: {error}") from error
    if not isinstance(value, list | None):
        raise UserError(f"data: {name}: {column!r} holds {type(value).__name__}, not a list")
    return value


def _choose(file: Path, row: dict[str, Any], columns: Columns) -> Callable[[dict[str, Any], str], Sample]:
    """How the rows of a file that begins with `row` become samples."""
    response = columns.response
    if response == Columns.response and response not in row:
        response = "completion"

    def pair(row: dict[str, Any], name: str) -> Sample:
        sample = _sample(row, response, name)
        return _with_tokens(replace(sample, prompt=_text(row, columns.prompt, name)), row)

    def conversation(row: dict[str, Any], name: str) -> Sample:
        if row.get(columns.messages) is not None:
            messages, tools = read_messages(row, columns.messages, name)
            return _with_tokens(Sample(messages=messages, tools=tools, name=name), row)
        # An answer to a prompt without messages, among others.
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
        f"data: {file} has the columns {', '.join(row)}, but neither {columns.messages!r}, nor both {columns.prompt!r}"
        f" and {columns.response!r}, nor {columns.text!r}; rename them, or name the ones to use ({NAMING})"
    )


def _with_tokens(sample: Sample, row: dict[str, Any]) -> Sample:
    """A sample with what `mtpkit data regenerate` adds to it, if it did."""
    prompt, completion = row.get("prompt_token_ids"), row.get("completion_token_ids")
    known = isinstance(prompt, list) and isinstance(completion, list)
    return replace(
        sample,
        prompt_token_ids=prompt if known else None,
        completion_token_ids=completion if known else None,
        tokenizer=str(row.get("tokenizer") or ""),
        complete=row.get("finish_reason") != "length",
    )


def _sample(row: dict[str, Any], column: str, name: str) -> Sample:
    """The text of a column, or why there is none."""
    problem = lacking(row, column) if row.get(column) is None else ""
    return Sample(_text(row, column, name), name=name, problem=problem)


def _text(row: dict[str, Any], column: str, name: str) -> str:
    value = row.get(column)
    if not isinstance(value, str | None):
        raise UserError(f"data: {name}: column {column!r} holds {type(value).__name__}, not text")
    return value or ""


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").removeprefix("\ufeff")  # the byte order mark of other systems
    except UnicodeDecodeError as error:
        raise UserError(f"data: {file} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _read_table(file: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Rows of one file, through `datasets`; whatever it raises becomes one error that names the file."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"data: reading {file} needs the package datasets: {error}; pip install datasets") from error

    # It logs a broken file before it raises.
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    # `datasets` takes a path for a pattern.
    pattern = glob.escape(str(file.absolute()))
    try:
        rows = datasets.load_dataset(kind, data_files=pattern, split="train", streaming=True)
        # All messages of a Parquet file have the same keys, those that were not given are null.
        yield from map(_drop_nulls, rows) if kind == "parquet" else rows
    except StopIteration as error:
        raise UserError(f"data: {file} has no rows") from error
    except Exception as error:  # each of its readers raises its own kinds
        broken = _broken_line(file) if file.suffix.lower() == ".jsonl" else ""
        raise UserError(broken or f"data: {file} cannot be read as {kind}: {error}") from error


def _broken_line(file: Path) -> str:
    """What is wrong with the first line that is no JSON object, which the reader only counts within a block.

    "": none is, or the file cannot be read so; objects may also spread over lines.
    """
    number = 0
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip() and not isinstance(json.loads(line), dict):
                    return f"data: {file}:{number} is not an object with columns" if number > 1 else ""
    except ValueError as error:
        return f"data: {file}:{number} is not JSON: {getattr(error, 'msg', error)}" if number > 1 else ""
    except (OSError, RecursionError):
        return ""
    return ""


def _drop_nulls(value: Any, top: bool = True) -> Any:
    """Without the null entries inside of columns."""
    if isinstance(value, dict):
        return {key: _drop_nulls(entry, False) for key, entry in value.items() if top or entry is not None}
    return [_drop_nulls(entry, False) for entry in value] if isinstance(value, list) else value
