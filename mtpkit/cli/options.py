"""Options of commands: made from the fields of checked classes, or shared by several commands."""

import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import GenericAlias, NoneType, UnionType
from typing import Annotated, Any, Literal, cast

import typer
from pydantic.fields import FieldInfo

from mtpkit.config.checked import attempt, field_clauses, fields_of, keys_of
from mtpkit.config.parts import Part, part_of
from mtpkit.data.options import DataOptions
from mtpkit.engine import EngineOptions
from mtpkit.engine.requests.options import HubOptions
from mtpkit.errors import UserError, listed

_OBJECT = "JSON"
"""The metavar of options that take a JSON object."""


@dataclass(frozen=True)
class Fields(Part):
    """Marks a command's parameter as an object of a checked class, to be made from options, one
    option per field. The fields of a checked class in a field are options like the others.

    `takes_options` makes the options.
    """

    defaults: object = None
    """An object whose fields are the defaults of the options, and the values of fields that are no
    options; by default the class's defaults are used."""
    suffix: str = ""
    """Text that follows the field's name in the option's name."""

    def options(self, cls: type) -> dict[str, str]:
        """Map each field to its option's parameter name: the field's key in messages, followed by
        the suffix."""
        keys = keys_of(cls)
        return {name: keys[name] + self.suffix for name in self.names(cls)}

    def inner(self, cls: type, name: str) -> "Fields | None":
        """The options that a field stands for if its type is a checked class, else None."""
        part = part_of(_field(cls, name))
        if part is None:
            return None
        return Fields(part.only, part.without, self._default(cls, name), self.suffix)

    def parameters(self, cls: type) -> Iterator[inspect.Parameter]:
        """Yield the options as parameters that typer understands."""
        for name, option in self.options(cls).items():
            info = _field(cls, name)
            if inner := self.inner(cls, name):
                yield from inner.parameters(cast(type, info.annotation))
                continue
            default = self._default(cls, name)
            if isinstance(default, tuple):
                default = list(default) or None
            if isinstance(default, dict):
                default = json.dumps(default) if default else None
            kind, metavar = _kind(info.annotation)
            # Typer adds the twin `--no-...` of a flag that is not off by default, but only if no
            # names are given here.
            flags = [_flag(option)] if kind is bool and default is False else []
            yield inspect.Parameter(
                option,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[
                    kind | None if default is None else kind,
                    typer.Option(*flags, help=info.description, metavar=metavar),
                ],
            )

    def make[T](self, cls: type[T], values: Mapping[str, Any], clauses: list[str]) -> T | None:
        """Make the object from the options' values, or return None. `clauses` gets one clause per
        wrong value, which names its option."""
        options = self.options(cls)
        # An option that was not given leaves its field to the default.
        given = dict(vars(self.defaults)) if self.defaults else {}
        whole = True
        for name, option in options.items():
            info = _field(cls, name)
            if inner := self.inner(cls, name):
                part = inner.make(cast(type, info.annotation), values, clauses)
                if part is None:
                    whole = False
                else:
                    given[name] = part
            elif values[option] is not None:
                given[name] = _parsed(values[option], _kind(info.annotation)[1])
        wrong = list[str]()
        made: T | None = None
        # Fields are judged against each other only if each is right by itself.
        if whole:
            made = attempt(cls, given, wrong)
        else:
            wrong = field_clauses(cls, given)
        flags = {keys_of(cls)[name]: _flag(option) for name, option in options.items()}
        # A command line has no None: leaving the option out says the same.
        clauses += [
            re.sub(r"^\w+", lambda key: flags.get(key[0], key[0]), clause.removesuffix(" or None"))
            for clause in wrong
        ]
        return made

    def _default(self, cls: type, name: str) -> Any:
        """The default of a field's option; `inspect.Parameter.empty` if it must be given."""
        info = _field(cls, name)
        if self.defaults is not None:
            return getattr(self.defaults, name)
        if info.is_required():
            return inspect.Parameter.empty
        return info.get_default(call_default_factory=True)


