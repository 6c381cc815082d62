"""The picture of a speedup report."""

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpkit.bench.report import Row

_LINES = ("#1f5fa8", "#d9822b", "#2e8b57", "#8e44ad", "#b03a48", "#555555")
_BEFORE = "#999999"


def draw(rows: Sequence["Row"], before: Sequence["Row"] | None, title: str, file: IO[bytes]) -> None:
    """Draw speedup and acceptance length over K, and conditional acceptance over depth, as a PNG.

    Args:
        before: rows of untrained heads, drawn grey.
    """
    from matplotlib.figure import Figure  # a figure without pyplot needs no display and leaves no state

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = figure.subplots(1, 3)
    sizes = sorted({row.batch_size for row in rows})
    for color, size in zip(_cycle(_LINES, len(sizes)), sizes, strict=True):
        own = sorted((row for row in rows if row.batch_size == size), key=lambda row: row.k)
        _lines(panels, own, color, f"batch {size}")
    if before:
        _lines(panels, sorted(before, key=lambda row: row.k), _BEFORE, "untrained heads", "--")
    panels[0].axhline(1, color="black", linewidth=0.8)
    names = [("speedup over K = 0", "K"), ("acceptance length", "K"), ("conditional acceptance", "depth")]
    for panel, (name, axis) in zip(panels, names, strict=True):
        panel.set(title=name, xlabel=axis, ylim=(0, None))
        panel.locator_params(axis="x", integer=True)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[2].set_ylim(0, 1)
    panels[0].legend(frameon=False, loc="lower right")
    figure.suptitle(title, fontsize=9)
    figure.savefig(file, format="png", dpi=100)


def _lines(panels: Any, rows: Sequence["Row"], color: str, label: str, style: str = "-") -> None:
    """The rows of one batch size, in each panel."""
    how: dict[str, Any] = dict(color=color, label=label, linestyle=style, marker="o", markersize=4)
    ks = [row.k for row in rows]
    panels[0].plot(ks, [row.speedup for row in rows], **how)
    panels[1].plot(ks, [row.acceptance_length for row in rows], **how)
    rates = rows[-1].conditional_acceptance
    panels[2].plot(range(1, len(rates) + 1), rates, **how)


def _cycle(colors: Sequence[str], count: int) -> list[str]:
    return [colors[index % len(colors)] for index in range(count)]
