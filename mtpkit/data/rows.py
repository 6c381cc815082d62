"""Read rows of files with file and row number: JSON lines, JSON, CSV and Parquet; a text file is
one row."""

import codecs
import csv
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from mtpkit.errors import UserError, counted, listed
from mtpkit.files import JsonObject, parse_json, read_text

Row = JsonObject


class RowError(UserError):
    """A row that cannot be used, while the rows after it can be."""


Numbered = Iterator[tuple[int, Row | RowError]]

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
"""Suffixes of text files that are picked from a folder."""
MORE_TEXT_SUFFIXES = frozenset(
    """
    .markdown .tex .org .html .htm .css .xml .yaml .yml .toml .ini .cfg .log .diff .patch .cmake
    .mk .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .m .java .kt .scala .cs .fs .go .rs
    .swift .zig .js .mjs .jsx .ts .tsx .rb .php .pl .lua .r .jl .hs .ml .ex .erl .clj .lisp .el
    .sh .bash .sql .f90 .asm .s .v .vhd .tcl .vim
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


@dataclass(frozen=True)
class Table:
    """The rows of a file."""

    columns: tuple[str, ...]
    """Columns of the first rows."""
    rows: Iterator[tuple[str, Row | RowError]]
    """Each row with its name, `FILE:NUMBER`: the line number, or the row number in Parquet and JSON
    lists. A row has only the columns that it has in the file. In place of a row that cannot be read
    stands the error."""
    blanks: bool = False
    """Whether the file has a cell for every column of every row, so that an empty cell may be one
    that the row lacks. Rows have no empty cells then."""


def read_table(file: Path, text_column: str) -> Table:
    """Read the rows of a file. A text file is one row with the whole text in the column
    `text_column`.

    Raises:
        UserError: the file cannot be read as its suffix says, or has no rows; some of it may be
            found only later, as the rows are read.
    """
    if problem := kind_problem(file):
        raise UserError(f"data: {problem}")
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        return Table((text_column,), iter([(str(file), _read_whole(file, text_column))]))
    rows = _named(file, reader(file))
    first = list(islice(rows, _FIRST_ROWS))
    if not first:
        raise UserError(f"data: {file} has no rows")
    columns = tuple(
        dict.fromkeys(key for _, row in first if not isinstance(row, RowError) for key in row)
    )
    # The first rows were read to learn the columns, and are rows too.
    every = chain(first, rows)
    return Table(columns, _filled(every), True) if reader in _WITH_BLANKS else Table(columns, every)


def _filled(rows: Iterator[tuple[str, Row | RowError]]) -> Iterator[tuple[str, Row | RowError]]:
    """Leave out empty cells."""
    for name, row in rows:
        if not isinstance(row, RowError):
            row = {key: cell for key, cell in row.items() if cell is not None}
        yield name, row


def _read_whole(file: Path, text_column: str) -> Row | RowError:
    try:
        return {text_column: _require_text(read_text(file), str(file))}
    except UserError as error:
        return RowError(str(error))


def _named(file: Path, rows: Numbered) -> Iterator[tuple[str, Row | RowError]]:
    try:
        for number, row in rows:
            yield f"{file}:{number}", row
    except OSError as error:
        raise UserError(f"data: {file} cannot be read: {error.strerror or error}") from error


def _read_lines(file: Path) -> Iterator[tuple[int, str | RowError]]:
    """Yield line numbers from 1, and lines with their line breaks, or what is wrong with them."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}:{number}"
            try:
                text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode()
                yield number, _require_text(text, where)
            except UnicodeDecodeError as error:
                yield (
                    number,
                    RowError(
                        f"data: {where} is not UTF-8 text ({error.reason}); save the file as UTF-8"
                    ),
                )
            except RowError as error:
                yield number, error


def _readable(lines: Iterator[tuple[int, str | RowError]]) -> Iterator[str]:
    """Yield lines of a file whose lines cannot be told apart from rows; raises what is wrong with
    any of them."""
    for _, line in lines:
        if isinstance(line, RowError):
            raise UserError(str(line))
        yield line


def _require_text(text: str, where: str) -> str:
    if "\0" in text:
        raise RowError(
            f"data: {where} has a NUL byte, so it is UTF-16 or not text; save the file as UTF-8"
        )
    return text


def _read_jsonl(file: Path) -> Numbered:
    for number, line in _read_lines(file):
        if isinstance(line, RowError):
            yield number, line
        elif not line.isspace():
            yield number, _parse_row(line, f"{file}:{number}")


def _parse_row(line: str, where: str) -> Row | RowError:
    try:
        return _as_row(parse_json(line, f"data: {where}"), where)
    except UserError as error:
        return RowError(str(error))


def _read_json(file: Path) -> Numbered:
    """Read a list of objects, one object, or one object per line."""
    line = next((line for line in _readable(_read_lines(file)) if not line.isspace()), "{}")
    try:
        by_line = isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        by_line = False
    if by_line:
        yield from _read_jsonl(file)
        return
    value = parse_json(_require_text(read_text(file), str(file)), f"data: {file}")
    for number, row in enumerate(value if isinstance(value, list) else [value], start=1):
        yield number, _as_row(row, f"{file}:{number}")


def _as_row(value: object, where: str) -> Row | RowError:
    if not isinstance(value, dict):
        return RowError(
            f'data: {where} is not an object with columns; write a row as {{"text": ...}}'
        )
    return value


def _read_csv(file: Path) -> Numbered:
    """Read rows under a header; all cells are text, and an empty cell is None."""
    csv.field_size_limit(2**31 - 1)  # the default is 128 KiB
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
    reader = csv.reader(_readable(_read_lines(file)), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    number = 1
    try:
        for cells in reader:
            if cells and header is None:
                header = _require_distinct(cells, file)
            elif cells and header is not None:
                yield number, _from_cells(header, cells, f"{file}:{number}")
            # A row in quotes may have several lines: the next one starts after its last.
            number = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"data: {file}:{number} cannot be read as CSV: {error}") from error


def _from_cells(header: list[str], cells: list[str], where: str) -> Row | RowError:
    if len(cells) != len(header):
        return RowError(
            f"data: {where} has {counted(len(cells), 'cell')}, but the header has {len(header)}; "
            "put cells with separators or line breaks in quotes"
        )
    return {key: cell or None for key, cell in zip(header, cells, strict=True)}


def _require_distinct(names: list[str], file: Path) -> list[str]:
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise UserError(
            f"data: {file} has more than one column {listed(map(repr, twice))}; rename them"
        )
    return names


def _read_parquet(file: Path) -> Numbered:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"data: reading {file} needs the package pyarrow: {error}; pip install pyarrow"
        ) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            _require_distinct(table.schema_arrow.names, file)
            for batch in table.iter_batches(_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield number, _drop_nulls(row)
    # An error of ours has its line already.
    except UserError:
        raise
    # pyarrow has exceptions of its own, and passes on those of types that it converts
    except Exception as error:
        text = textwrap.shorten(str(error), 200)
        raise UserError(
            f"data: {file} cannot be read as parquet after row {number}: {text}"
        ) from error


def _drop_nulls(value: Any, top: bool = True) -> Any:
    """Drop null entries inside columns: in a Parquet file all messages have the same keys, and
    absent ones are null."""
    if isinstance(value, dict):
        return {
            key: _drop_nulls(entry, False)
            for key, entry in value.items()
            if top or entry is not None
        }
    if isinstance(value, list):
        return [
            _drop_nulls(entry, False) if isinstance(entry, dict | list) else entry
            for entry in value
        ]
    return value


_READERS: dict[str, Callable[[Path], Numbered]] = {
    ".csv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".tsv": _read_csv,
}
_WITH_BLANKS = (_read_csv, _read_parquet)
TABLE_SUFFIXES = tuple(_READERS)
"""Suffixes of files with columns."""
