"""The report of a speedup measurement: its rows, the gate that drafts must pass, and the picture."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import TYPE_CHECKING

from rich.table import Table

from mtpkit.bench.report import Report, tabulate
from mtpkit.errors import MtpkitError, listed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINES = ("#1f5fa8", "#d9822b", "#2e8b57", "#8e44ad", "#b03a48", "#555555")
_BEFORE = "#999999"


@dataclass(frozen=True)
class SpeedupRow:
    """One batch size and K."""

    batch_size: int
    """Requests that run at once."""
    k: int
    """Drafts per step."""
    tokens_per_s: float
    """Generated tokens over the wall time of `LLM.generate`, prefill and detokenization included."""
    speedup: float
    """`tokens_per_s` over that of K = 0 at the same batch size."""
    acceptance_length: float
    """1 + mean accepted drafts per decode step and request."""
    conditional_acceptance: list[float]
    """Per depth, the rate at which a draft is accepted where all before it were."""
    identical: float
    """Share of the prompts whose tokens are those of K = 0 at the same batch size."""


_COLUMNS: dict[str, Callable[[SpeedupRow], str]] = {
    "batch": lambda row: str(row.batch_size),
    "K": lambda row: str(row.k),
    "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
    "speedup": lambda row: f"{row.speedup:.2f}x",
    "acceptance length": lambda row: f"{row.acceptance_length:.2f}" if row.k else "-",
    "conditional acceptance": lambda row: " ".join(f"{rate:.0%}" for rate in row.conditional_acceptance) or "-",
    "same tokens": lambda row: f"{row.identical:.0%}",
}


@dataclass(frozen=True)
class SpeedupReport(Report):
    """All rows of a measurement, and what was measured."""

    rows: list[SpeedupRow]
    model: str
    device: str
    dtype: str
    commit: str | None
    before: list[SpeedupRow] | None = None
    """Rows of the same model with untrained heads."""
    settings: Mapping[str, object] | None = None
    """Kept in the file alone."""

    name = "report"
    machine = None

    def to_dict(self, whole: bool = False) -> dict[str, object]:
        """The fields, `before` only where it was measured."""
        left_out = {*([] if whole else ["settings"]), *(["before"] if self.before is None else [])}
        return {key: value for key, value in asdict(self).items() if key not in left_out}

    def tables(self) -> list[Table]:
        """The rows, those of untrained heads in a table of their own."""
        if self.before is None:
            return [tabulate("speedup", _COLUMNS, self.rows)]
        parts = {"untrained heads": self.before, "trained heads": self.rows}
        return [tabulate(title, _COLUMNS, rows) for title, rows in parts.items()]

    def picture(self) -> bytes:
        """Speedup and acceptance length over K, and conditional acceptance over depth, untrained heads in grey."""
        from matplotlib.figure import Figure  # a figure without pyplot needs no display and leaves no state

        figure = Figure(figsize=(11, 3.4), layout="constrained")
        panels = figure.subplots(1, 3)
        for color, size in zip(cycle(_LINES), sorted({row.batch_size for row in self.rows}), strict=False):
            _plot(panels, [row for row in self.rows if row.batch_size == size], color, f"batch {size}")
        if self.before:
            _plot(panels, self.before, _BEFORE, "untrained heads", "--")
        panels[0].axhline(1, color="black", linewidth=0.8)
        names = [("speedup over K = 0", "K"), ("acceptance length", "K"), ("conditional acceptance", "depth")]
        for panel, (name, axis) in zip(panels, names, strict=True):
            panel.set(title=name, xlabel=axis, ylim=(0, None))
            panel.locator_params(axis="x", integer=True)
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
        panels[2].set_ylim(0, 1)
        panels[0].legend(frameon=False, loc="lower right")
        figure.suptitle(f"{self.model}, {self.dtype}, {self.device}", fontsize=9)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=100)
        return file.getvalue()

    def require_identical(self) -> None:
        """Refuse drafts that changed the tokens of greedy fp32 decoding.

        Raises:
            MtpkitError: names every row whose tokens are not those of K = 0.
        """
        changed = [f"{1 - r.identical:.0%} at batch {r.batch_size}, K = {r.k}" for r in self.rows if r.identical < 1]
        if changed:
            raise MtpkitError(
                f"drafts changed the tokens of greedy {self.dtype} decoding, in a share of the prompts of "
                f"{listed(changed, separator='; ')}: the speedups are of no worth until that is mended"
            )


def _plot(panels: "Sequence[Axes]", rows: Sequence[SpeedupRow], color: str, label: str, style: str = "-") -> None:
    """Draw the rows of one batch size in each panel."""
    rows = sorted(rows, key=lambda row: row.k)
    rates, ks = rows[-1].conditional_acceptance, [row.k for row in rows]
    curves: list[tuple[Sequence[int], list[float]]] = [
        (ks, [row.speedup for row in rows]),
        (ks, [row.acceptance_length for row in rows]),
        (range(1, len(rates) + 1), rates),
    ]
    for panel, (x, y) in zip(panels, curves, strict=True):
        panel.plot(x, y, color=color, label=label, linestyle=style, marker="o", markersize=4)
