"""Options that take several values."""

import pytest
import typer
from typer.testing import CliRunner

from mtpkit.cli import ListCommand, options

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


def test_a_single_option_takes_one_value() -> None:
    assert CliRunner().invoke(app, ["--name", "a", "b"]).exit_code == 2


def test_drafts_are_a_number_or_auto() -> None:
    assert [options.parse_drafts(text) for text in ("auto", "0", "3")] == ["auto", 0, 3]
    for text, says in (("-1", "-1 drafts are too few: give 0 or more"), ("many", "'many' is neither a number nor")):
        with pytest.raises(typer.BadParameter, match=says):
            options.parse_drafts(text)
