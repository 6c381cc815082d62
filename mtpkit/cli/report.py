"""`mtpkit report`: the report of a training run, made again."""

from pathlib import Path
from typing import Annotated

import typer

from mtpkit.cli.command import Command, new_app

app = new_app()


@app.command(cls=Command)
def report(output: Annotated[Path, typer.Argument(help="Output of a training run.")]) -> None:
    """Make OUTPUT/report.html again: curves of loss, acceptance, learning rate and tokens/s, from its metrics."""
    from mtpkit.training.report import write_report

    print(f"wrote {write_report(output)}")
