"""`mtpkit report`: rebuild the report of a training run."""

from pathlib import Path
from typing import Annotated

import typer

from mtpkit.cli.command import Command, new_app

app = new_app()


@app.command(cls=Command)
def report(output: Annotated[Path, typer.Argument(help="Output of a training run.")]) -> None:
    """Rebuild OUTPUT/report.html from the run's metrics: curves of loss, acceptance, learning rate
    and tokens/s."""
    from mtpkit.training.report import write_report

    print(f"wrote {write_report(output)}")
