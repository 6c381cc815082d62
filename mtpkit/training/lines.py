"""The lines of a run's metrics file as records, checked when they are read."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mtpkit.errors import UserError, shown
from mtpkit.files import read_record
from mtpkit.training.metrics import read_metrics


@dataclass(frozen=True)
class TrainLine:
    """A training step that was logged."""

    step: int
    loss: float
    lr: float
    tokens_per_s: float
    conditional_acceptance: list[float]
    """Rate per depth, greedy decoding."""
    acceptance_length: float
    mfu: float | None = None


@dataclass(frozen=True)
class Summary:
    """What was found on held-out tokens, see `mtpkit.training.evaluation.summary`."""

    positions: int
    loss: float
    conditional_acceptance: list[float]
    acceptance_length: float
    sampling_acceptance_length: float
    draft_sampling_acceptance_length: float


@dataclass(frozen=True)
class Evaluated:
    """An `Evaluation.to_dict`: each source, and all together."""

    overall: Summary
    sources: dict[str, Summary]

    @classmethod
    def read(cls, values: Mapping[str, object], where: str) -> "Evaluated":
        """Check and read the values.

        Raises:
            UserError: names `where` and what is wrong.
        """
        sources = values.get("sources")
        if not isinstance(sources, dict):
            raise UserError(f"{where}: sources is {shown(sources)}, must be an object")
        named = {name: _read(Summary, found, f"{where}: sources[{name!r}]") for name, found in sources.items()}
        return cls(_read(Summary, values, where), named)


@dataclass(frozen=True)
class EvalLine:
    """An evaluation on held-out data."""

    step: int
    found: Evaluated


def read_lines(path: Path) -> list[TrainLine | EvalLine]:
    """The lines of a metrics file in order, as `read_metrics` finds them.

    Raises:
        UserError: a line is not as a run writes it; names file, line and key.
    """
    lines: list[TrainLine | EvalLine] = []
    for number, values in enumerate(read_metrics(path), start=1):
        where = f"{path}, line {number}"
        if values["kind"] == "train":
            lines.append(_read(TrainLine, values, where))
        else:
            lines.append(EvalLine(values["step"], Evaluated.read(values, where)))
    return lines


def _read[Record](kind: type[Record], values: object, where: str) -> Record:
    """The fields that the record has, of values that may have more."""
    if isinstance(values, Mapping):
        names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        values = {name: value for name, value in values.items() if name in names}
    return read_record(kind, values, where)
