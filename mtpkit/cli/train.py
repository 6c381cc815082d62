"""`mtpkit train`: train MTP heads on a frozen base."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def train(
    config: Annotated[Path, typer.Option(help="YAML file of settings; see examples/train_tiny.yaml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's: loss.kind=tv"),
    ] = None,
) -> None:
    """Train the heads of a base, or go on with a run that was stopped; under torchrun on all of its processes."""
    from mtpkit.training import load_config

    settings = load_config(config, overrides or ())

    from mtpkit.training import train as run_training

    checkpoint = run_training(settings)
    typer.echo(f"trained heads with their base: {checkpoint}")
