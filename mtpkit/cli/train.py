"""`mtpkit train`: train MTP heads on a frozen base."""

import itertools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtpkit.cli.command import Command, new_app
from mtpkit.cli.options import changed_flags

if TYPE_CHECKING:
    from mtpkit.training.config.settings import TrainConfig

app = new_app()


def _print_settings(wanted: bool) -> None:
    if wanted:
        from mtpkit.training.config.describe import describe_settings

        typer.echo(describe_settings())
        raise typer.Exit


@app.command(cls=Command)
def train(
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of settings; see examples/train_tiny.yaml. Without: the defaults."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help=(
                "Settings that replace the file's: loss.kind=tv. Required: model, output and"
                " data.train, in the file or here."
            ),
        ),
    ] = None,
    settings: Annotated[
        bool,
        typer.Option(
            "--settings",
            is_eager=True,
            callback=_print_settings,
            help="List all settings with their defaults, and exit.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print what the run would train, on what, with what memory and time; and exit.",
        ),
    ] = False,
) -> None:
    """Train the heads of a base, or resume a stopped run; under torchrun, on all of its
    processes."""
    from mtpkit.training.config.reading import load_config

    # wrong settings are refused before torch is imported
    loaded = load_config(config, overrides or ())
    import torch.distributed as dist

    from mtpkit.training.log import keep
    from mtpkit.training.loop import describe_run
    from mtpkit.training.loop import train as run_training

    if dry_run:
        lines = describe_run(loaded)
    else:
        output = run_training(loaded)
        lines = describe_end(loaded)
        if dist.get_rank() == 0:
            keep(output, "\n".join(lines))
    if dist.get_rank() == 0:
        typer.echo("\n".join(lines))


def describe_end(config: "TrainConfig") -> list[str]:
    """Last lines of a run's output: its directory, its best checkpoint, and commands that export
    and evaluate it."""
    from mtpkit.checkpoint import latest_iteration
    from mtpkit.data.samples import Columns
    from mtpkit.training.metrics import METRICS, read_metrics
    from mtpkit.training.run import BEST, read_best

    directory = Path(config.output)
    step = latest_iteration(directory)
    lines = [f"trained heads with their base: {directory}, step {step} of {config.steps}"]
    model = directory
    if best := read_best(directory):
        length = f"held-out acceptance length {best.acceptance_length:.3f}"
        if best.iteration == step:
            lines.append(f"the best step is the last one: {length}")
        else:
            model = directory / BEST
            evals = [line for line in read_metrics(directory / METRICS) if line["kind"] == "eval"]
            last = [line["acceptance_length"] for line in evals if line["step"] == step]
            ahead = f", ahead of step {step} with {last[-1]:.3f}" if last else ""
            lines.append(f"the best step is {best.iteration}, in {model}: {length}{ahead}")
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    exports = (directory.with_name(f"{directory.absolute().name}-hf{number}") for number in numbers)
    # The command is printed to be run as it is, and an export refuses a directory that is there.
    free = next(place for place in exports if not place.exists())
    lines.append(f"export it:   {_command('convert', 'export', model, free)}")
    data = config.data
    columns = [
        (name, getattr(data, f"{name}_column"), default)
        for name, default in vars(Columns()).items()
    ]
    options = [f"--{name}-column={value}" for name, value, default in columns if value != default]
    options += changed_flags(data.options)
    measure = _command(
        "acceptance", "--model", model, "--data", *(data.eval or data.train), *options
    )
    return [*lines, f"evaluate it: {measure}"]


def _command(*parts: object) -> str:
    return shlex.join(["mtpkit", *map(str, parts)])
