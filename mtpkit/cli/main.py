"""`mtpkit`: one command a module of `mtpkit.cli`, imported when it is called."""

import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from mtpkit import __version__
from mtpkit.cli.errors import run

COMMANDS = {
    "train": "Train MTP heads on a frozen base.",
    "data": "Prepare training data, let the base write it, and look at it.",
    "convert": "Convert checkpoints between the Hugging Face and the Megatron layout, and compare them.",
    "generate": "Continue prompts, with or without drafts from the MTP heads.",
    "evaluate": "Measure how much faster a model decodes with its MTP heads.",
    "eval": "Measure the acceptance of heads on held-out data; make the report of a training run.",
    "bench": "Time decoding, prefill and each kernel beside what the machine allows.",
    "demo": "Train MTP heads on the tiny base, convert them and measure the speedup.",
}
"""Name of each command, which is also its module's, and its line in the help. The module's `app` is a `typer.Typer`."""


class LazyGroup(TyperGroup):
    """A group that lists its commands without importing them."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands = {name: TyperCommand(name, help=line) for name, line in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """(name, command, its arguments), the command being the real one."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, typer.main.get_command(import_module(f"mtpkit.cli.{name}").app), rest


app = typer.Typer(cls=LazyGroup, add_completion=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"mtpkit {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Train, convert and decode with multi-token-prediction heads on hybrid language models."""


def main() -> NoReturn:
    """Entry point of the console script."""
    run(app, sys.argv[1:] or ["--help"])


if __name__ == "__main__":
    main()
