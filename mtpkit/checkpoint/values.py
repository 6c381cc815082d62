"""The settings of a file, read one by one; what is wrong with them is gathered and raised together."""

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
        """A whole number from 0; the default where there is another value, which becomes a problem."""
        value = self._values.get(key, default)
        if type(value) is int and value >= 0:
            return value
        self.problems.append(f"{key} {shown(value)} is not a whole number from 0")
        return default

    def flag(self, key: str, default: bool) -> bool:
        """True or false; the default where there is another value, which becomes a problem."""
        value = self._values.get(key, default)
        if type(value) is bool:
            return value
        self.problems.append(f"{key} {shown(value)} is not true or false")
        return default

    def text(self, key: str, default: str = "") -> str:
        """A text; the default where there is another value, which becomes a problem."""
        value = self._values.get(key, default)
        if isinstance(value, str):
            return value
        self.problems.append(f"{key} {shown(value)} is not a text")
        return default

    def require(self, key: str, value: object) -> None:
        """Make it a problem if a setting is there and has another value or type than the one that is supported."""
        found = self._values.get(key, value)
        if (type(found), found) != (type(value), value):
            self.problems.append(f"{key} {shown(found)} is not supported, only {value!r}")

    def raise_problems(self) -> None:
        """Raise what was found so far.

        Raises:
            UserError: names every problem.
        """
        raise_problems(self.where, self.problems)
