"""Read small text and JSON files from users, with one-line errors that name the file."""

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
    """Check that a path is a file that opens without blocking, as a shell's `<(...)` and /dev/stdin do; return it.

    Raises:
        UserError: it does not exist, or is a directory, a link to itself, or a pipe that may have no writer.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if stat.S_ISDIR(mode):
        raise UserError(f"{path} cannot be read: it is a directory, not a file")
    real = Path(os.path.realpath(path))  # does not exist for pipes that a shell opened
    if stat.S_ISSOCK(mode) or (stat.S_ISFIFO(mode) and real.exists()):
        raise UserError(f"{path} cannot be read: it is a pipe, not a file")
    return path


def is_there(path: Path | str) -> bool:
    """Whether a path exists, broken links included, so that reading them fails rather than skipping them."""
    return os.path.lexists(path)


def read_text(path: Path | str) -> str:
    """Read a UTF-8 file, without its byte order mark.

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
    """Parse JSON; `where` names file and line for the error.

    Raises:
        UserError: the text is not JSON, is nested too deeply, or has a number with too many digits or a repeated key.
    """
    try:
        return json.loads(text, object_pairs_hook=_distinct)
    except RecursionError:
        raise UserError(f"{where} cannot be read as JSON: it is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{where} cannot be read as JSON: {error}") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict from the entries of a JSON object, unless a key is repeated."""
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {shown(twice)} is repeated")
    return values


def read_json(path: Path | str) -> dict[str, Any]:
    """Read the JSON object of a UTF-8 file.

    Raises:
        UserError: the file cannot be read, or holds no JSON object.
    """
    values = parse_json(read_text(path), str(path))
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a JSON object")
    return values


def read_record[Record](kind: type[Record], value: Any, where: str) -> Record:
    """Make a dataclass from a JSON object, which must have exactly its fields, each of the declared type.

    Types may be int, float, str, Any, dataclasses, and lists, dicts with str keys, and unions with None of these.

    Raises:
        UserError: the value is anything else; names `where` and the key.
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
    """Check that a JSON value has the declared type, and convert objects to dataclasses."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _typed(inner[0], value, where)
    if origin is list and isinstance(value, list):
        if set(map(type, value)) <= {inner[0]}:  # fast for long lists, such as token ids
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
