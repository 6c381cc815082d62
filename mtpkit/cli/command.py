"""Base classes of all commands: plain help, checks of every value, lists of values, former names of options."""

import math
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from mtpkit.config import LARGEST_COUNT

_LARGEST_SEED = 2**62 - 1
"""Leaves room for the seeds of further prompts, each one larger, in 63 bits."""

OLD_NAMES = {
    "--k": ("--num-speculative-tokens", "--num-depths"),
    "--out": ("--output",),
    "--prompt-file": ("--prompts",),
    "--prompt-len": ("--prompt-length",),
    "--context-len": ("--context-length",),
    "--document-len": ("--document-length",),
}
"""Former names of options, each with its present names. They still work, but help does not list them."""


def new_app(**attributes: Any) -> typer.Typer:
    """A Typer app whose help is plain text: it fits 80 columns, where Rich's tables cut the names of options off."""
    return typer.Typer(**{"cls": Group} | attributes, add_completion=False, rich_markup_mode=None)


class Group(TyperGroup):
    """A group whose help holds the first sentence of each command, whole."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(1000)) for name, one in commands.items() if one])


class Command(TyperCommand):
    """A command that refuses what none of its options takes: empty texts, huge and infinite numbers, paths in circles.

    Use it as `@app.command(cls=Command)`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace former names, parse as usual, then look at all values."""
        args = self.rename(args)
        texts, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        rest = super().parse_args(ctx, args)
        params: list[Any] = self.params
        for param in params:
            text, value = texts.get(param.name), ctx.params.get(param.name)
            limit = _LARGEST_SEED if param.name == "seed" else LARGEST_COUNT
            problems = [_problem(one, limit) for one in (value if isinstance(value, list | tuple) else [value])]
            if "" in (text if isinstance(text, list) else [text]) and (param.opts[0][0] == "-" or value == Path()):
                problems.append("it is empty: name one, or leave it out")
            for problem in filter(None, problems):
                raise typer.BadParameter(problem, ctx=ctx, param=param)
        return rest

    def rename(self, args: list[str]) -> list[str]:
        """A command line with present names of options in place of former ones."""
        known = {name for param in self.params for name in param.opts}
        renamed: list[str] = []
        for index, arg in enumerate(args):
            if arg == "--":
                return renamed + args[index:]
            name, equals, value = arg.partition("=")
            now = [new for new in OLD_NAMES.get(name, ()) if name not in known and new in known]
            renamed.append((now[0] if now else name) + equals + value)
        return renamed


class ListCommand(Command):
    """A command whose list options take several values at once: `--k 0 1 2 3` means `--k 0 --k 1 --k 2 --k 3`.

    Use it as `@app.command(cls=ListCommand)`. A list ends at the next option, so such a command has no positional
    arguments after one.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the name of a list option before each further value, then parse as usual."""
        lists = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        return super().parse_args(ctx, _repeat_names(self.rename(args), lists))


def _problem(value: object, limit: int) -> str | None:
    """What is wrong with a value, whatever its option is for; `limit`: of whole numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if isinstance(value, int) and abs(value) > limit:
        return f"it is beyond {limit}"
    if isinstance(value, Path):
        try:
            value.stat()
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None  # what is to be written need not be there; and what is read is missed with a better message
        except OSError as error:
            return f"{value}: {error.strerror}"
    return None


def _repeat_names(args: list[str], lists: set[str]) -> list[str]:
    spread: list[str] = []
    current = None
    for arg in args:
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
