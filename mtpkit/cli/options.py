"""Options shared by the commands."""

from typing import Any

from typer.core import TyperCommand


class ListCommand(TyperCommand):
    """A command whose list options take several values at once: `--k 0 1 2 3` means `--k 0 --k 1 --k 2 --k 3`.

    Use it as `@app.command(cls=ListCommand)`. A list ends at the next option, so such a command has no positional
    arguments after one.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the name of a list option before each further value, then parse as usual."""
        lists = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        return super().parse_args(ctx, _repeat_names(args, lists))


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
