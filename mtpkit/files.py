"""Small text and JSON files that a user gives, read with one-line errors that name the file."""

import dataclasses
import json
import os
import stat
import types
import typing
from collections import Counter
from pathlib import Path
from typing import Any

from mtpkit.errors import UserError, listed, raise_problems, shown


def require_file(path: Path | str) -> Path:
    """The path of a file that can be opened at once; a shell's `<(...)` and /dev/stdin count as files.

    Raises:
        UserError: nothing is there, or something else: a directory, a link to itself, a pipe that may have no writer.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # the latter: a zero byte in the path
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if stat.S_ISDIR(mode):
        raise UserError(f"{path} cannot be read: it is a directory, not a file")
    real = Path(os.path.realpath(path))  # what a shell opens has no name of its own there
    if stat.S_ISSOCK(mode) or (stat.S_ISFIFO(mode) and real.exists()):
        raise UserError(f"{path} cannot be read: it is a pipe, not a file")
    return path


def is_there(path: Path | str) -> bool:
    """Whether something has this name, be it a link to nothing: that is refused when it is read, not passed over."""
    return os.path.lexists(path)


def read_text(path: Path | str) -> str:
    """The text of a UTF-8 file, without a byte order mark.

    Raises:
        UserError: the file cannot be read, or is not UTF-8.
    """
    try:
        return require_file(path).read_text(encoding="utf-8").removeprefix("\ufeff")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; save it as UTF-8") from error


def parse_json(text: str | bytes, where: str) -> Any:
    """The value of a JSON text; `where` names its file and line in the error.

    Raises:
        UserError: it is not JSON, is nested too deeply, has a number of too many digits, or a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_distinct)
    except RecursionError:
        raise UserError(f"{where} cannot be read as JSON: it is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{where} cannot be read as JSON: {error}") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, of whose entries none hides another."""
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {shown(twice)} is there twice")
    return values


def read_json(path: Path | str) -> dict[str, Any]:
    """The JSON object of a UTF-8 file.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    values = parse_json(read_text(path), str(path))
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a JSON object")
    return values


def read_record[Record](kind: type[Record], value: Any, where: str) -> Record:
    """A dataclass from a JSON value, which must have all its fields, no others, and each of the type declared.

    Types may be int, float, str, Any, dataclasses, and list, dict of str, and None with these.

    Raises:
        UserError: it is something else; `where` and the key are named.
    """
    if not isinstance(value, dict):
        raise UserError(f"{where} is {shown(value)}, must be an object")
    hints = typing.get_type_hints(kind)
    fields: tuple[dataclasses.Field, ...] = dataclasses.fields(kind)  # type: ignore[arg-type]
    needed = [field.name for field in fields if field.default is dataclasses.MISSING]
    problems = [f"{name} is missing" for name in needed if name not in value]
    problems += [f"{shown(name)} is not known" for name in value if name not in hints]
    raise_problems(where, [listed(problems)] if problems else [])
    return kind(**{name: _typed(hints[name], entry, f"{where}: {name}") for name, entry in value.items()})


def _typed(kind: Any, value: Any, where: str) -> Any:
    """A JSON value of the type declared."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _typed(inner[0], value, where)
    if origin is list and isinstance(value, list):
        if set(map(type, value)) <= {inner[0]}:  # of many tokens, among others
            return value
        return [_typed(inner[0], entry, f"{where}[{place}]") for place, entry in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: _typed(inner[1], entry, f"{where}[{key!r}]") for key, entry in value.items()}
    if dataclasses.is_dataclass(kind):
        return read_record(typing.cast(type, kind), value, where)
    if kind is Any or type(value) is kind or (kind is float and type(value) is int):
        return value
    words = {int: "an integer", float: "a number", str: "a text", list: "a list", dict: "an object"}
    raise UserError(f"{where} is {shown(value)}, must be {words[origin or kind]}")
