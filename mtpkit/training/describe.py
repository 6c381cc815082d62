"""All settings of a run with their defaults, for people to read: YAML that `load_config` takes back."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from mtpkit.training.config import TrainConfig, plain_values

_WIDTH = 100


def describe_settings() -> str:
    """YAML of every setting with its default, under a comment that says what it is and what it may be.

    A setting without a default stands there as `???`, which `load_config` refuses.
    """
    return "\n".join(_lines(TrainConfig, ""))


def _lines(cls: Any, indent: str) -> Iterator[str]:
    hints, docs = get_type_hints(cls), _field_docs(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _comment(inspect.getdoc(hint) or "", indent)
            yield f"{indent}{field.name}:"
            yield from _lines(hint, indent + "  ")
            continue
        choices = f" One of: {', '.join(map(str, get_args(hint)))}." if get_origin(hint) is Literal else ""
        yield from _comment(docs[field.name] + choices, indent)
        value = "???" if field.default is dataclasses.MISSING else plain_values(field.default)
        yield f"{indent}{field.name}: {yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}"


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _field_docs(cls: type) -> dict[str, str]:
    """The text under each field, which Python does not keep, from the source."""
    body: list[Any] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for statement, after in itertools.pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
            docs[statement.target.id] = ast.literal_eval(after.value)  # type: ignore[union-attr]
    return docs
