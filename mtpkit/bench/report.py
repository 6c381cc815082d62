"""Reports of benchmarks: tables for people, one JSON object for programs, and perhaps a picture."""

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, get_type_hints

from rich import box
from rich.console import Console
from tqdm import tqdm

from mtpkit.bench.machine import Machine
from mtpkit.bench.tables import EMPTY, WideTable, print_object, print_tables
from mtpkit.files import staged_file, storage_errors

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_WIDTH = 1000
"""Width in characters of tables in files, more than any table needs."""


def significant(value: float, digits: int = 4) -> str:
    """Format a number with `digits` significant digits, but all digits before the point: 15125,
    1.512, 0.001512."""
    decimals = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(0, decimals)}f}"


@dataclass(frozen=True)
class Column:
    """Annotates a field of a row that tables show: `seconds: Annotated[float, Column("s",
    ".1f")]`."""

    heading: str
    show: str | Callable[[Any], str] = ""
    """Format of the value, or a function of the row; None becomes "-"."""
    key: bool = False
    """The column, one of the first, tells rows apart: it is repeated where a table is shown in
    parts."""

    def cell(self, row: "DataclassInstance", name: str) -> str:
        """Text of a row's field."""
        value = getattr(row, name)
        if value is None:
            return EMPTY
        return self.show(row) if callable(self.show) else format(value, self.show)


def tabulate(
    title: str, kind: type["DataclassInstance"], rows: Sequence["DataclassInstance"]
) -> WideTable:
    """A table of rows of one dataclass, with the fields that are annotated with a `Column`."""
    hints = get_type_hints(kind, include_extras=True)
    columns = {
        name: mark
        for name, hint in hints.items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, Column)
    }

    table = WideTable(keys=sum(shown.key for shown in columns.values()), title=title)
    for shown in columns.values():
        table.add_column(shown.heading, justify="right")
    for row in rows:
        table.add_row(*(shown.cell(row, name) for name, shown in columns.items()))
    return table


class Report:
    """Prints and saves a report, whose content subclasses hold."""

    name: str
    """Name of the report's files."""
    machine: Machine | None
    """Machine of the measurement; None: nothing was timed, or only the JSON object names it."""

    def to_dict(self, whole: bool = False) -> dict[str, object]:
        """The JSON object that commands print as their last line; `whole`: with the fields that
        only the file holds."""
        raise NotImplementedError

    def tables(self) -> list[WideTable]:
        """The rows for people."""
        raise NotImplementedError

    def picture(self) -> bytes | None:
        """A PNG of the rows; None: there is none."""
        return None

    def show(self, as_json: bool = False) -> None:
        """Print the tables and, as the last line, the JSON object; in a terminal only if it is
        asked for."""
        self.show_tables()
        print_object(self.to_dict(), as_json)

    def show_tables(self) -> None:
        """Print the tables, and the machine in one line."""
        print_tables(self.tables())
        if self.machine:
            print(self.machine)

    def save(self, directory: Path) -> None:
        """Write NAME.json, NAME.md and, if there is a picture, NAME.png, each whole or not at all.

        Raises:
            StorageError: writing failed.
        """
        # All contents are made before the first file is written: an error in one of them leaves all
        # files of an earlier run as they were.
        files = {
            "json": (json.dumps(self.to_dict(whole=True), indent=2, default=str) + "\n").encode(),
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
            # A Markdown table has no title: it becomes a line of its own.
            title = table.title
            table.title = None
            table.box = box.MARKDOWN
            Console(file=text, width=_WIDTH, color_system=None).print(table)
            text.seek(0)
            lines += [
                str(title),
                "",
                *(line.strip() for line in text.read().strip().splitlines()),
                "",
            ]
        lines += [str(self.machine), ""] if self.machine else []
        return "\n".join(lines)


@dataclass(frozen=True)
class Result[Row: "DataclassInstance"](Report):
    """Report with one table of rows of one dataclass, and with their machine and settings."""

    name: str
    """Name of the benchmark."""
    title: str
    kind: type[Row]
    rows: Sequence[Row] = ()
    machine: Machine | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    details: Sequence[str] = ()
    """Fields of a row that only the file holds."""

    def measure[Case](
        self,
        cases: Sequence[Case],
        measure: Callable[[Case], Row],
        label: Callable[[Case], str],
        keep: "Callable[[Result[Row]], object] | None" = None,
        quiet: bool = False,
    ) -> "Result[Row]":
        """Measure each case and return a result with the new rows in place of the old; a progress
        bar shows the labels.

        Args:
            keep: is given the result after each row, so that a long run that is interrupted leaves
                the finished rows.
            quiet: show no bar, as on ranks that do not report.
        """
        result = self
        with tqdm(cases, desc=self.name, disable=True if quiet else None) as progress:
            for index, case in enumerate(progress):
                progress.set_postfix_str(label(case))
                # A second pass over the same cases, such as the trace after all timing, replaces
                # their rows.
                rows = [*result.rows]
                rows[index : index + 1] = [measure(case)]
                result = replace(result, rows=rows)
                if keep:
                    keep(result)
        return result

    def to_dict(self, whole: bool = False) -> dict[str, object]:
        """The benchmark's name, the rows, the machine's fields and the settings."""
        machine = asdict(self.machine) if self.machine else {}
        rows = [
            {k: v for k, v in asdict(row).items() if whole or k not in self.details}
            for row in self.rows
        ]
        return {"benchmark": self.name, "rows": rows, **machine, "settings": {**self.settings}}

    def tables(self) -> list[WideTable]:
        """The one table."""
        return [tabulate(self.title, self.kind, self.rows)]
