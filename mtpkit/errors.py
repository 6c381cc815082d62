"""Errors for users, and helpers for their messages.

Each message is one line that says what is wrong, where, and what to do.
"""

import reprlib
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

_SHOWN = 60
"""Most characters of a value in a message."""


on_failure: list[Callable[[str], object]] = []
"""Functions that are called with the message of an error that ends this process, before the process
ends."""


class MtpkitError(Exception):
    """A failure that is reported as one line. `exit_code` is the exit code of the command."""

    exit_code = 1


class UserError(MtpkitError, ValueError):
    """The user's input is wrong: an option, a config, a prompt, a checkpoint. Exit code 2."""

    exit_code = 2


class StorageError(MtpkitError, OSError):
    """Reading or writing failed for a reason outside the user's input, such as a full disk."""


def listed(items: Iterable[object], most: int = 10, width: int = 240, separator: str = ", ") -> str:
    """List the first items as text, and say how many are left out.

    Args:
        most: most items to show.
        width: most characters to show; the first item is always shown, but cut off if it is longer
            than 2 * width.

    >>> listed(range(5), most=3)
    '0, 1, 2 and 2 more'
    """
    texts = [str(item) for item in items]
    lengths = accumulate(len(text) + len(separator) for text in texts)
    # At least one: a long first item is cut off, not left out.
    count = min(most, max(1, sum(length <= width for length in lengths)))
    more = f" and {len(texts) - count} more" if len(texts) > count else ""
    return (
        separator.join(
            [text if len(text) <= 2 * width else text[:width] + "..." for text in texts[:count]]
        )
        + more
    )


def shown(value: object) -> str:
    """A value for a message, on one line: its repr, or its type if the repr is long."""
    try:
        text = (
            reprlib.repr(value)
            if isinstance(value, list | tuple | dict | set | str)
            else repr(value)
        )
    except ValueError:  # an integer with more digits than Python converts to text
        return "a huge number"
    return text if len(text) <= _SHOWN and "\n" not in text else f"a {type(value).__name__}"


def counted(number: int, noun: str) -> str:
    """A number with its noun, singular or plural.

    >>> counted(2000, "answer")
    '2,000 answers'
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def raise_problems(what: object, found: Sequence[str]) -> None:
    """Report all problems of an object in one error.

    Raises:
        UserError: `found` is not empty.
    """
    if found:
        raise UserError(f"{what}: {listed(found, width=320, separator='; ')}")
