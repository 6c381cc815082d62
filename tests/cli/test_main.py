"""The command table and the modules agree."""

from importlib import import_module
from pathlib import Path

import typer

import mtpkit.cli
from mtpkit.cli.main import COMMANDS
from tests.shared import each

HELPERS = {"__init__", "command", "errors", "main", "options", "torchrun"}


def test_every_command_module_is_registered() -> None:
    modules = {path.stem for path in Path(mtpkit.cli.__file__).parent.glob("*.py")}
    assert modules - HELPERS == set(COMMANDS)


@each("name", COMMANDS)
def test_a_command_module_has_an_app(name: str) -> None:
    app = import_module(f"mtpkit.cli.{name}").app
    assert isinstance(app, typer.Typer)
    options = {option for param in typer.main.get_command(app).params for option in param.opts}
    assert "--install-completion" not in options, "give typer.Typer add_completion=False"
