"""Descriptions of settings: a commented YAML of all settings, and messages about unknown keys and
sections."""

import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import yaml

from mtpkit.config.checked import fields_of
from mtpkit.training.config.settings import TrainConfig

_WIDTH = 100


def describe_settings() -> str:
    """Return every setting with its default and a comment, as YAML that `load_config` reads.

    A setting without a default has the value `???`, which `load_config` reports as missing.
    """
    return "\n".join(_lines(TrainConfig, ""))


GONE: dict[str, tuple[object, str]] = {
    "optimizer.offload": (
        False,
        "remove it, and if memory is short set cache=DIR or base_fp8=true, which save more",
    )
}
"""Settings of earlier runs: the value that changed nothing, which each such run's `config.yaml`
may have, and the remedy for others."""


def describe_unknown(key: str) -> str:
    """A message about an unknown setting: what to do without one that is gone, otherwise sections
    and settings of similar names."""
    if key in GONE:
        _, remedy = GONE[key]
        return f"{key} is no setting any more; {remedy}"
    names = list(setting_names(TrainConfig))
    sections = list(dict.fromkeys(name.split(".")[0] for name in names if "." in name))
    section = key.partition(".")[0]
    found = [] if section in sections else difflib.get_close_matches(section, sections)
    last = {name: name.rpartition(".")[2] for name in names}
    near = difflib.get_close_matches(key.rpartition(".")[2], set(last.values()))
    found += [name for name in names if last[name] in near]
    guess = f"did you mean {' or '.join(found)}? " if found else ""
    return f"there is no setting {key!r}; {guess}mtpkit train --settings lists them"


def describe_section(key: str) -> str:
    """A message about a single value where a section of settings belongs; empty if `key` is not a
    section."""
    is_section = dataclasses.is_dataclass(field_types(TrainConfig).get(key))
    return f"{key} is a section of settings: set {example(key)}, and so on" if is_section else ""


def example(key: str) -> str:
    """An example `key=value` for a setting, or for the first setting of a section."""
    kind = field_types(TrainConfig).get(key)
    fields = []
    if dataclasses.is_dataclass(kind):
        fields = list(dataclasses.fields(kind))
        key = f"{key}.{fields[0].name}"
    if key == "data.train":
        return f"{key}=[FILE]"
    return f"{key}={fields[0].default or 'NAME'}" if fields else f"{key}=..."


def field_types(cls: Any) -> dict[str, Any]:
    """The type of each field of a settings class, without its constraints."""
    return {name: info.annotation for name, info in fields_of(cls).items()}


def setting_names(cls: Any, prefix: str = "") -> Iterator[str]:
    """Yield the names of all settings, those in a section as `section.key`."""
    for name, kind in field_types(cls).items():
        if dataclasses.is_dataclass(kind):
            yield from setting_names(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def _lines(cls: Any, indent: str) -> Iterator[str]:
    for name, info in fields_of(cls).items():
        kind = info.annotation
        if dataclasses.is_dataclass(kind):
            yield from _comment(inspect.getdoc(kind) or "", indent)
            yield f"{indent}{name}:"
            yield from _lines(kind, indent + "  ")
            continue
        choices = (
            f" One of: {', '.join(map(str, get_args(kind)))}."
            if get_origin(kind) is Literal
            else ""
        )
        yield from _comment(f"{info.description}{choices}", indent)
        value = "???" if info.is_required() else info.get_default(call_default_factory=True)
        value = list(value) if isinstance(value, tuple) else value
        yield f"{indent}{name}: {yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}"


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        _WIDTH,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}# ",
    )
