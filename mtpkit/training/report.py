"""`report.html` of a run: its curves and its last evaluation in one file that needs nothing else."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtpkit.checkpoint.atomic import write_file
from mtpkit.errors import UserError
from mtpkit.files import is_there, read_text
from mtpkit.training.metrics import METRICS, read_metrics
from mtpkit.training.run import BEST_FILE, read_best

REPORT = "report.html"
MAX_POINTS = 500
"""Points of a curve; more are averaged."""

Curve = tuple[str, list[float], list[float]]
"""Label, steps, values."""

_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 1rem }
.curves svg { width: 100%; height: auto }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ state }}</p>
<div class="curves">{% for svg in curves %}<div>{{ svg | safe }}</div>{% endfor %}</div>
{% if rows %}
<h2>Held-out acceptance at step {{ step }}</h2>
<table>
<tr>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
<p>{{ legend }}</p>
{% endif %}
<details><summary>Settings</summary><pre>{{ settings }}</pre></details>
</body>
</html>
"""

COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "positions": lambda values: f"{values['positions']:,}",
    "loss": lambda values: f"{values['loss']:.4f}",
    "conditional acceptance": lambda values: " ".join(f"{rate:.1%}" for rate in values["conditional_acceptance"]),
    "AL": lambda values: f"{values['acceptance_length']:.3f}",
    "AL, sampling": lambda values: f"{values['sampling_acceptance_length']:.3f}",
    "AL, drawn drafts": lambda values: f"{values['draft_sampling_acceptance_length']:.3f}",
}
"""Columns of a table of evaluations, and how each is shown from a `summary`."""
LEGEND = (
    "AL: acceptance length, tokens a step, under greedy decoding. Sampling: expected at temperature 1, drafts being "
    "the heads' best tokens (the engine's default); drawn drafts: sampled from the heads (draft_sampling)."
)


def table_rows(evaluation: dict[str, Any]) -> list[list[str]]:
    """Source and `COLUMNS` of each source, and of all together if there are several; of an `Evaluation.to_dict`."""
    named = dict(evaluation["sources"])
    if len(named) > 1:
        named["all"] = evaluation
    return [[name, *(show(values) for show in COLUMNS.values())] for name, values in named.items()]


def write_report(directory: Path) -> Path:
    """Make the report of a run from its metrics, whole or not at all; returns the file.

    Raises:
        UserError: the directory has no metrics, or what is in it is not as a run writes it.
        StorageError: writing failed.
    """
    from jinja2 import Environment

    lines = read_metrics(directory / METRICS)
    if not lines:
        raise UserError(f"{directory} has no {METRICS} with anything in it; name the output of a training run")
    try:
        values = _values(directory, lines)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{directory / METRICS} or {BEST_FILE} is not as a run writes it: {type(error).__name__} {error}; remove "
            "the lines of other programs"
        ) from error
    write_file(directory / REPORT, Environment(autoescape=True).from_string(_TEMPLATE).render(values))
    return directory / REPORT


def _values(directory: Path, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What the template shows."""
    panels = _panels(
        [line for line in lines if line["kind"] == "train"], [line for line in lines if line["kind"] == "eval"]
    )
    last = next((line for line in reversed(lines) if line["kind"] == "eval"), None)
    settings = directory / "config.yaml"
    return dict(
        title=directory.resolve().name,
        state=_state(directory, lines),
        curves=[_draw(panel) for panel in panels if any(steps for _, steps, _ in panel.curves)],
        step=last and last["step"],
        columns=["source", *COLUMNS],
        rows=table_rows(last) if last else [],
        legend=LEGEND,
        settings=read_text(settings) if is_there(settings) else "",
    )


def _state(directory: Path, lines: list[dict[str, Any]]) -> str:
    text = f"{directory}, step {lines[-1]['step']:,}"
    if best := read_best(directory):
        text += f"; best held-out acceptance length {best.acceptance_length:.3f} at step {best.iteration:,}"
    return text


@dataclass(frozen=True)
class _Panel:
    """One plot over steps."""

    title: str
    curves: list[Curve]
    limits: tuple[float | None, float | None] = (None, None)
    """Of the values that are shown; None: as they come."""


def _panels(train: list[dict[str, Any]], evals: list[dict[str, Any]]) -> list[_Panel]:
    measured, where = (evals, "held-out") if evals else (train, "training")
    depths = range(len(measured[0]["conditional_acceptance"]))
    rates = [
        _curve(measured, lambda line, k=depth: line["conditional_acceptance"][k], f"depth {depth + 1}")  # type: ignore[misc]
        for depth in depths
    ]
    names = dict.fromkeys(name for line in evals for name in line["sources"])
    by_source = [
        _curve(
            [line for line in evals if name in line["sources"]],
            lambda line, n=name: line["sources"][n]["acceptance_length"],  # type: ignore[misc]
            name,
        )
        for name in names
    ]
    if len(names) != 1:
        by_source.append(_curve(measured, lambda line: line["acceptance_length"], "all"))
    decodings = {"greedy": "", "sampling": "sampling_", "drawn drafts": "draft_sampling_"}
    return [
        _Panel("loss", [_plain(train, "loss", "training"), _plain(evals, "loss", "held-out")]),
        _Panel(f"conditional acceptance, {where}", rates, limits=(0, 1)),
        _Panel(f"acceptance length, {where}", by_source),
        _Panel(
            "acceptance length by decoding, held-out",
            [_plain(evals, f"{prefix}acceptance_length", label) for label, prefix in decodings.items()],
        ),
        _Panel("learning rate", [_plain(train, "lr", "")]),
        _Panel("tokens/s", [_plain(train, "tokens_per_s", "")], limits=(0, None)),
        _Panel(
            "model FLOPs utilization", [_plain([line for line in train if "mfu" in line], "mfu", "")], limits=(0, 1)
        ),
    ]


def _plain(lines: list[dict[str, Any]], key: str, label: str) -> Curve:
    return _curve(lines, lambda line: line[key], label)


def _curve(lines: list[dict[str, Any]], value: Callable[[dict[str, Any]], float], label: str) -> Curve:
    steps, values = [line["step"] for line in lines], [value(line) for line in lines]
    return label, _thin(steps), _thin(values)


def _thin(numbers: Sequence[float]) -> list[float]:
    if len(numbers) <= MAX_POINTS:
        return list(numbers)
    return [float(part.mean()) for part in np.array_split(np.asarray(numbers, dtype=float), MAX_POINTS)]


def _draw(panel: _Panel) -> str:
    """The panel as an svg element."""
    import matplotlib
    from matplotlib.figure import Figure  # a figure without pyplot needs no display and leaves no state

    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(5.2, 3.1), layout="constrained")
        axes = figure.subplots()
        for label, steps, values in panel.curves:
            marker = "o" if len(steps) < 30 else ""
            axes.plot(steps, values, label=label, marker=marker, markersize=3, linewidth=1.2)
        axes.set(title=panel.title, xlabel="step", ylim=panel.limits)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if any(label for label, *_ in panel.curves):
            axes.legend(frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return file.getvalue()[file.getvalue().index("<svg") :]  # without the head of an XML file
