"""Settings of a file, read one by one; wrong values are collected and reported in one error."""

from collections.abc import Mapping

from mtpkit.errors import raise_problems, shown


class Values:
    """Settings by key; a setting that is null counts as absent.

    Args:
        where: the file, for messages.
    """

    def __init__(self, values: Mapping[str, object], where: object) -> None:
        self.where = where
        self.problems: list[str] = []
        self._values = {key: value for key, value in values.items() if value is not None}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def first(self, *keys: str) -> str | None:
        """The first of these keys that is set."""
        return next((key for key in keys if key in self._values), None)

    def get(self, key: str, default: object = None) -> object:
        """A setting of any type."""
        return self._values.get(key, default)

    def whole(self, key: str, default: int = 0) -> int:
        """A whole number from 0. Any other value is recorded as a problem, and the default returned."""
        return self._typed(key, default, "a whole number from 0")

    def flag(self, key: str, default: bool) -> bool:
        """True or False. Any other value is recorded as a problem, and the default returned."""
        return self._typed(key, default, "true or false")

    def text(self, key: str, default: str = "") -> str:
        """A text. Any other value is recorded as a problem, and the default returned."""
        return self._typed(key, default, "a text")

    def _typed[T: (int, bool, str)](self, key: str, default: T, kind: str) -> T:
        value = self._values.get(key, default)
        if type(value) is type(default) and (type(value) is not int or value >= 0):
            return value
        self.problems.append(f"{key} {shown(value)} is not {kind}")
        return default

    def require(self, key: str, value: object) -> None:
        """Record a problem if a setting is present and has another value or type than the supported one."""
        found = self._values.get(key, value)
        if (type(found), found) != (type(value), value):
            self.problems.append(f"{key} {shown(found)} is not supported, only {value!r}")

    def raise_problems(self) -> None:
        """Raise the problems found so far, if any.

        Raises:
            UserError: names every problem.
        """
        raise_problems(self.where, self.problems)
