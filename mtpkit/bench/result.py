"""The rows that a benchmark found, as a table for people and as one JSON object for programs."""

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mtpkit.bench.machine import Machine
from mtpkit.checkpoint.atomic import storage_errors, write_file

_WIDTH = 180
"""Columns of text that goes to a file."""


def significant(value: float, digits: int = 4) -> str:
    """A number with so many digits, or all of those before the point: 15125, 1.512, 0.001512."""
    decimals = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(0, decimals)}f}"


@dataclass(frozen=True)
class Result[Row]:
    """Rows of one dataclass, and what they are about."""

    name: str
    """Of the benchmark; its files are called so."""
    title: str
    columns: Mapping[str, Callable[[Row], str]]
    """What the table shows of a row, by heading."""
    rows: Sequence[Row]
    machine: Machine | None = None
    """None: nothing was timed."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    details: Sequence[str] = ()
    """Fields of a row that are kept in the file alone."""

    def to_dict(self, whole: bool = False) -> dict[str, Any]:
        """The object that commands print as their last line; with its details if it is to be `whole`."""
        machine = asdict(self.machine) if self.machine else {}
        objects: list[Any] = list(self.rows)
        rows = [{k: v for k, v in asdict(row).items() if whole or k not in self.details} for row in objects]
        return {"benchmark": self.name, "rows": rows, **machine, "settings": {**self.settings}}

    def table(self, style: box.Box = box.SIMPLE_HEAD) -> Table:
        """The rows for people."""
        table = Table(title=self.title, box=style)
        for heading in self.columns:
            table.add_column(heading, justify="right")
        for row in self.rows:
            table.add_row(*(show(row) for show in self.columns.values()))
        return table

    def show(self) -> None:
        """Print the table, and the object as the last line."""
        self.show_table()
        print(json.dumps(self.to_dict()))

    def show_table(self) -> None:
        """Print the table, and the machine in a line."""
        console = Console()
        if not console.is_terminal:  # no reason to squeeze what goes to a file
            console.width = _WIDTH
        console.print(self.table())
        if self.machine:
            print(self.machine)

    def save(self, directory: Path) -> None:
        """Write NAME.json and NAME.md, each whole or not at all; the table has its title in a line above it.

        Raises:
            StorageError: writing failed.
        """
        console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
        table = self.table(box.MARKDOWN)
        table.title = None
        console.print(table)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        with storage_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        write_file(directory / f"{self.name}.json", json.dumps(self.to_dict(whole=True), indent=2) + "\n")
        lines = [self.title, "", *(line.strip() for line in text.strip().splitlines())]
        if self.machine:
            lines += ["", str(self.machine)]
        write_file(directory / f"{self.name}.md", "\n".join(lines) + "\n")
