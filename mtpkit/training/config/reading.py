"""Settings from a YAML file with `key=value` overrides on top; each error names the wrong file or
override."""

import dataclasses
import io
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from mtpkit.config.checked import WrongValues
from mtpkit.errors import UserError, listed
from mtpkit.files import read_text
from mtpkit.training.config.describe import (
    GONE,
    describe_section,
    describe_unknown,
    example,
    field_types,
)
from mtpkit.training.config.settings import TrainConfig

MOST_BRACKETS = 100
"""Limit on nested brackets: the time of YAML's scanner grows with the square of their depth."""
MOST_VALUES = 10_000
"""Limit on the values in a file of settings."""


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML file and put `key=value` overrides on top, such as `loss.kind=tv` or
    `data.train=[a.txt,b.txt]`.

    An override may index into a list: `data.train[0]=c.txt`. Values may refer to other values and
    to the environment in OmegaConf's syntax: `${output}`, `${oc.env:HOME}`.

    Raises:
        UserError: the file is unreadable, a key is unknown, a value is missing or wrong, or
            settings do not fit together.
    """
    malformed = [override for override in overrides if "=" not in override]
    if malformed:
        raise UserError(f"overrides must be key=value, such as steps=100, not {listed(malformed)}")
    source = "config overrides" if path is None else f"config {path}"
    problems: dict[int, str] = {}
    values = _merge(source, _read(path), overrides, problems)
    _drop_gone(values)
    try:
        config = TrainConfig(**_fitted(TrainConfig, values))
    except WrongValues as error:
        _blame(error.clauses, overrides, problems)
    if problems:
        named = [
            text if index < 0 else f"override {_cut(overrides[index], 80)}: {text}"
            for index, text in sorted(problems.items())
        ]
        start = f"{source}: " if min(problems) < 0 else ""
        raise UserError(start + listed(named, width=1000, separator="; "))
    return config


def _read(path: str | Path | None) -> Any:
    """Load a YAML file with OmegaConf; refuse a file that is not a YAML mapping of settings."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        text = read_text(path) if path is not None else "{}"
        _require_shallow(text)
        text = quote_patterns(text)
        if _size(yaml.compose(text)) > MOST_VALUES:
            raise ValueError(
                f"its anchors expand to more than {MOST_VALUES:,} values; write the settings out"
            )
        from_file = OmegaConf.load(io.StringIO(text))
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        reason = (
            "it is nested too deeply"
            if isinstance(error, RecursionError)
            else " ".join(str(error).split())
        )
        raise UserError(f"config {path} is not YAML: {_cut(reason, 200)}") from error
    if not OmegaConf.is_dict(from_file):
        raise UserError(f"config {path} is a list, must be settings as key: value")
    return from_file


def _require_shallow(text: str) -> None:
    """Raise RecursionError if more than MOST_BRACKETS brackets are open at once."""
    opened = accumulate((sign in "[{") - (sign in "]}") for sign in text)
    if max(opened, default=0) > MOST_BRACKETS:
        raise RecursionError("it is nested too deeply")


def _size(node: yaml.Node | None, known: dict[int, float] | None = None) -> float:
    """The number of values in a YAML document with its anchors expanded; infinity if an anchor
    contains itself."""
    known = {} if known is None else known
    if id(node) not in known:
        known[id(node)] = math.inf  # found again while its parts are counted: it contains itself
        parts = node.value if node is not None and not isinstance(node.value, str) else []
        each = (
            part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,))
        )
        known[id(node)] = 1 + sum(_size(part, known) for part in each)
    return known[id(node)]


