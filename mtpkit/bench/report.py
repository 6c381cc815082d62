"""What a measurement found, as a table for people, one JSON object for programs, and a picture."""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mtpkit.bench.plot import draw
from mtpkit.checkpoint.atomic import staged_file, storage_errors
from mtpkit.errors import MtpkitError, listed


@dataclass(frozen=True)
class Row:
    """One batch size and K."""

    batch_size: int
    """Requests that run at once."""
    k: int
    """Drafts a step."""
    tokens_per_s: float
    """Generated tokens over the wall time of `LLM.generate`, prefill and detokenization included."""
    speedup: float
    """`tokens_per_s` over that of K = 0 at the same batch size."""
    acceptance_length: float
    """1 + mean accepted drafts a decode step and request."""
    conditional_acceptance: list[float]
    """Per depth, the rate at which a draft is accepted where all before it were."""
    identical: float
    """Share of the prompts whose tokens are those of K = 0 at the same batch size."""


@dataclass(frozen=True)
class Report:
    """All rows of a measurement, and what was measured."""

    rows: list[Row]
    model: str
    device: str
    dtype: str
    commit: str | None
    before: list[Row] | None = None
    """Rows of the same model with untrained heads."""
    settings: dict[str, Any] | None = None
    """Kept in the file alone."""

    def to_dict(self) -> dict[str, Any]:
        """The object that commands print as their last line."""
        values = asdict(self)
        del values["settings"]
        if self.before is None:
            del values["before"]
        return values

    def tables(self, style: box.Box = box.SIMPLE_HEAD) -> list[Table]:
        """The rows for people, those of untrained heads in a table of their own."""
        if self.before is None:
            return [_table("speedup", self.rows, style)]
        return [_table("untrained heads", self.before, style), _table("trained heads", self.rows, style)]

    def save(self, directory: Path) -> None:
        """Write report.json, report.md and report.png, each whole or not at all.

        Raises:
            StorageError: writing failed.
        """
        picture = io.BytesIO()
        draw(self.rows, self.before, f"{self.model}, {self.dtype}, {self.device}", picture)
        files = {
            "report.json": (json.dumps({**self.to_dict(), "settings": self.settings}, indent=2) + "\n").encode(),
            "report.md": self._markdown().encode(),
            "report.png": picture.getvalue(),
        }
        with storage_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                with staged_file(directory / name) as staging:
                    staging.write_bytes(content)

    def _markdown(self) -> str:
        console = Console(file=io.StringIO(), width=120, color_system=None)
        for table in self.tables(box.MARKDOWN):
            console.print(f"{table.title}:")
            table.title = None
            console.print(table)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"

    def require_identical(self) -> None:
        """The gate for greedy fp32 decoding, which drafts must not change.

        Raises:
            MtpkitError: rows whose tokens are not K = 0's, all of them named.
        """
        changed = [f"{1 - r.identical:.0%} at batch {r.batch_size}, K = {r.k}" for r in self.rows if r.identical < 1]
        if changed:
            raise MtpkitError(
                f"drafts changed the tokens of greedy {self.dtype} decoding, in a share of the prompts of "
                f"{listed(changed, separator='; ')}: the speedups are of no worth until that is mended"
            )


def _table(title: str, rows: Sequence[Row], style: box.Box) -> Table:
    columns: dict[str, Callable[[Row], str]] = {
        "batch": lambda row: str(row.batch_size),
        "K": lambda row: str(row.k),
        "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
        "speedup": lambda row: f"{row.speedup:.2f}x",
        "acceptance length": lambda row: f"{row.acceptance_length:.2f}" if row.k else "-",
        "conditional acceptance": lambda row: " ".join(f"{rate:.0%}" for rate in row.conditional_acceptance) or "-",
        "same tokens": lambda row: f"{row.identical:.0%}",
    }
    table = Table(title=title, box=style)
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(show(row) for show in columns.values()))
    return table
