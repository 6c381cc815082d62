"""Errors that a user sees. Each is one line: what is wrong, with which thing, and what to do."""

from collections.abc import Iterable, Sequence


class MtpkitError(Exception):
    """A failure that is reported as one line. `exit_code` is what a command exits with."""

    exit_code = 1


class UserError(MtpkitError, ValueError):
    """The input is at fault: a flag, a config, a prompt, a checkpoint. Exit code 2."""

    exit_code = 2


class StorageError(MtpkitError, OSError):
    """Reading or writing failed for a reason outside the user's input, such as a full disk."""


def listed(items: Iterable[object], most: int = 10) -> str:
    """The first `most` items as text, comma-separated, and how many more there are.

    >>> listed(range(5), most=3)
    '0, 1, 2 and 2 more'
    """
    texts = [str(item) for item in items]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def raise_problems(what: str, found: Sequence[str]) -> None:
    """One error for all problems of an object.

    Raises:
        UserError: there are problems.
    """
    if found:
        raise UserError(f"{what}: " + "; ".join(found))
