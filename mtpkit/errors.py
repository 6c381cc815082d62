"""Errors that a user sees. Each is one line: what is wrong, with which thing, and what to do."""

import reprlib
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

_SHOWN = 60
"""Characters of a value in a message."""


class MtpkitError(Exception):
    """A failure that is reported as one line. `exit_code` is what a command exits with."""

    exit_code = 1


class UserError(MtpkitError, ValueError):
    """The input is at fault: a flag, a config, a prompt, a checkpoint. Exit code 2."""

    exit_code = 2


class StorageError(MtpkitError, OSError):
    """Reading or writing failed for a reason outside the user's input, such as a full disk."""


def listed(items: Iterable[object], most: int = 10, width: int = 240, separator: str = ", ") -> str:
    """The first items as text, and how many more there are.

    Args:
        most: items that are shown.
        width: characters that are shown; one item is at any rate, cut off if it has more than twice as many.

    >>> listed(range(5), most=3)
    '0, 1, 2 and 2 more'
    """
    texts = [str(item) for item in items]
    lengths = accumulate(len(text) + len(separator) for text in texts)
    count = min(most, max(1, sum(length <= width for length in lengths)))
    more = f" and {len(texts) - count} more" if len(texts) > count else ""
    return separator.join([text if len(text) <= 2 * width else text[:width] + "..." for text in texts[:count]]) + more


def shown(value: Any) -> str:
    """A value in a message, on one line: its repr, or its type where that is long."""
    try:
        text = reprlib.repr(value) if isinstance(value, list | tuple | dict | set | str) else repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "a huge number"
    return text if len(text) <= _SHOWN and "\n" not in text else f"a {type(value).__name__}"


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural but for one.

    >>> counted(2000, "answer")
    '2,000 answers'
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def raise_problems(what: object, found: Sequence[str]) -> None:
    """One error for all problems of an object.

    Raises:
        UserError: there are problems.
    """
    if found:
        raise UserError(f"{what}: {listed(found, width=320, separator='; ')}")
