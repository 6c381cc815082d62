"""Files of text, JSON lines and Parquet, read into samples."""

import glob
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpkit.errors import UserError

TABLE_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
"""What `datasets` calls the format of a file with columns; a file of any other suffix is plain text."""
TEXT_SUFFIXES = {".txt", ".text", ".md", ".rst", ".py"}
"""Text files that are picked from a folder; a file named by itself or by a glob may have any suffix."""


@dataclass(frozen=True)
class Columns:
    """Names of the columns that are read: prompt and response where a file has both, its text otherwise."""

    text: str = "text"
    prompt: str = "prompt"
    response: str = "response"


@dataclass(frozen=True)
class Sample:
    """One text to learn, which may follow a prompt that is only context."""

    text: str
    prompt: str = ""


def find_files(paths: Iterable[str | Path]) -> list[Path]:
    """The files that `paths` name, in order and each once: files, folders (searched through), globs (`**` too).

    Raises:
        UserError: paths where nothing is, or nothing but empty files; it names all of them.
    """
    files: dict[Path, None] = {}
    problems = []
    for path in map(Path, paths):
        if path.is_file():
            found, problem = [path], f"{path} is empty"
        elif path.is_dir():
            found = sorted(p for p in path.rglob("*") if _is_data(p.relative_to(path)) and p.is_file())
            suffixes = " ".join(sorted(TEXT_SUFFIXES | set(TABLE_FORMATS)))
            problem = f"folder {path} has no data files ({suffixes}); a glob may name others"
        else:
            found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
            problem = f"{path} holds no data" if found else f"{path} does not exist"
        # Among others an empty file is ordinary (an __init__.py).
        found = [p for p in found if p.stat().st_size]
        if not found:
            problems.append(problem)
        files.update(dict.fromkeys(found))
    if problems:
        raise UserError(f"data: {'; '.join(problems)}; mend the data paths")
    if not files:
        raise UserError("data: no files; name files, folders or globs")
    return list(files)


def read_samples(files: Iterable[Path], columns: Columns | None = None) -> Iterator[Sample]:
    """Samples of `files` in order: the rows of a file with columns, the whole of a text file.

    Raises:
        UserError: a file that cannot be read as what its suffix says, or has neither set of columns; it is named.
    """
    for file in files:
        kind = TABLE_FORMATS.get(file.suffix.lower())
        if kind is None:
            yield Sample(_read_text(file))
        else:
            yield from _read_table(file, kind, columns or Columns())


def _is_data(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and (path.suffix.lower() in TEXT_SUFFIXES or path.suffix.lower() in TABLE_FORMATS)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"data: {file} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _read_table(file: Path, kind: str, columns: Columns) -> Iterator[Sample]:
    names: tuple[str, ...] = ()
    for row in _rows(file, kind):
        names = names or _choose(file, row, columns)
        values = [row.get(name) for name in names]
        wrong = [name for name, value in zip(names, values, strict=True) if not isinstance(value, str | None)]
        if wrong:
            raise UserError(f"data: {file}: column {wrong[0]!r} holds {type(row[wrong[0]]).__name__}, not text")
        *prompt, text = [value or "" for value in values]
        yield Sample(text, *prompt)


def _choose(file: Path, row: dict[str, Any], columns: Columns) -> tuple[str, ...]:
    """The columns to read, the text to learn last."""
    if columns.prompt in row and columns.response in row:
        return columns.prompt, columns.response
    if columns.text in row:
        return (columns.text,)
    raise UserError(
        f"data: {file} has the columns {', '.join(row)}, but neither {columns.text!r} nor both {columns.prompt!r} and"
        f" {columns.response!r}; rename them or name the ones to use"
    )


def _rows(file: Path, kind: str) -> Iterator[dict[str, Any]]:
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
        yield from datasets.load_dataset(kind, data_files=pattern, split="train", streaming=True)
    except StopIteration as error:
        raise UserError(f"data: {file} has no rows") from error
    except Exception as error:  # each of its readers raises its own kinds
        raise UserError(f"data: {file} cannot be read as {kind}: {error}") from error
