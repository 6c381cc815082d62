"""`mtpkit train`: train MTP heads on a frozen base."""

from pathlib import Path
from typing import Annotated

import typer

from mtpkit.cli.command import Command, new_app

app = new_app()


def _print_settings(wanted: bool) -> None:
    if wanted:
        from mtpkit.training.config.describe import describe_settings

        typer.echo(describe_settings())
        raise typer.Exit


@app.command(cls=Command)
def train(
    config: Annotated[
        Path | None, typer.Option(help="YAML file of settings; see examples/train_tiny.yaml. Without: the defaults.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's: loss.kind=tv"),
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
) -> None:
    """Train the heads of a base, or go on with a run that was stopped; under torchrun on all of its processes."""
    import torch.distributed as dist

    from mtpkit.training import load_config
    from mtpkit.training import train as run_training
    from mtpkit.training.ending import describe_end

    loaded = load_config(config, overrides or ())
    run_training(loaded)
    if dist.get_rank() == 0:
        typer.echo("\n".join(describe_end(loaded)))
