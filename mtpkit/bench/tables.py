"""What commands print: tables that fit the terminal, and one JSON object for programs."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table

WIDTH = 80
"""Characters of a line where the output is no terminal."""
EMPTY = "-"
"""Text of a cell without a value."""
_BETWEEN = 2
"""Characters between two columns: a space and the box's own."""
_MOST_FOR_KEYS = 0.6
"""Most of a line that the columns which name the case may take."""


class WideTable(Table):
    """A table of text whose first columns name a case, so that its further columns can be shown in
    several tables."""

    def __init__(self, *columns: Column, keys: int, title: str | None = None) -> None:
        """Make an empty table.

        Args:
            keys: number of columns, from the left, that name a row's case.
        """
        super().__init__(*columns, title=title, box=box.SIMPLE_HEAD)
        self.keys = keys

    def parts(self, width: int) -> list[Table]:
        """Tables of at most `width` characters that together show all columns, each of them after
        the key columns.

        Headings take several lines if need be, cells only one, unless they have line breaks or are
        too wide: the widest key column leaves room for the others. Columns in which every cell is
        empty are left out.
        """
        keys = [(column, _width(column)) for column in self.columns[: self.keys]]
        taken = sum(own + _BETWEEN for _, own in keys)
        excess = taken - round(width * _MOST_FOR_KEYS)
        if excess > 0:
            widest = max(range(len(keys)), key=lambda index: keys[index][1])
            column, own = keys[widest]
            keys[widest] = (column, max(1, own - excess))
            taken -= excess

        groups: list[list[tuple[Column, int]]] = []
        room = 0
        for column in self.columns[self.keys :]:
            if set(column.cells) == {EMPTY}:
                continue
            # A cell that is wider than a line is folded; the table must not be wider than the
            # terminal.
            own = min(_width(column), width - taken - _BETWEEN)
            if not groups or own + _BETWEEN > room:
                groups.append([])
                room = width - taken
            groups[-1].append((column, own))
            room -= own + _BETWEEN

        return [_part([*keys, *group]) for group in groups or [[]]]


def _part(columns: Sequence[tuple[Column, int]]) -> Table:
    """A table of some columns of another one, each with its width."""
    part = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column, width in columns:
        part.add_column(column.header, justify=column.justify, overflow="fold", width=width)
    for cells in zip(*(column.cells for column, _ in columns), strict=True):
        part.add_row(*cells)
    return part


def _width(column: Column) -> int:
    """Characters that a column needs so that no cell and no word of its heading is broken."""
    lines = [line for cell in column.cells for line in str(cell).splitlines()]
    return max(map(cell_len, [*str(column.header).split(), *lines]), default=1)


def print_tables(tables: Sequence[WideTable]) -> None:
    """Print tables to standard output: as wide as the terminal, or in `WIDTH` characters where
    there is none."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    for table in tables:
        if table.title:
            # A title holds names that the user gave, whose brackets Rich would take for markup.
            console.print(table.title, style="italic", markup=False, highlight=False)
        for part in table.parts(console.width):
            console.print(part)


def print_object(values: Any, asked: bool) -> None:
    """Print a JSON object as one line, if it was asked for, or if the output is no terminal: a
    program may read it."""
    if asked or not sys.stdout.isatty():
        print(json.dumps(values, default=str))
