"""`report.html` of a run: its curves and its last evaluation in one file that needs nothing else."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mtpkit.errors import UserError
from mtpkit.files import is_there, read_text, write_file
from mtpkit.training.lines import EvalLine, Evaluated, Summary, TrainLine, read_lines
from mtpkit.training.metrics import METRICS
from mtpkit.training.run import read_best

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

COLUMNS: dict[str, Callable[[Summary], str]] = {
    "positions": lambda found: f"{found.positions:,}",
    "loss": lambda found: f"{found.loss:.4f}",
    "conditional acceptance": lambda found: " ".join(f"{rate:.1%}" for rate in found.conditional_acceptance),
    "AL": lambda found: f"{found.acceptance_length:.3f}",
    "AL, sampling": lambda found: f"{found.sampling_acceptance_length:.3f}",
    "AL, drawn drafts": lambda found: f"{found.draft_sampling_acceptance_length:.3f}",
}
"""Columns of a table of evaluations, and how each is shown."""
LEGEND = (
    "AL: acceptance length, tokens a step, under greedy decoding. Sampling: expected at temperature 1, drafts being "
    "the heads' best tokens (the engine's default); drawn drafts: sampled from the heads (draft_sampling)."
)


def table_rows(evaluation: Mapping[str, object]) -> list[list[str]]:
    """Source and `COLUMNS` of each source, and of all together if there are several; of an `Evaluation.to_dict`."""
    return _rows(Evaluated.read(evaluation, "evaluation"))


def _rows(found: Evaluated) -> list[list[str]]:
    named = dict(found.sources)
    if len(named) > 1:
        named["all"] = found.overall
    return [[name, *(show(values) for show in COLUMNS.values())] for name, values in named.items()]


def write_report(directory: Path) -> Path:
    """Make the report of a run from its metrics, whole or not at all; returns the file.

    Raises:
        UserError: the directory has no metrics, or what is in it is not as a run writes it.
        StorageError: writing failed.
    """
    from jinja2 import Environment

    lines = read_lines(directory / METRICS)
    if not lines:
        raise UserError(f"{directory} has no {METRICS} with anything in it; name the output of a training run")
    values = _values(directory, lines)
    write_file(directory / REPORT, Environment(autoescape=True).from_string(_TEMPLATE).render(values))
    return directory / REPORT


def _values(directory: Path, lines: list[TrainLine | EvalLine]) -> dict[str, object]:
    """What the template shows."""
    evals = [line for line in lines if isinstance(line, EvalLine)]
    panels = _panels([line for line in lines if isinstance(line, TrainLine)], evals)
    last, settings = evals[-1] if evals else None, directory / "config.yaml"
    return {
        "title": directory.resolve().name,
        "state": _state(directory, lines[-1].step),
        "curves": [_draw(panel) for panel in panels if any(steps for _, steps, _ in panel.curves)],
        "step": last and last.step,
        "columns": ["source", *COLUMNS],
        "rows": _rows(last.found) if last else [],
        "legend": LEGEND,
        "settings": read_text(settings) if is_there(settings) else "",
    }


def _state(directory: Path, step: int) -> str:
    text = f"{directory}, step {step:,}"
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


def _panels(train: list[TrainLine], evals: list[EvalLine]) -> list[_Panel]:
    overall = [(line.step, line.found.overall) for line in evals]
    learnt = [(line.step, line) for line in train]
    measured: Sequence[tuple[int, Summary | TrainLine]] = overall or learnt
    where = "held-out" if evals else "training"
    rates = [
        _curve([(step, line.conditional_acceptance[depth]) for step, line in measured], f"depth {depth + 1}")
        for depth in range(min(len(line.conditional_acceptance) for _, line in measured))
    ]
    names = dict.fromkeys(name for line in evals for name in line.found.sources)
    sources = {name: [(line.step, line.found.sources.get(name)) for line in evals] for name in names}
    lengths = [
        _curve([(step, found.acceptance_length) for step, found in points if found], name)
        for name, points in sources.items()
    ]
    if len(names) != 1:
        lengths.append(_curve([(step, line.acceptance_length) for step, line in measured], "all"))
    losses = [
        _curve([(step, line.loss) for step, line in learnt], "training"),
        _curve([(step, found.loss) for step, found in overall], "held-out"),
    ]
    decodings = [
        _curve([(step, found.acceptance_length) for step, found in overall], "greedy"),
        _curve([(step, found.sampling_acceptance_length) for step, found in overall], "sampling"),
        _curve([(step, found.draft_sampling_acceptance_length) for step, found in overall], "drawn drafts"),
    ]
    used = [(step, line.mfu) for step, line in learnt if line.mfu is not None]
    return [
        _Panel("loss", losses),
        _Panel(f"conditional acceptance, {where}", rates, limits=(0, 1)),
        _Panel(f"acceptance length, {where}", lengths),
        _Panel("acceptance length by decoding, held-out", decodings),
        _Panel("learning rate", [_curve([(step, line.lr) for step, line in learnt], "")]),
        _Panel("tokens/s", [_curve([(step, line.tokens_per_s) for step, line in learnt], "")], limits=(0, None)),
        _Panel("model FLOPs utilization", [_curve(used, "")], limits=(0, 1)),
    ]


def _curve(points: Sequence[tuple[int, float]], label: str) -> Curve:
    return label, _thin([step for step, _ in points]), _thin([value for _, value in points])


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
