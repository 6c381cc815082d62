"""Write `report.html` of a run: its curves and its last evaluation in one self-contained file."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, get_type_hints

import numpy as np
from pydantic import Field

from mtpkit.config.checked import checked, from_file
from mtpkit.errors import UserError
from mtpkit.files import is_there, read_text, write_file
from mtpkit.training.bootstrap import show_interval
from mtpkit.training.metrics import METRICS, read_metrics
from mtpkit.training.run import read_best

REPORT = "report.html"
MAX_POINTS = 500
"""Largest number of points of a drawn curve; longer curves are averaged down to it."""

Curve = tuple[str, list[float], list[float]]
"""Label, steps, values."""
Panel = tuple[str, list[Curve], tuple[float | None, float | None]]
"""Title, curves, range of the vertical axis (None: the range of the values)."""


Number = Annotated[float, Field(allow_inf_nan=True, title="a number")]
"""A logged number, which may be NaN if the loss of the run became NaN."""
Interval = tuple[Number, Number]
"""Ends of a 95% interval."""


@checked("logged training step")
class TrainLine:
    """A logged training step."""

    step: int
    loss: Number
    lr: Number
    tokens_per_s: Number
    conditional_acceptance: list[Number]
    """Rate per depth, greedy decoding."""
    acceptance_length: Number
    mfu: Number | None = None


@checked("evaluation")
class Summary:
    """Loss and acceptance on held-out tokens, see
    `mtpkit.training.evaluation.Evaluation.to_dict`."""

    steps: int
    departures: Number
    loss: Number
    conditional_acceptance: list[Number]
    acceptance_length: Number
    sampling_acceptance_length: Number
    draft_sampling_acceptance_length: Number
    acceptance_length_interval: Interval | None = None
    sampling_acceptance_length_interval: Interval | None = None
    draft_sampling_acceptance_length_interval: Interval | None = None


@checked("evaluation")
class Evaluated(Summary):
    """An `Evaluation.to_dict`: the summary of all sources together, and the summary of each
    source."""

    sources: dict[str, Summary] = Field(kw_only=True)
    step: int = 0


_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
  color: #222 }
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
    "steps": lambda found: f"{found.steps:,}",
    "departures": lambda found: f"{found.departures:.1%}",
    "loss": lambda found: f"{found.loss:.4f}",
    "conditional acceptance": lambda found: " ".join(
        f"{rate:.1%}" for rate in found.conditional_acceptance
    ),
    "acceptance length": lambda found: _length(
        found.acceptance_length, found.acceptance_length_interval
    ),
    "acceptance length at temperature 1": lambda found: _length(
        found.sampling_acceptance_length, found.sampling_acceptance_length_interval
    ),
    "acceptance length at temperature 1, sampled drafts": lambda found: _length(
        found.draft_sampling_acceptance_length, found.draft_sampling_acceptance_length_interval
    ),
}
"""Columns of a table of evaluations, each with a function that formats its cells."""
LEGEND = (
    "Steps: those of greedy decoding along the text. Departures: tokens that are not the base's"
    " greedy choice; a step ends there, and the next one begins. Acceptance length: tokens per step"
    " of greedy decoding, with its 95% interval over prompts. At temperature 1: the expected"
    " acceptance length when the base samples and drafts are the heads' best tokens (the engine's"
    " default), or when drafts are sampled from the heads too (draft_sampling)."
)


def _length(length: float, interval: Interval | None) -> str:
    """An acceptance length, with its interval in a second line."""
    if interval is None:
        return f"{length:.3f}"
    return f"{length:.3f}\n{show_interval(interval)}"


def table_rows(evaluation: Mapping[str, object]) -> list[list[str]]:
    """Table rows of an `Evaluation.to_dict`: name and `COLUMNS` of each source, then of all if
    there are several."""
    return _rows(from_file(Evaluated, _known(Evaluated, evaluation), "evaluation"))


def _rows(found: Evaluated) -> list[list[str]]:
    named = dict(found.sources)
    if len(named) > 1:
        named["all"] = found
    return [[name, *(show(values) for show in COLUMNS.values())] for name, values in named.items()]


def write_report(directory: Path) -> Path:
    """Write the report of a run from its metrics, and return its path.

    Raises:
        UserError: the directory has no metrics, or its files are not as a run writes them.
        StorageError: writing failed.
    """
    from jinja2 import Environment

    lines = read_lines(directory / METRICS)
    if not lines:
        raise UserError(
            f"{directory} has no {METRICS}, or an empty one; name the output of a training run"
        )
    evals = [line for line in lines if isinstance(line, Evaluated)]
    panels = _panels([line for line in lines if isinstance(line, TrainLine)], evals)
    settings = directory / "config.yaml"
    page = (
        Environment(autoescape=True)
        .from_string(_TEMPLATE)
        .render(
            title=directory.resolve().name,
            state=_state(directory, lines[-1].step),
            curves=[_draw(*panel) for panel in panels if any(steps for _, steps, _ in panel[1])],
            step=evals[-1].step if evals else None,
            columns=["source", *COLUMNS],
            rows=_rows(evals[-1]) if evals else [],
            legend=LEGEND,
            settings=read_text(settings) if is_there(settings) else "",
        )
    )
    write_file(directory / REPORT, page)
    return directory / REPORT


def read_lines(path: Path) -> list[TrainLine | Evaluated]:
    """Parse the lines that `read_metrics` finds in a metrics file, in order.

    Raises:
        UserError: a line is not as a run writes it; names file, line and key.
    """
    kinds: dict[str, type[TrainLine | Evaluated]] = {"train": TrainLine, "eval": Evaluated}
    lines = []
    for number, values in enumerate(read_metrics(path), start=1):
        kind = kinds[values["kind"]]
        where = f"{path}, line {number}"
        lines.append(from_file(kind, _known(kind, values), where))
    return lines


def _known(kind: type, values: object) -> object:
    """Keep only the entries of a JSON object that are fields of the record `kind`, also inside each
    of its sources."""
    if not isinstance(values, dict):
        return values
    known = {name: values[name] for name in get_type_hints(kind) if name in values}
    if isinstance(sources := known.get("sources"), dict):
        known["sources"] = {name: _known(Summary, found) for name, found in sources.items()}
    return known


def _state(directory: Path, step: int) -> str:
    text = f"{directory}, step {step:,}"
    if best := read_best(directory):
        text += (
            f"; best held-out acceptance length {best.acceptance_length:.3f} at step"
            f" {best.iteration:,}"
        )
    return text


def _panels(train: list[TrainLine], evals: list[Evaluated]) -> list[Panel]:
    measured: Sequence[TrainLine | Evaluated] = evals or train
    where = "held-out" if evals else "training"
    rates = [
        _curve(
            f"depth {depth + 1}",
            [(line.step, line.conditional_acceptance[depth]) for line in measured],
        )
        for depth in range(min(len(line.conditional_acceptance) for line in measured))
    ]
    names = dict.fromkeys(name for line in evals for name in line.sources)
    lengths = [
        _curve(
            name,
            [
                (line.step, line.sources[name].acceptance_length)
                for line in evals
                if name in line.sources
            ],
        )
        for name in names
    ]
    if len(names) != 1:
        lengths.append(_curve("all", [(line.step, line.acceptance_length) for line in measured]))
    losses = [
        _curve("training", [(line.step, line.loss) for line in train]),
        _curve("held-out", [(line.step, line.loss) for line in evals]),
    ]
    decodings = [
        _curve("greedy", [(line.step, line.acceptance_length) for line in evals]),
        _curve("sampling", [(line.step, line.sampling_acceptance_length) for line in evals]),
        _curve(
            "drawn drafts", [(line.step, line.draft_sampling_acceptance_length) for line in evals]
        ),
    ]
    used = [(line.step, line.mfu) for line in train if line.mfu is not None]
    return [
        ("loss", losses, (None, None)),
        (f"conditional acceptance, {where}", rates, (0, 1)),
        (f"acceptance length, {where}", lengths, (None, None)),
        ("acceptance length by decoding, held-out", decodings, (None, None)),
        ("learning rate", [_curve("", [(line.step, line.lr) for line in train])], (None, None)),
        ("tokens/s", [_curve("", [(line.step, line.tokens_per_s) for line in train])], (0, None)),
        ("model FLOPs utilization", [_curve("", used)], (0, 1)),
    ]


def _curve(label: str, points: Sequence[tuple[int, float]]) -> Curve:
    return label, _thin([step for step, _ in points]), _thin([value for _, value in points])


def _thin(numbers: Sequence[float]) -> list[float]:
    if len(numbers) <= MAX_POINTS:
        return list(numbers)
    return [
        float(part.mean()) for part in np.array_split(np.asarray(numbers, dtype=float), MAX_POINTS)
    ]


def _draw(title: str, curves: list[Curve], limits: tuple[float | None, float | None]) -> str:
    """A panel as an svg element."""
    import matplotlib

    # a figure without pyplot needs no display and leaves no state
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(5.2, 3.1))
        # computing these takes as long as drawing
        figure.subplots_adjust(left=0.13, right=0.98, bottom=0.15, top=0.91)
        axes = figure.subplots()
        for label, steps, values in curves:
            marker = "o" if len(steps) < 30 else ""
            axes.plot(steps, values, label=label, marker=marker, markersize=3, linewidth=1.2)
        axes.set(title=title, xlabel="step", ylim=limits)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if any(label for label, *_ in curves):
            axes.legend(frameon=False)
        file = io.StringIO()
        figure.savefig(
            file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    return file.getvalue()[file.getvalue().index("<svg") :]  # without the XML header