def _merge(
    source: str, settings: Any, overrides: Sequence[str], problems: dict[int, str]
) -> dict[Any, Any]:
    """Put the overrides on top of a file's settings, as plain values; errors of overrides go to
    `problems` by index."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    # The last four are raised for an object in place of a list, numbers with too many digits, and
    # too deep nesting.
    unfit = (
        OmegaConfBaseException,
        yaml.YAMLError,
        TypeError,
        ValueError,
        OverflowError,
        RecursionError,
    )
    for index, text in enumerate(overrides):
        try:
            _require_shallow(text)
            settings.merge_with_dotlist([_quoted(text)])
        except unfit as error:
            key = text.split("=", 1)[0]
            hint = (
                ": put names in quotes, ['a[0-9].jsonl']"
                if key in ("data.train", "data.eval")
                else ""
            )
            problems[index] = describe_section(key) or _one_line(error) + hint
    try:
        values = OmegaConf.to_container(settings, resolve=True)
    except unfit as error:  # a reference cannot be resolved
        raise UserError(f"{source}: {_one_line(error)}") from error
    assert isinstance(values, dict)
    return values


def _drop_gone(values: dict[Any, Any]) -> None:
    """Leave out settings that are gone, where they have the value that changed nothing."""
    for key, (harmless, _) in GONE.items():
        section, _, name = key.rpartition(".")
        settings = values.get(section)
        if isinstance(settings, dict) and settings.get(name, ...) is harmless:
            del settings[name]


def _quoted(override: str) -> str:
    """Quote values of `key=value` that YAML would not read as text: an empty value, `*.jsonl`, and
    the pattern `-`."""
    key, value = override.split("=", 1)
    if not value or (key == "heads.pattern" and value[0] not in "'\""):
        return f"{key}='{value}'"
    return f"{key}={quote_patterns(value, names=key in ('data.train', 'data.eval'))}"


def _fitted(cls: Any, values: Mapping[Any, Any]) -> dict[str, Any]:
    """Convert values that YAML reads as another type than their field's: numbers to texts, texts to
    numbers, a single file to a list of one. Missing values are left out, and missing sections are
    added."""
    types = field_types(cls)
    fitted: dict[str, Any] = {
        name: {}
        for name, kind in types.items()
        if dataclasses.is_dataclass(kind) and name not in values
    }
    for name, value in values.items():
        kind = types.get(name)
        if value == "???":
            continue
        if isinstance(value, dict):
            fitted[str(name)] = _fitted(kind, value) if dataclasses.is_dataclass(kind) else value
        elif kind == tuple[str, ...]:
            files = [value] * bool(value) if isinstance(value, str) else value
            fitted[name] = (
                [_scalar(str, one) for one in files] if isinstance(files, list) else value
            )
        else:
            fitted[str(name)] = _scalar(kind, value)
    return fitted


def _scalar(kind: Any, value: object) -> object:
    """Convert a number to text, or text to a number, if the field has that type; else return the
    value itself."""
    if kind is str and isinstance(value, int | float):
        return str(value)
    if kind in (int, float) and isinstance(value, str):
        with suppress(ValueError):
            return kind(value)
    return value


def _blame(clauses: Sequence[str], overrides: Sequence[str], problems: dict[int, str]) -> None:
    """Add each clause to `problems` under the index of its key's last override, or under -1 if no
    override has this key."""
    keys = [override.split("=", 1)[0] for override in overrides]
    rest = []
    for key, text in map(_told, sorted(clauses, key=lambda clause: clause.endswith(" is missing"))):
        at_fault = [index for index, given in enumerate(keys) if _overlap(given, key)]
        if not at_fault:
            rest.append(text)
        elif at_fault[-1] not in problems:
            problems[at_fault[-1]] = text
    if rest:
        problems[-1] = listed(rest, width=1000, separator="; ")


def _overlap(given: str, key: str) -> bool:
    """Whether one of two keys equals or contains the other."""
    return given == key or given.startswith((f"{key}.", f"{key}[")) or key.startswith(f"{given}.")


def _told(clause: str) -> tuple[str, str]:
    """The key of a clause about `TrainConfig`, and the clause reworded for a file of settings."""
    key, _, rest = clause.partition(" ")
    if clause.endswith(" is unknown"):
        key = clause.removesuffix(" is unknown")
        return key, describe_unknown(key)
    if rest == "is missing":
        return key, f"{key} is required, set {example(key)}"
    if rest.endswith("must be a group of values"):
        return key, describe_section(key)
    return key, clause


def _one_line(error: Exception) -> str:
    """The first line of an error's message, with the key if it is OmegaConf's."""
    message = str(error).partition("\n")[0]
    key = getattr(error, "full_key", None)
    return _cut(f"{key}: {message}" if key and f"'{key}'" not in message else message, 240)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


class _Scanner(yaml.SafeLoader):
    """A YAML loader that reads `*name` as an alias only if the text has an anchor `&name`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._anchors = set(re.findall(r"&([\w-]+)", text))

    def fetch_alias(self) -> None:
        name = re.match(r"[\w-]*", self.buffer[self.pointer + 1 :])
        if name and name[0] in self._anchors:
            super().fetch_alias()
        else:
            self.fetch_plain()


def quote_patterns(text: str, names: bool = False) -> str:
    """Put quotes around plain texts that begin with `*`, which YAML would read as aliases.

    Example: "train: [*.jsonl, b.txt]" becomes "train: ['*.jsonl', b.txt]"

    Args:
        names: True: quote every plain text, since all are file names: `001` is not a number then.

    Raises:
        yaml.YAMLError: the text is not YAML for another reason.
    """
    for token in reversed(list(yaml.scan(text, Loader=_Scanner))):
        if (
            isinstance(token, yaml.ScalarToken)
            and token.plain
            and (names or token.value.startswith("*"))
        ):
            quoted = token.value.replace("'", "''")
            text = f"{text[: token.start_mark.index]}'{quoted}'{text[token.end_mark.index :]}"
    return text
