"""Checked classes inside checked classes, whose settings stand beside the outer ones where users
see them: as options of a command, and in reports."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core.core_schema import no_info_after_validator_function

from mtpkit.config.checked import fields_of, keys_of
from mtpkit.errors import listed


@dataclass(frozen=True)
class Part:
    """Marks a field whose type is a checked class: some settings of that class cannot be set there.

    engine: Annotated[EngineOptions, Part(without=("warm_up",))] = EngineOptions()
    """

    only: Sequence[str] = ()
    """Settings that there are, in this order; by default all."""
    without: Sequence[str] = ()
    """Settings that there are not: they keep the default of the class."""

    def names(self, cls: type) -> list[str]:
        """The settings of a class that there are."""
        return [name for name in self.only or fields_of(cls) if name not in self.without]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """The schema of the class, followed by a check that no other setting is set."""
        return no_info_after_validator_function(self._check, handler(source))

    def _check[T](self, value: T) -> T:
        fields = fields_of(type(value))
        rest = [name for name in fields if name not in self.names(type(value))]
        wrong = [name for name in rest if getattr(value, name) != fields[name].get_default()]
        if wrong:
            raise ValueError(f"has {listed(wrong)}: leave out what cannot be set here")
        return value


def part_of(info: FieldInfo) -> Part | None:
    """The part of a checked class that a field holds; None if its type is no checked class."""
    if not dataclasses.is_dataclass(info.annotation):
        return None
    return next((mark for mark in info.metadata if isinstance(mark, Part)), Part())


def options_of(made: object) -> dict[str, Any]:
    """Map the keys of an object of a checked class to the values. The settings of objects inside it
    stand beside its own, as options of a command do."""
    values = dict[str, Any]()
    for name, key in keys_of(type(made)).items():
        value = getattr(made, name)
        part = part_of(fields_of(type(made))[name])
        if part is None:
            values[key] = value
        else:
            inner = options_of(value)
            values |= {name: inner[name] for name in part.names(type(value))}
    return values
