"""Values that no option can take: every option of every command refuses them in one line, and
nothing is left."""

import inspect
import io
import os
import re
import typing
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple

import pytest
import typer

from mtpkit.checkpoint.convert import import_checkpoint
from mtpkit.cli.command import Command
from mtpkit.cli.main import COMMANDS
from tests.shared import few_with_all

LOOP = "loop/x"
LONG = "x" * 5000
UNWRITABLE = "/proc/x/y"


class Parameter(NamedTuple):
    """An option or argument of a command, as typer has it."""

    command: str
    words: tuple[str, ...]
    """The command on the line."""
    name: str
    flag: str
    """What stands before its value; empty for an argument."""
    kind: type

    def __str__(self) -> str:
        return f"{self.command} {self.flag or self.name}"


def commands() -> dict[str, Any]:
    """All commands by what is typed, such as `data prepare`."""
    found = {}
    for name in COMMANDS:
        command: Any = typer.main.get_command(import_module(f"mtpkit.cli.{name}").app)
        parts = getattr(command, "commands", None)
        found |= (
            {f"{name} {one}": part for one, part in parts.items()} if parts else {name: command}
        )
    return found


def kind_of(hint: Any) -> type:
    """int, float, str, bool or Path of an annotation, whatever it is wrapped in."""
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    if typing.get_origin(hint) is Annotated:
        return kind_of(parts[0])
    if typing.get_origin(hint) is typing.Literal:
        return str
    return kind_of(parts[0]) if typing.get_origin(hint) in (list, UnionType, typing.Union) else hint


def parameters() -> list[Parameter]:
    found = []
    for line, command in commands().items():
        hints = inspect.signature(command.callback, eval_str=True).parameters
        for param in command.params:
            flag = param.opts[0] if param.opts[0].startswith("-") else ""
            found.append(
                Parameter(
                    line,
                    tuple(line.split()[1:]),
                    param.name,
                    flag,
                    kind_of(hints[param.name].annotation),
                )
            )
    return found


def few(parameters: list[Parameter]) -> list[Parameter]:
    """Parameters of which each name and kind is there, and each command: options of one name are
    declared once and refuse the same values wherever they are taken."""
    return few_with_all(
        {one: {(one.name, one.kind, place_of(one)), one.command} for one in parameters}
    )


def place_of(parameter: Parameter) -> str:
    """The suffix of the file that is written there, "directory", or "" where nothing is."""
    place = PLACES.get(str(parameter))
    if place is None:
        return ""
    return Path(place).suffix or "directory"


ALL = parameters()
NUMBERS = [
    one
    for one in ALL
    if one.kind in (int, float) or (one.flag == "--num-speculative-tokens" and one.kind is str)
]
# A cache of the hub is looked at for ids alone, and the models here are directories.
PATHS = [one for one in ALL if one.kind is Path and one.name != "download_dir"]
TEXTS = [one for one in ALL if one.kind is str and one.flag and one not in NUMBERS]
TURNED_OFF = {"top_k": -1, "presence_penalty": -2, "frequency_penalty": -2}
"""The least value of options that take negative ones."""
MAY_BE_INFINITE = ("request_rate",)
"""Options for which infinity has a meaning, and a number beyond all floats therefore too."""
PLACES = {
    "data prepare --output": "out",
    "data regenerate --output": "out.jsonl",
    "data draft-vocab --output": "out.json",
    "convert import destination": "out",
    "convert export destination": "out",
    "convert stitch destination": "out",
    "speedup --output": "out",
    "acceptance --output": "out.json",
    **{
        f"bench {name} --output": "out" for name in ("decode", "load", "train", "roofline", "heads")
    },
    "bench load --save-requests": "out.json",
    "demo --output": "out",
}
"""What is written, and as what: a name with a suffix is a file, another one a directory. All else
is read."""


