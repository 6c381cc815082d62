"""Options that take several values, former names, and help that fits a terminal."""

import re
from importlib import import_module
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mtpkit.cli import ListCommand, options
from mtpkit.cli.command import OLD_NAMES, new_app
from mtpkit.cli.main import COMMANDS, OLD_COMMANDS
from mtpkit.cli.main import app as mtpkit

app = typer.Typer()


@app.command(cls=ListCommand)
def show(k: list[int] = typer.Option([0]), name: str = "", flag: bool = False) -> None:  # noqa: B008
    print(k, name, flag)


@pytest.mark.parametrize(
    ("line", "output"),
    [
        ("", "[0]  False"),
        ("--k 0 1 2 3", "[0, 1, 2, 3]  False"),
        ("--k 1 -2 --name x", "[1, -2] x False"),
        ("--k 1 --flag --k 2 3", "[1, 2, 3]  True"),
        ("--k=1 2", "[1, 2]  False"),
    ],
)
def test_lists(line: str, output: str) -> None:
    result = CliRunner().invoke(app, line.split())
    assert result.output.strip() == output


renamed = new_app()


@renamed.command(cls=ListCommand)
def run(
    num_speculative_tokens: list[int] = typer.Option([0]),  # noqa: B008
    output: str = "",
    stop: str = "",
) -> None:
    print(num_speculative_tokens, output, stop)


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("--k 0 1 --out a", "[0, 1] a"),
        ("--k=3 --k 4 --out=--out", "[3, 4] --out"),
        ("--num-speculative-tokens 2 --stop x --out b -- ", "[2] b x"),
    ],
)
def test_former_names_of_options_work(line: str, printed: str) -> None:
    result = CliRunner().invoke(renamed, line.split())
    assert result.output.strip() == printed, result.output


def test_a_former_name_that_a_command_has_itself_is_its_own() -> None:
    assert CliRunner().invoke(app, ["--k", "5"]).output.startswith("[5]")


def words() -> list[list[str]]:
    """All commands as they are typed."""
    groups = {name: typer.main.get_command(import_module(f"mtpkit.cli.{name}").app) for name in COMMANDS}
    inner = [[name, part] for name, group in groups.items() for part in getattr(group, "commands", ())]
    return [[], *([name] for name in COMMANDS), *inner]


@pytest.mark.parametrize("command", words(), ids=" ".join)
def test_help_fits_80_columns_and_cuts_nothing(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(mtpkit, [*command, "--help"], terminal_width=80)
    assert result.exit_code == 0 and max(map(len, result.output.splitlines())) <= 80
    assert "\u2026" not in result.output and not re.search(r"\w\.\.\.$", result.output, re.MULTILINE)
    names = {name for param in find(command).params for name in param.opts if name.startswith("-")}
    assert "--help" in result.output and not [name for name in names if name not in result.output]
    assert not [name for name in OLD_NAMES if re.search(rf"{name}\b(?!-)", result.output)]


def find(command: list[str]) -> Any:
    """The command of words, as typer has it."""
    if not command:
        return typer.main.get_command(mtpkit)
    found: Any = typer.main.get_command(import_module(f"mtpkit.cli.{command[0]}").app)
    return found.commands[command[1]] if command[1:] else found


@pytest.mark.parametrize("line", ["evaluate", "eval acceptance", "eval report", "eval", "--help"])
def test_former_commands_work_and_are_not_listed(line: str) -> None:
    former, *rest = line.split()
    expected = CliRunner().invoke(mtpkit, [*OLD_COMMANDS.get(former, ()), *rest, "--help"])
    result = CliRunner().invoke(mtpkit, [former, *rest, "--help"])
    assert result.output == expected.output and result.exit_code == 0
    assert not re.search(r"^  (evaluate|eval) ", result.output, re.MULTILINE)


def test_a_single_option_takes_one_value() -> None:
    assert CliRunner().invoke(app, ["--name", "a", "b"]).exit_code == 2


def test_drafts_are_a_number_or_auto() -> None:
    assert [options.parse_drafts(text) for text in ("auto", "0", "3")] == ["auto", 0, 3]
    for text, says in (("-1", "-1 drafts are too few: give 0 or more"), ("many", "'many' is neither a number nor")):
        with pytest.raises(typer.BadParameter, match=says):
            options.parse_drafts(text)
