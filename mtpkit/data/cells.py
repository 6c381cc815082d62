"""Read the cells of rows: texts, lists and objects, of the right types and in valid Unicode."""

from typing import Any

from mtpkit.data.rows import Row, RowError
from mtpkit.errors import UserError, listed, shown
from mtpkit.files import JsonObject, parse_json

_MOST_DEPTH = 64
"""Deepest nesting of lists and objects in messages and tools."""


def read_text_cell(row: Row, column: str, name: str) -> str:
    """The text in a column; "" if there is none.

    Raises:
        RowError: the column holds something other than text.
    """
    value = row.get(column)
    if not isinstance(value, str | None):
        raise RowError(f"data: {name}: column {column!r} holds {type(value).__name__}, not text")
    return _require_unicode(value or "", column, name)


def read_list(row: Row, column: str, name: str) -> list[Any] | None:
    """The list in a column, possibly written as JSON; None if there is none.

    Raises:
        RowError: the column holds something else.
    """
    value = _parsed(row, column, name)
    if not isinstance(value, list | None):
        raise RowError(f"data: {name}: {column!r} holds {type(value).__name__}, not a list")
    return value


def read_objects(row: Row, column: str, name: str) -> list[JsonObject]:
    """The list of objects in a column, possibly written as JSON; [] if there is none.

    Raises:
        RowError: the column holds something else, or text that is not valid.
    """
    objects = read_list(row, column, name) or []
    _check_nested(objects, column, name)
    if odd := [entry for entry in objects if not isinstance(entry, dict)]:
        raise RowError(
            f"data: {name}: {column!r} must be a list of objects, not of {shown(odd[0])}"
        )
    return objects


def read_object(row: Row, column: str, name: str) -> JsonObject:
    """The object in a column, possibly written as JSON; {} if there is none.

    Raises:
        RowError: the column holds something else, or text that is not valid.
    """
    value = _parsed(row, column, name)
    if not isinstance(value, dict | None):
        raise RowError(f"data: {name}: {column!r} holds {type(value).__name__}, not an object")
    _check_nested(value or {}, column, name)
    return value or {}


def lacking(row: Row, column: str) -> str:
    """Say that a row lacks `column`, and which columns it has; those that are null are not
    listed."""
    others = listed(key for key, value in row.items() if value is not None)
    return f"no column {column!r}; it has: {others}" if others else "empty row"


def _parsed(row: Row, column: str, name: str) -> Any:
    value = row.get(column)
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value, f"data: {name}: the text in {column!r}")
    except UserError as error:
        raise RowError(str(error)) from error


def _check_nested(value: object, column: str, name: str, depth: int = 0) -> None:
    """Refuse values that chat templates or JSON cannot represent."""
    if depth > _MOST_DEPTH:
        raise RowError(f"data: {name}: {column!r} is nested more than {_MOST_DEPTH} deep")
    if isinstance(value, str):
        _require_unicode(value, column, name)
    elif isinstance(value, list | dict):
        for entry in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_nested(entry, column, name, depth + 1)


def _require_unicode(text: str, column: str, name: str) -> str:
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise RowError(
            f"data: {name}: column {column!r} has {half}, half of a surrogate pair, which is not"
            " valid text"
        ) from error
    return text
