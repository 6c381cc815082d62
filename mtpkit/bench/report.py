"""What a benchmark found: tables for people, one JSON object for programs, and perhaps a picture."""

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from mtpkit.bench.machine import Machine
from mtpkit.files import staged_file, storage_errors

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_WIDTH = 180
"""Columns of text that goes to a file."""


def significant(value: float, digits: int = 4) -> str:
    """A number with so many digits, or all of those before the point: 15125, 1.512, 0.001512."""
    decimals = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(0, decimals)}f}"


def tabulate[Row](title: str, columns: Mapping[str, Callable[[Row], str]], rows: Sequence[Row]) -> Table:
    """A table of rows; `columns` says, by heading, what is shown of each row."""
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for heading in columns:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(show(row) for show in columns.values()))
    return table


class Report:
    """How a report is printed and saved; subclasses say what it holds."""

    name: str
    """Name of its files."""
    machine: Machine | None
    """Where the numbers were measured; None: nothing was timed, or the object alone says it."""

    def to_dict(self, whole: bool = False) -> dict[str, object]:
        """The JSON object, which commands print as their last line; `whole`: with what the file alone holds."""
        raise NotImplementedError

    def tables(self) -> list[Table]:
        """The rows for people."""
        raise NotImplementedError

    def picture(self) -> bytes | None:
        """A PNG of the rows; None: there is none."""
        return None

    def show(self) -> None:
        """Print the tables, and the JSON object as the last line."""
        self.show_tables()
        print(json.dumps(self.to_dict()))

    def show_tables(self) -> None:
        """Print the tables, and the machine in a line."""
        console = Console()
        if not console.is_terminal:  # no reason to squeeze what goes to a file
            console.width = _WIDTH
        for table in self.tables():
            console.print(table)
        if self.machine:
            print(self.machine)

    def save(self, directory: Path) -> None:
        """Write NAME.json, NAME.md and, where there is a picture, NAME.png, each whole or not at all.

        Raises:
            StorageError: writing failed.
        """
        files = {
            "json": (json.dumps(self.to_dict(whole=True), indent=2) + "\n").encode(),
            "md": self._markdown().encode(),
            "png": self.picture(),
        }
        with storage_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            for suffix, content in files.items():
                if content is not None:
                    with staged_file(directory / f"{self.name}.{suffix}") as staging:
                        staging.write_bytes(content)

    def _markdown(self) -> str:
        """The tables, each with its title in a line above it, and the machine in the last line."""
        lines = []
        for table in self.tables():
            text: TextIO = io.StringIO()
            title, table.title, table.box = table.title, None, box.MARKDOWN
            Console(file=text, width=_WIDTH, color_system=None).print(table)
            text.seek(0)
            lines += [str(title), "", *(line.strip() for line in text.read().strip().splitlines()), ""]
        lines += [str(self.machine), ""] if self.machine else []
        return "\n".join(lines)


@dataclass(frozen=True)
class Result[Row: "DataclassInstance"](Report):
    """One table of rows of one dataclass, and what they are about."""

    name: str
    """Of the benchmark."""
    title: str
    columns: Mapping[str, Callable[[Row], str]]
    """What the table shows of a row, by heading."""
    rows: Sequence[Row]
    machine: Machine | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    details: Sequence[str] = ()
    """Fields of a row that are kept in the file alone."""

    def to_dict(self, whole: bool = False) -> dict[str, object]:
        """The benchmark's name, the rows, the machine's fields and the settings."""
        machine = asdict(self.machine) if self.machine else {}
        rows = [{k: v for k, v in asdict(row).items() if whole or k not in self.details} for row in self.rows]
        return {"benchmark": self.name, "rows": rows, **machine, "settings": {**self.settings}}

    def tables(self) -> list[Table]:
        """The one table."""
        return [tabulate(self.title, self.columns, self.rows)]
