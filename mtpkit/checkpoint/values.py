"""Settings of a file, read one by one; wrong values are collected, to be reported in one error."""

from collections.abc import Mapping

from mtpkit.errors import shown

_KINDS = {int: "a whole number from 0", bool: "true or false", str: "a text"}


class Values:
    """Settings by key; a setting that is null counts as absent.

    Args:
        where: the file, for messages.
    """

    def __init__(self, values: Mapping[str, object], where: object) -> None:
        self.where = where
        self.problems: list[str] = []
        self._values = {key: value for key, value in values.items() if value is not None}

    def first(self, *keys: str) -> str | None:
        """The first of these keys that is set; None if none is."""
        return next((key for key in keys if key in self._values), None)

    def get(self, key: str, default: object = None) -> object:
        """A setting of any type."""
        return self._values.get(key, default)

    def typed[T: (int, bool, str)](self, key: str, default: T) -> T:
        """A setting of the same type as the default: a whole number from 0, a flag or a text.

        Any other value is recorded as a problem, and the default is returned.
        """
        value = self._values.get(key, default)
        if type(value) is type(default) and (type(value) is not int or value >= 0):
            return value
        self.problems.append(f"{key} {shown(value)} is not {_KINDS[type(default)]}")
        return default

    def require(self, key: str, value: object) -> None:
        """Record a problem if a setting is present and has another value or type than the supported
        one."""
        found = self._values.get(key, value)
        if (type(found), found) != (type(value), value):
            self.problems.append(f"{key} {shown(found)} is not supported, only {value!r}")
