"""What a run says last: where it is, which of its checkpoints is best, and the commands that go on from there."""

import itertools
import shlex
from pathlib import Path

from mtpkit.checkpoint import latest_iteration
from mtpkit.training.config import DataConfig, TrainConfig
from mtpkit.training.metrics import METRICS, read_metrics
from mtpkit.training.run import BEST, read_best

COLUMNS = ("text_column", "prompt_column", "response_column", "messages_column")


def describe_end(config: TrainConfig) -> list[str]:
    """Lines about the run in `config.output`, which has a checkpoint; its commands work as they stand."""
    directory = Path(config.output)
    step = latest_iteration(directory)
    lines, model = [f"trained heads with their base: {directory}, step {step} of {config.steps}"], directory
    if best := read_best(directory):
        length = f"held-out acceptance length {best.acceptance_length:.3f}"
        if best.iteration == step:
            lines.append(f"the best step is the last one: {length}")
        else:
            model = directory / BEST
            lines.append(f"the best step is {best.iteration}, in {model}: {length}{_last(directory, step)}")
    lines.append(f"export it:   {_command('convert', 'export', model, _free_name(directory))}")
    data = config.data.eval or config.data.train
    measure = _command("acceptance", "--model", model, "--data", *data, *_columns(config.data))
    return [*lines, f"evaluate it: {measure}"]


def _last(directory: Path, step: int | None) -> str:
    """How far the last step is behind the best one, if it was evaluated."""
    lines = [line for line in read_metrics(directory / METRICS) if line["kind"] == "eval" and line["step"] == step]
    return f", ahead of step {step} with {lines[-1]['acceptance_length']:.3f}" if lines else ""


def _columns(data: DataConfig) -> list[str]:
    """Options for columns that have other names than by default."""
    return [
        f"--{name.replace('_', '-')}={value}"
        for name in COLUMNS
        if (value := getattr(data, name)) != getattr(DataConfig, name)
    ]


def _free_name(directory: Path) -> Path:
    """Where an export of a run would replace nothing: beside it."""
    names = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    places = (directory.with_name(f"{directory.absolute().name}-hf{name}") for name in names)
    return next(place for place in places if not place.exists())


def _command(*parts: object) -> str:
    return shlex.join(["mtpkit", *map(str, parts)])