def takes_options[R](command: Callable[..., R]) -> Callable[..., R]:
    """Turn the fields of the parameters marked with `Fields` into options of the command.

    An option has the type, default and help of its field, and the field's class checks the value:

        @app.command(cls=Command)
        @takes_options
        def generate(model: options.Model, sampling: Annotated[SamplingParams,
            Fields(without=["n"])]) -> None: ...

    A field that shares its name with another parameter or another class's field shares its option:
    both get the value.

    Raises:
        UserError: when the command is called with wrong values; the message names all of them.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters
    groups: dict[str, tuple[type, Fields]] = {}
    options: dict[str, inspect.Parameter] = {}
    for name, parameter in own.items():
        cls, *marks = typing.get_args(hints[name]) or [hints[name]]
        if marks and isinstance(marks[0], Fields):
            groups[name] = (cls, marks[0])
            options |= {
                one.name: one
                for one in marks[0].parameters(cls)
                if one.name not in own.keys() | options.keys()
            }
        else:
            options[name] = parameter.replace(
                kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]
            )

    @functools.wraps(command)
    def taking(**values: Any) -> R:
        clauses: list[str] = []
        objects = {
            name: fields.make(cls, values, clauses) for name, (cls, fields) in groups.items()
        }
        if clauses:
            raise UserError(listed(clauses, width=320, separator="; "))
        return command(**{name: objects[name] if name in objects else values[name] for name in own})

    taking.__signature__ = inspect.Signature([*options.values()])  # type: ignore[attr-defined]
    return taking


def _field(cls: Any, name: str) -> FieldInfo:
    return fields_of(cls)[name]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def changed_flags(made: Any) -> list[str]:
    """The options that make an object of a checked class, without those that have their
    defaults."""
    flags = []
    for name, value in vars(made).items():
        if value != _field(type(made), name).get_default(call_default_factory=True):
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            flags.append(_flag(name) if value is True else f"{_flag(name)}={text}")
    return flags


def _kind(annotation: Any) -> tuple[Any, str | None]:
    """Typer's type for a field and, if the class parses the option's text itself, the metavar that
    help shows."""
    united = typing.get_origin(annotation) in (typing.Union, UnionType)
    members = [
        typing.get_args(one)[0] if typing.get_origin(one) is Annotated else one
        for one in (typing.get_args(annotation) if united else [annotation])
        if one is not NoneType
    ]
    if Path in members:
        return Path, None
    if list in members:  # written in Python syntax, which the class parses
        return str, "LIST"
    for one in members:
        if typing.get_origin(one) is dict:
            return str, _OBJECT
        if typing.get_origin(one) not in (None, Literal):
            inner, metavar = _kind(typing.get_args(one)[0])
            if typing.get_origin(inner) is Literal:  # typer has no lists of choices
                inner, metavar = str, "|".join(typing.get_args(inner))
            return GenericAlias(list, (inner,)), metavar
    if len(members) == 1:
        return members[0], None
    return str, "|".join(["INTEGER", *(word for one in members for word in typing.get_args(one))])


def _parsed(value: Any, metavar: str | None) -> Any:
    """Parse an option's text, or each of its texts, as its metavar says."""
    if metavar == _OBJECT:
        return _object(value)
    if metavar:
        return [_number(text) for text in value] if isinstance(value, list) else _number(value)
    return value


def _object(text: str) -> object:
    """Parse the JSON of an object, or return the text unchanged: the class then says what is wrong
    with it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _number(text: str) -> int | str:
    """Convert a text to an integer, or return it unchanged: the class then says what is wrong with
    it."""
    try:
        return int(text)
    except ValueError:
        return text


Model = Annotated[
    Path,
    typer.Option(
        help=(
            "Model directory, in the Hugging Face or the Megatron layout, or the id of a model in"
            " the Hugging Face hub, such as org/name."
        )
    ),
]
Hub = Annotated[HubOptions, Fields()]
Weights = Annotated[EngineOptions, Fields(only=("dtype", "quantization"))]
"""How the weights of a model are held where no engine decodes."""
NUMBERS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "state_dtype",
    "prefix_cache_dtype",
    "draft_lm_head_dtype",
)
"""Options of an engine that say how it holds weights, keys and values, and states."""
Chat = Annotated[
    bool,
    typer.Option("--chat", help="Ask each text as a question, through the chat template."),
]
Template = Annotated[DataOptions, Fields(only=("chat_template_kwargs",))]
PrintJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print the JSON object in a terminal, too; elsewhere it is always the last line.",
    ),
]


def writable_directory(path: Path | None) -> Path | None:
    """Refuse an option's directory that cannot be written, before any work starts; otherwise return
    it."""
    from mtpkit.files import check_writable

    if path is not None:
        check_writable(path)
    return path
