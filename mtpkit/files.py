"""Small text and JSON files that a user gives, read with one-line errors that name the file."""

import json
from pathlib import Path
from typing import Any

from mtpkit.errors import UserError


def read_text(path: Path | str) -> str:
    """The text of a UTF-8 file, without a byte order mark.

    Raises:
        UserError: the file cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}; save it as UTF-8") from error


def parse_json(text: str | bytes, where: str) -> Any:
    """The value of a JSON text; `where` names its file and line in the error.

    Raises:
        UserError: it is not JSON, is nested too deeply, or has a number of too many digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise UserError(f"{where} cannot be read as JSON: it is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{where} cannot be read as JSON: {error}") from error


def read_json(path: Path | str) -> dict[str, Any]:
    """The JSON object of a UTF-8 file.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    values = parse_json(read_text(path), str(path))
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a JSON object")
    return values
