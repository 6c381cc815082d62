"""Options that take several values, former names, and help that fits a terminal."""

import re
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from mtpkit.bench.sizes import SHAPES
from mtpkit.cli.command import SHORT_NAMES, Command, new_app
from mtpkit.cli.demo import ROOT
from mtpkit.cli.main import COMMANDS
from mtpkit.cli.main import app as mtpkit
from mtpkit.cli.options import Fields, takes_options
from mtpkit.config.checked import checked
from mtpkit.engine import SamplingParams
from tests.shared import each

app = typer.Typer()


@app.command(cls=Command)
def show(k: list[int] = typer.Option([0]), name: str = "", flag: bool = False) -> None:  # noqa: B008
    print(k, name, flag)


@each(
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


positional = new_app()


@positional.command(cls=Command)
def echo(text: str, stop: list[str] = typer.Option([])) -> None:  # noqa: B008
    print(text, stop)


def test_a_positional_argument_may_follow_a_list_option() -> None:
    result = CliRunner().invoke(positional, ["--stop", "a", "the text", "--stop", "b"])
    assert result.output.strip() == "the text ['a', 'b']"


renamed = new_app()


@renamed.command(cls=Command)
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
    groups = {
        name: typer.main.get_command(import_module(f"mtpkit.cli.{name}").app) for name in COMMANDS
    }
    inner = [
        [name, part] for name, group in groups.items() for part in getattr(group, "commands", ())
    ]
    return [[], *([name] for name in COMMANDS), *inner]


@pytest.mark.parametrize("command", ["decode", "load", "train", "roofline"])
def test_help_of_benchmarks_names_every_shape(command: str) -> None:
    """Some are cut at a hyphen."""
    shown = CliRunner().invoke(mtpkit, ["bench", command, "--help"], terminal_width=80).output
    assert [name for name in SHAPES if name not in "".join(shown.split())] == []


@pytest.mark.parametrize("command", words(), ids=" ".join)
def test_help_fits_80_columns_and_cuts_nothing(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(mtpkit, [*command, "--help"], terminal_width=80)
    assert result.exit_code == 0 and max(map(len, result.output.splitlines())) <= 80
    assert "\u2026" not in result.output and not re.search(
        r"\w\.\.\.$", result.output, re.MULTILINE
    )
    names = {name for param in find(command).params for name in param.opts if name.startswith("-")}
    assert "--help" in result.output and not [name for name in names if name not in result.output]
    shorts = SHORT_NAMES.keys() - names
    assert not [name for name in shorts if re.search(rf"{name}\b(?!-)", result.output)]


@each("command", words())
def test_help_has_no_path_of_this_machine(command: list[str]) -> None:
    assert str(ROOT) not in "".join(
        CliRunner().invoke(mtpkit, [*command, "--help"], terminal_width=999).output
    )


@pytest.mark.parametrize("command", words()[1:], ids=" ".join)
def test_help_has_the_full_names_beside_a_short_one(command: list[str]) -> None:
    shorts = [
        short
        for short, full in SHORT_NAMES.items()
        for param in find(command).params
        if set(param.opts) & set(full) and short not in param.opts
    ]
    expected = CliRunner().invoke(mtpkit, [*command, "--help"]).output
    for short in shorts:
        assert CliRunner().invoke(mtpkit, [*command, short, "3", "--help"]).output == expected


def find(command: list[str]) -> Any:
    """The command of words, as typer has it."""
    if not command:
        return typer.main.get_command(mtpkit)
    found: Any = typer.main.get_command(import_module(f"mtpkit.cli.{command[0]}").app)
    return found.commands[command[1]] if command[1:] else found


def test_a_single_option_takes_one_value() -> None:
    assert CliRunner().invoke(app, ["--name", "a", "b"]).exit_code == 2


@each(
    ("line", "says"),
    [
        (
            "speedup --model x --prompts y --k auto",
            "Invalid value for '--k': must be a whole number, not 'auto' (see",
        ),
        ("speedup --model x --prompts y --k=-1", "--k is [-1], must be from 0 to 1000"),
        ("generate --model x --k many", "--k is 'many', must be a whole number or 'auto'"),
        (
            "generate --model x --k 2 --num-speculative-tokens -3",
            "--k is -3, must be from 0 to 1000 or 'auto'",
        ),
        (
            "generate --model x --num-speculative-tokens many",
            "--num-speculative-tokens is 'many', must be",
        ),
        (
            "data regenerate --model x --data y --output z --k many",
            "--k is 'many', must be a whole number or 'auto'",
        ),
        (
            "data regenerate --model {model} --data y --output z.jsonl --k 3",
            "--k is 3, but the model has 2 distinct",
        ),
        (
            "speedup --model x --prompts y --speculative-num-draft-tokens 1",
            "tokens is 1, must be from 2 to",
        ),
        ("generate --model x --speculative-num-draft-tokens 1", "tokens is 1, must be from 2 to"),
        (
            "generate --model x --data-parallel-size 0",
            "Invalid value for '--data-parallel-size': must be at least 1, not 0",
        ),
        (
            "acceptance --model x --data y --tensor-parallel-size 0",
            "--tensor-parallel-size is 0, must be from 1 to",
        ),
        ("acceptance --model x --data y --out=", "Invalid value for '--out': it is empty"),
        (
            "bench train --warm-up-steps -1 --document-length 1",
            "--warm-up-steps is -1, must be at least 0; --document-length is 1, must be",
        ),
        ("generate --model x --prompts=", "Invalid value for '--prompts': it is empty"),
        ("generate --model {model} --k 3 a", "--k is 3, but the model has 2 distinct MTP heads"),
        (
            "generate --model {model} --num-speculative-tokens 3 a",
            "--num-speculative-tokens is 3, but the model has 2",
        ),
        (
            "generate --model x --max-num-batched-tokens 3 --k 3 a",
            "is 3, must be at least 4, the 1 + --k of",
        ),
    ],
)
def test_errors_name_an_option_as_it_was_typed(line, says, distinct_dir, call, capsys) -> None:
    assert call(mtpkit, *line.format(model=distinct_dir).split()) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1, error


@pytest.fixture(scope="session")
def distinct_dir(save_model) -> Any:
    return save_model(mtp_num_depths=2, mtp_use_repeated_layer=False)


@each(
    ("line", "says"),
    [
        (
            "generate --model x --max-tokens many",
            "'--max-tokens': must be a whole number, not 'many' (see --help)",
        ),
        (
            "generate --model x --max-tokens 1.5",
            "'--max-tokens': must be a whole number, not '1.5' (see --help)",
        ),
        ("generate --model x --top-p high", "'--top-p': must be a number, not 'high' (see --help)"),
        (
            "data regenerate --model x --data y --output z --max-tokens many",
            "'--max-tokens': must be a whole number, not 'many' (see --help)",
        ),
        (
            "data prepare --model x --data y --output z --sequence-length long",
            "'--sequence-length': must be a whole number, not 'long' (see --help)",
        ),
        (
            "demo --num-prompts many",
            "'--num-prompts': must be a whole number, not 'many' (see --help)",
        ),
        ("demo --num-prompts 0", "'--num-prompts': must be at least 1, not 0 (see --help)"),
    ],
)
def test_words_where_numbers_belong(line, says, call, capsys) -> None:
    assert call(mtpkit, *line.split()) == 2
    assert capsys.readouterr().err == f"mtpkit: error: Invalid value for {says}\n"


@checked("limits")
class Limits:
    """What `limit` takes."""

    most: Annotated[int, Field(ge=1)]
    """Most things."""
    rates: tuple[float, ...] = (0.5,)
    """Rate of each."""
    kinds: tuple[Literal["a", "b"], ...] | None = None
    """Kinds of things."""
    drafts: int | Literal["auto"] = 3
    """Drafts."""
    place: str | Path | list[int] | None = None
    """Where things are."""
    strict: bool = False
    """Refuse more."""
    loud: bool = True
    """Tell of it."""


limiting = new_app()


@limiting.command(cls=Command)
@takes_options
def limit(
    limits: Annotated[Limits, Fields()],
    again: Annotated[Limits, Fields(only=("most", "drafts"), suffix="_2")],
    sampling: Annotated[
        SamplingParams, Fields(only=["top_p"], defaults=SamplingParams(top_p=0.25))
    ],
    drafts: Annotated[str, typer.Option(help="Not what the field says.")] = "auto",
) -> None:
    print(limits, again.drafts, sampling.top_p, drafts)


def test_options_are_made_of_fields() -> None:
    text = CliRunner().invoke(limiting, ["--help"], terminal_width=80).output
    found = dict(
        line.strip().split("  ", 1) for line in text.splitlines() if line.startswith("  --")
    )
    assert {name: about.strip() for name, about in found.items()} == {
        "--most <int>": "Most things.  [required]",
        "--rates <list[float]>": "Rate of each.  [default: 0.5]",
        "--kinds a|b": "Kinds of things.",
        "--place <path>": "Where things are.",
        "--strict": "Refuse more.",
        "--loud / --no-loud": "Tell of it.  [default: loud]",
        "--most-2 <int>": "Most things.  [required]",
        "--drafts-2 INTEGER|auto": "Drafts.  [default: 3]",
        "--top-p <float>": "Draw from the smallest set of most likely tokens",
        "--drafts <str>": "Not what the field says.  [default: auto]",
        "--help": "Show this message and exit.",
    }


def test_a_command_gets_objects_of_its_options() -> None:
    line = "--most 2 --rates 1 2 --kinds a --most-2 1 --place x --no-loud --drafts 5"
    expected = Limits(most=2, rates=(1, 2), kinds=("a",), drafts=5, place=Path("x"), loud=False)
    result = CliRunner().invoke(limiting, line.split())
    assert result.output.strip() == f"{expected} 3 0.25 5", result.output


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--most 0 --most-2 1", "--most is 0, must be at least 1"),
        (
            "--most 1 --most-2 0 --drafts-2 few",
            "--most-2 is 0, must be at least 1; --drafts-2 is 'few', must be a whole",
        ),
        (
            "--most 1 --most-2 1 --kinds c --top-p 2",
            "--kinds is ['c'], must be a list of 'a' or 'b'; --top-p is 2.0",
        ),
    ],
)
def test_wrong_values_of_all_objects_are_named_by_their_options(line, says, call, capsys) -> None:
    assert call(limiting, *line.split()) == 2
    assert capsys.readouterr().err.startswith(f"mtpkit: error: {says}")
