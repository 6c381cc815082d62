"""Base classes of all commands: plain help, checks of every value, lists of values, short names of
options."""

import itertools
import math
import re
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError
from typer.core import TyperCommand, TyperGroup

from mtpkit.config import LARGEST_COUNT
from mtpkit.errors import UserError

_LARGEST = 2**62 - 1
"""Largest seed or number of bytes. Each further prompt's seed is one larger; all of them must fit
in 63 bits."""

_MAY_BE_INFINITE = ("request_rate",)
"""Options for which infinity has a meaning."""

SHORT_NAMES = {
    "--k": ("--num-speculative-tokens", "--num-depths"),
    "--out": ("--output",),
}
"""Short names of options, each with the names that it stands for. Help does not list them."""

_NAME = re.compile(r"(?<![\w./=-])(--)?[a-z]\w*(-\w+)*(?![\w/=-]|\.\w)")
"""Matches a word of a message that may be an option's name, but not a part of a path, a key or
`key=value`."""


def new_app(**attributes: Any) -> typer.Typer:
    """Make a Typer app with plain-text help, which fits 80 columns; Rich's tables would cut off
    option names there."""
    return typer.Typer(**{"cls": Group} | attributes, add_completion=False, rich_markup_mode=None)


class Group(TyperGroup):
    """A group whose help shows the whole first sentence of each command."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, one.get_short_help_str(1000)) for name, one in commands.items() if one]
            )


class Command(TyperCommand):
    """A command that refuses values no option accepts: empty texts, huge or infinite numbers, paths
    with link loops.

    Use it as `@app.command(cls=Command)`. Its list options take several values at once, up to the
    next option: `--k 0 1 2 3` means `--k 0 --k 1 --k 2 --k 3`. A command with positional arguments
    does not accept such lists, because an argument could follow one.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual, accept short option names and lists of values as well, and check every
        value."""
        # First, since lists and errors go by the names in `opts`.
        self.take_short_names(args)
        if all(param.param_type_name == "option" for param in self.params):
            lists = {
                name
                for param in self.params
                if getattr(param, "multiple", False)
                for name in param.opts
            }
            args = _repeat_names(args, lists)
        try:
            # The parser empties its list, and `_is_empty` looks at what was typed.
            rest = super().parse_args(ctx, list(args))
        except typer.BadParameter as error:
            error.message = _reworded(error)
            raise
        params: list[Any] = self.params
        for param in params:
            value = ctx.params.get(param.name or "")
            values = value if isinstance(value, list | tuple) else [value]
            problems = _problems(param.name or "", values)
            if _is_empty(param, values, args):
                problems.append("it is empty: name one, or leave it out")
            if problems:
                raise typer.BadParameter(problems[0], ctx=ctx, param=param)
        return rest

    def take_short_names(self, args: list[str]) -> None:
        """Rename options to the short names that the command line uses, so that errors use the same
        names."""
        known = {name for param in self.params for name in param.opts}
        # Words after `--` are arguments, whatever they look like.
        line = args[: args.index("--")] if "--" in args else args
        typed = {arg.partition("=")[0] for arg in line}
        for short in SHORT_NAMES.keys() & typed - known:
            for param in self.params:
                if set(param.opts) & set(SHORT_NAMES[short]):
                    param.opts = [short, *(name for name in param.opts if name in typed)]
                    break

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help with the full names of options, even if the command line uses short
        ones."""
        for param in self.params:
            full = f"--{(param.name or '').replace('_', '-')}"
            if full in SHORT_NAMES.get(param.opts[0], ()):
                param.opts = [full]
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; errors name its options as the command line does, not by their internal
        names."""
        try:
            return super().invoke(ctx)
        except UserError as error:
            typed = {}
            for param in self.params:
                if param.name and param.opts[0].startswith("--"):
                    typed["--" + param.name.replace("_", "-")] = param.opts[0]
                    # A name of one word, such as model, may be a word of the sentence and not the
                    # option.
                    typed |= {param.name: param.opts[0]} if "_" in param.name else {}
            text = _NAME.sub(lambda found: typed.get(found[0], found[0]), str(error))
            error.args = (text, *error.args[1:])
            raise


def _reworded(error: typer.BadParameter) -> str:
    """Reword an error about a text that should be a number, or about a number outside its option's
    range."""
    cause = error.__cause__
    if not isinstance(cause, ValidationError):
        return error.message
    first = cause.errors()[0]
    given = reprlib.repr(first["input"])
    bounds = first.get("ctx", {})
    if "ge" in bounds or "le" in bounds:
        bound = (
            f"at least {bounds['ge']:.10g}" if "ge" in bounds else f"at most {bounds['le']:.10g}"
        )
        return f"must be {bound}, not {given.strip("'")}"
    kinds = {"int": "a whole number", "float": "a number"}
    kind = kinds.get(first["type"].partition("_")[0])
    return f"must be {kind}, not {given}" if kind else error.message


def _problems(name: str, values: Sequence[object]) -> list[str]:
    """Say what makes the values of an option or argument wrong for any of them."""
    limit = _LARGEST if name.endswith(("seed", "_bytes")) else LARGEST_COUNT
    endless = [math.inf] if name in _MAY_BE_INFINITE else []
    problems = [_problem(value, limit) for value in values if value not in endless]
    if name == "seed" and isinstance(seed := values[0], int) and seed < 0:
        problems.append(f"must be at least 0, not {seed}")
    return [problem for problem in problems if problem]


def _problem(value: object, limit: int) -> str | None:
    """Say what makes a value wrong for any option, or return None; `limit`: the largest absolute
    value of an int."""
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if isinstance(value, int) and abs(value) > limit:
        return f"it is beyond {limit}"
    if isinstance(value, Path):
        try:
            value.stat()
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None  # an output need not exist yet; a missing input gets a better message later
        except OSError as error:
            return f"{value}: {error.strerror}"
    return None


def _is_empty(param: Any, values: Sequence[object], args: Sequence[str]) -> bool:
    """Whether an option, or an argument that is a path, was given an empty text; an argument that
    is a text may be empty."""
    if param.param_type_name == "argument":
        return "" in args and Path() in values
    joined = any(f"{name}=" in args for name in param.opts)
    apart = any(before in param.opts and not arg for before, arg in itertools.pairwise(args))
    return (joined or apart) and ("" in values or Path() in values)


def _repeat_names(args: list[str], lists: set[str]) -> list[str]:
    """Repeat the name of a list option before each further value."""
    spread: list[str] = []
    current = None
    for arg in args:
        # A negative number is a value.
        if arg.startswith("-") and not _is_number(arg):
            name = arg.partition("=")[0]
            current = name if name in lists else None
            spread.append(arg)
        elif current is not None and spread[-1] != current:
            spread += [current, arg]
        else:
            spread.append(arg)
    return spread


def _is_number(arg: str) -> bool:
    try:
        float(arg)
    except ValueError:
        return False
    return True
