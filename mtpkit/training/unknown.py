"""Settings that do not exist, and what may be meant by them."""

import dataclasses
import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def describe_unknown(config: "type[DataclassInstance]", key: str) -> str:
    """Say that `config` has no such setting, and which of its sections and settings have a similar name."""
    names = list(_names(config))
    sections = list(dict.fromkeys(name.split(".")[0] for name in names if "." in name))
    section = key.partition(".")[0]
    found = [] if section in sections else difflib.get_close_matches(section, sections)
    last = {name: name.rpartition(".")[2] for name in names}
    near = difflib.get_close_matches(key.rpartition(".")[2], set(last.values()))
    found += [name for name in names if last[name] in near]
    guess = f"did you mean {' or '.join(found)}? " if found else ""
    return f"there is no setting {key!r}; {guess}mtpkit train --settings lists them"


def _names(cls: "type[DataclassInstance]", prefix: str = "") -> Iterator[str]:
    """All settings as `section.key`."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _names(hint, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name
