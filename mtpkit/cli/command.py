"""Base classes of all commands: plain help, checks of every value, lists of values, short names of
options."""

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
    "--data-parallel": ("--data-parallel-size",),
}
"""Short names of options, each with the names that it stands for. Help does not list them."""

_EMPTY = "it is empty: name one, or leave it out"

_NAME = re.compile(r"(?<![\w./=-])[a-z]\w*(?![\w/=-]|\.\w)")
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
    """A command that refuses values no option accepts: empty texts, huge or infinite numbers.

    Use it as `@app.command(cls=Command)`. Its list options take several values at once, up to the
    next option: `--k 0 1 2 3` means `--k 0 --k 1 --k 2 --k 3`. A command with positional arguments
    does not accept such lists, because an argument could follow one.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual, accept short option names and lists of values as well, and check every
        value."""
        words = self._spelt_out(args)
        try:
            # The parser empties the list that it gets.
            rest = super().parse_args(ctx, list(words))
        except typer.BadParameter as error:
            error.message = _reworded(error)
            raise
        params: list[Any] = self.params
        for param in params:
            value = ctx.params.get(param.name)
            values = value if isinstance(value, list | tuple) else [value]
            problem = _problem(param.name, values)
            # A path that is an empty text means this directory by now.
            if param.param_type_name == "argument" and Path() in values and "" in words:
                problem = _EMPTY
            if problem:
                raise typer.BadParameter(problem, ctx=ctx, param=param)
        return rest

    def _spelt_out(self, args: list[str]) -> list[str]:
        """Replace short names of options, and repeat the name of a list option before each further
        value.

        Raises:
            typer.BadParameter: an option has an empty text as its value.
        """
        options: list[Any] = [param for param in self.params if param.param_type_name == "option"]
        # In a command with positional arguments, one could follow a list.
        has_lists = len(options) == len(self.params)
        lists = {name for one in options if one.multiple and has_lists for name in one.opts}
        full = {name: name for one in options if not one.is_flag for name in one.opts}
        for short, names in SHORT_NAMES.items():
            for name in full.keys() & set(names):
                full.setdefault(short, name)
        words: list[str] = []
        name = ""
        for place, arg in enumerate(args):
            if arg == "--":
                return words + args[place:]
            # A negative number is a value.
            if re.match(r"-(?![\d.])", arg):
                typed, equals, value = arg.partition("=")
                name = full.get(typed, typed)
                words.append(f"{name}{equals}{value}")
            elif name in lists and words[-1] != name:
                words += [name, arg]
            else:
                words.append(arg)
            if name in full and (words[-1] == f"{name}=" or words[-2:] == [name, ""]):
                raise typer.BadParameter(_EMPTY, param_hint=repr(name))
        return words

    def invoke(self, ctx: Any) -> Any:
        """Run the command; errors name its options as the command line does, not by their internal
        names."""
        try:
            return super().invoke(ctx)
        except UserError as error:
            # A name of one word, such as model, may be a word of the sentence and not the option.
            flags = {
                param.name: param.opts[0]
                for param in self.params
                if "_" in param.name and param.param_type_name == "option"
            }
            text = _NAME.sub(lambda found: flags.get(found[0], found[0]), str(error))
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


def _problem(name: str, values: Sequence[object]) -> str | None:
    """Say what makes a value of an option or argument wrong for any of them, or return None."""
    limit = _LARGEST if name.endswith(("seed", "_bytes")) else LARGEST_COUNT
    endless = [math.inf] if name in _MAY_BE_INFINITE else []
    for value in values:
        if isinstance(value, float) and not math.isfinite(value) and value not in endless:
            return "must be a finite number"
        if isinstance(value, int) and abs(value) > limit:
            return f"it is beyond {limit}"
        if name == "seed" and isinstance(value, int) and value < 0:
            return f"must be at least 0, not {value}"
    return None
