"""Read rows of files with file and row number: JSON lines, JSON, CSV and Parquet; a text file is one row."""

import codecs
import csv
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from mtpkit.errors import UserError, counted, listed
from mtpkit.files import JsonObject, parse_json, read_text

Row = JsonObject
Numbered = Iterator[tuple[int, Row]]

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
"""Suffixes of text files that are picked from a folder."""
MORE_TEXT_SUFFIXES = frozenset(
    """
    .markdown .tex .org .html .htm .css .xml .yaml .yml .toml .ini .cfg .log .diff .patch .cmake .mk
    .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .m .java .kt .scala .cs .fs .go .rs .swift .zig .js .mjs .jsx .ts
    .tsx .rb .php .pl .lua .r .jl .hs .ml .ex .erl .clj .lisp .el .sh .bash .sql .f90 .asm .s .v .vhd .tcl .vim
    """.split()  # noqa: SIM905 (as a list it would take one line per suffix)
)
"""Suffixes of text and source code that is read only if a path or a glob names it."""
_FIRST_ROWS = 256
"""Number of first rows whose columns are taken as the columns of the file."""
_ROWS_AT_ONCE = 256
"""Rows of a Parquet file in memory at a time."""


def kind_problem(file: Path) -> str:
    """An error message for a file whose suffix is not supported; "" if the suffix is supported."""
    suffix = file.suffix.lower()
    if suffix in _READERS or suffix in TEXT_SUFFIXES or suffix in MORE_TEXT_SUFFIXES:
        return ""
    return (
        f"{file} is of an unknown kind: it must end in {' '.join(TABLE_SUFFIXES)} (columns), in "
        f"{' '.join(TEXT_SUFFIXES)}, or as source code does, such as .c or .js; rename text to .txt"
    )


def read_rows(file: Path, text_column: str) -> Iterator[tuple[str, Row]]:
    """Yield (name, row); the name is `FILE:NUMBER`, with the line number, or the row number in Parquet and JSON lists.

    Each row has all columns of the file's first rows, with None for columns that it lacks. A text file is one row with
    the whole text in the column `text_column`.

    Raises:
        UserError: the file cannot be read as its suffix says, or has no rows.
    """
    if problem := kind_problem(file):
        raise UserError(f"data: {problem}")
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        yield str(file), {text_column: _require_text(read_text(file), str(file))}
        return
    rows = reader(file)
    try:
        first = list(islice(rows, _FIRST_ROWS))
        if not first:
            raise UserError(f"data: {file} has no rows")
        none = dict.fromkeys(key for _, row in first for key in row)
        for number, row in chain(first, rows):
            yield f"{file}:{number}", {**none, **row}
    except OSError as error:
        raise UserError(f"data: {file} cannot be read: {error.strerror or error}") from error


def _read_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line numbers from 1, and lines with their line breaks."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}:{number}"
            try:
                text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode()
            except UnicodeDecodeError as error:
                raise UserError(f"data: {where} is not UTF-8 text ({error.reason}); save the file as UTF-8") from error
            yield number, _require_text(text, where)


def _require_text(text: str, where: str) -> str:
    if "\0" in text:
        raise UserError(f"data: {where} has a NUL byte, so it is UTF-16 or not text; save the file as UTF-8")
    return text


def _read_jsonl(file: Path) -> Numbered:
    for number, line in _read_lines(file):
        if not line.isspace():
            yield number, _require_row(parse_json(line, f"data: {file}:{number}"), f"{file}:{number}")


def _read_json(file: Path) -> Numbered:
    """Read a list of objects, one object, or one object per line."""
    line = next((line for _, line in _read_lines(file) if not line.isspace()), "{}")
    try:
        by_line = isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        by_line = False
    if by_line:
        yield from _read_jsonl(file)
        return
    value = parse_json(_require_text(read_text(file), str(file)), f"data: {file}")
    for number, row in enumerate(value if isinstance(value, list) else [value], start=1):
        yield number, _require_row(row, f"{file}:{number}")


def _require_row(value: object, where: str) -> Row:
    if not isinstance(value, dict):
        raise UserError(f'data: {where} is not an object with columns; write a row as {{"text": ...}}')
    return value


def _read_csv(file: Path) -> Numbered:
    """Read rows under a header; all cells are text, and an empty cell is None."""
    csv.field_size_limit(2**31 - 1)  # the default is 128 KiB
    lines = (line for _, line in _read_lines(file))
    reader = csv.reader(lines, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", strict=True)
    header: list[str] | None = None
    number = 1
    try:
        for cells in reader:
            if cells and header is None:
                header = _require_distinct(cells, file)
            elif cells and header is not None:
                if len(cells) != len(header):
                    raise UserError(
                        f"data: {file}:{number} has {counted(len(cells), 'cell')}, but the header has {len(header)}; "
                        "put cells with separators or line breaks in quotes"
                    )
                yield number, {key: cell or None for key, cell in zip(header, cells, strict=True)}
            number = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"data: {file}:{number} cannot be read as CSV: {error}") from error


def _require_distinct(names: list[str], file: Path) -> list[str]:
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise UserError(f"data: {file} has more than one column {listed(map(repr, twice))}; rename them")
    return names


def _read_parquet(file: Path) -> Numbered:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"data: reading {file} needs the package pyarrow: {error}; pip install pyarrow") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            _require_distinct(table.schema_arrow.names, file)
            for batch in table.iter_batches(_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield number, _drop_nulls(row)
    except UserError:
        raise
    except Exception as error:  # pyarrow has exceptions of its own, and passes on those of types that it converts
        text = textwrap.shorten(str(error), 200)
        raise UserError(f"data: {file} cannot be read as parquet after row {number}: {text}") from error


def _drop_nulls(value: Any, top: bool = True) -> Any:
    """Drop null entries inside columns: in a Parquet file all messages have the same keys, and absent ones are null."""
    if isinstance(value, dict):
        return {key: _drop_nulls(entry, False) for key, entry in value.items() if top or entry is not None}
    if isinstance(value, list):
        return [_drop_nulls(entry, False) if isinstance(entry, dict | list) else entry for entry in value]
    return value


_READERS: dict[str, Callable[[Path], Numbered]] = {
    ".csv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".tsv": _read_csv,
}
TABLE_SUFFIXES = tuple(_READERS)
"""Suffixes of files with columns."""