@pytest.fixture(scope="session")
def megatron_dir(model_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("megatron") / "model"
    import_checkpoint(model_dir, directory)
    return directory


@pytest.fixture
def attempt(model_dir, megatron_dir, tmp_path, call, capsys, monkeypatch):
    """The one line that a command prints when a parameter has a value, all that it needs being
    there."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "prompts.txt").write_text("the cat\n" * 8)
    (tmp_path / "data.jsonl").write_text('{"prompt": "the cat", "response": " sat on the mat"}\n')
    (tmp_path / "directory").mkdir()
    monkeypatch.chdir(tmp_path)
    valid = {
        "--model": model_dir,
        "model": model_dir,
        "--prompts": "prompts.txt",
        "--data": "data.jsonl",
        "--output": "out.jsonl",
        "--config": "config.yaml",
        "destination": "out",
        "directory": model_dir,
        "trained": megatron_dir,
        "--size": 50,
        "first": model_dir,
        "second": model_dir,
        "output": "run",
    }

    def attempt(parameter: Parameter, value: object) -> tuple[int, str]:
        before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
        needed = {one.flag or one.name: one for one in ALL if one.command == parameter.command}
        command = commands()[parameter.command]
        model = valid["--model"]
        valid["source"] = megatron_dir if parameter.command == "convert export" else model
        required = {param.opts[0] for param in command.params if param.required}
        if parameter.command.startswith("bench"):
            required.add("--model")
        if parameter.command == "data draft-vocab":
            required.add("--size")
        line: list[object] = list(parameter.words)
        for name in needed:
            if name == (parameter.flag or parameter.name):
                line += (
                    [f"{name}={value}"]
                    if parameter.flag
                    else ["--", value]
                    if str(value)[:1] == "-"
                    else [value]
                )
            elif name in required:
                line += [name, valid[name]] if name.startswith("-") else [valid[name]]
        monkeypatch.setattr("sys.stdin", io.StringIO("the cat"))
        app = import_module(f"mtpkit.cli.{parameter.command.split()[0]}").app
        code = call(app, *line)
        os.chdir(tmp_path)  # the demo goes elsewhere
        printed = capsys.readouterr()
        assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before, (
            "something is left"
        )
        assert not printed.out and printed.err.count("\n") == 1, printed.err[-800:]
        assert printed.err.startswith("mtpkit: error: ") and len(printed.err) <= 400, printed.err[
            :800
        ]
        return code, printed.err

    return attempt


def says(line: str, parameter: Parameter, value: str = "") -> bool:
    """Whether an error names the parameter, or the path that it was given."""
    names = [
        parameter.name,
        parameter.name.upper(),
        parameter.flag.replace("-", "_") or parameter.name,
    ]
    normal, *names = (re.sub("[^a-zA-Z]", "_", text) for text in (line, *names))
    return any(f"_{name}_" in normal for name in names) or bool(
        value and value.split("/")[0][:80] in line
    )


def test_all_commands_look_at_their_values() -> None:
    assert not [line for line, command in commands().items() if not isinstance(command, Command)]


@pytest.mark.parametrize("parameter", few(NUMBERS), ids=str)
def test_numbers(parameter, attempt):
    negative = TURNED_OFF.get(parameter.name, 0) - 1
    values = (
        ["nan", "inf", "-inf", "1e400"]
        if parameter.kind is float
        else [10**30, -(10**30), "9" * 5000]
    )
    if parameter.name in MAY_BE_INFINITE:
        values = ["nan", "-inf"]
    for value in (negative, *values):
        code, line = attempt(parameter, value)
        assert code == 2 and says(line, parameter), line


@pytest.mark.parametrize("parameter", few([*PATHS, *TEXTS]), ids=str)
def test_empty_texts(parameter, attempt):
    code, line = attempt(parameter, "")
    assert code == 2 and says(line, parameter), line


@pytest.mark.parametrize(
    "parameter",
    few([*PATHS, *(one for one in TEXTS if one.flag in ("--model", "--data"))]),
    ids=str,
)
def test_paths_in_circles_and_too_long_ones(parameter, attempt):
    for value in ("loop", LOOP, LONG):
        code, line = attempt(parameter, value)
        assert code == 2 and says(line, parameter, value), line


@pytest.mark.parametrize("parameter", few(PATHS), ids=str)
def test_a_directory_where_a_file_belongs_and_the_other_way_round(parameter, attempt):
    place = PLACES.get(str(parameter))
    reads_directory = parameter.name in ("model", "source", "first", "second")
    value = "prompts.txt" if reads_directory or (place and "." not in place) else "directory"
    code, line = attempt(parameter, value)
    assert code == 2 and says(line, parameter, value), line


@pytest.mark.parametrize("parameter", [one for one in PATHS if str(one) in PLACES], ids=str)
def test_places_that_cannot_be_written(parameter, attempt):
    code, line = attempt(parameter, UNWRITABLE)
    assert code in (1, 2) and "/proc" in line, line


def test_every_place_is_an_option():
    assert PLACES.keys() <= {str(one) for one in PATHS}
