"""The `mtpkit` command: each subcommand is a module of `mtpkit.cli`, imported only when it is
called."""

import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from mtpkit import __version__
from mtpkit.cli.command import Group, new_app
from mtpkit.cli.errors import run

COMMANDS = {
    "train": "Train MTP heads on a frozen base.",
    "acceptance": "Measure how often the base accepts its heads' drafts on data.",
    "data": "Prepare training data, let the base write it, look at it.",
    "convert": "Convert and compare Hugging Face and Megatron checkpoints.",
    "generate": "Continue prompts, with or without drafts from the MTP heads.",
    "chat": "Talk with a model in a terminal.",
    "serve": "Serve a model over HTTP, to clients of OpenAI's or vLLM's servers.",
    "speedup": "Measure how much faster a model decodes with its heads.",
    "bench": "Time decoding, serving a load of requests, and training.",
    "demo": "Train heads on the tiny base, convert and measure them.",
}
"""Each command's name, which is also its module's, and its line in the help. The module's `app` is
a `typer.Typer`."""


class LazyGroup(Group):
    """A group that lists its commands without importing them."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands = {name: TyperCommand(name, help=line) for name, line in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return (name, command, its arguments), with the command imported from its module."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, typer.main.get_command(import_module(f"mtpkit.cli.{name}").app), rest


app = new_app(cls=LazyGroup)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"mtpkit {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Train, convert and decode with multi-token-prediction heads on hybrid language models."""


def main() -> NoReturn:
    """Entry point of the console script."""
    run(app, sys.argv[1:] or ["--help"])


if __name__ == "__main__":
    main()
