"""Frozen dataclasses whose wrong values end in one error that names them all, in plain words.

    @checked("loss settings")
    class LossConfig:
        kind: Literal["kl", "tv"] = "kl"
        beta: Annotated[float, Field(gt=0, le=1)] = 0.6

    LossConfig(kind="l2", beta=2)
    # loss settings: kind is 'l2', must be 'kl' or 'tv'; beta is 2, must be above 0 ...

Types are strict: True is not a number, 2.0 is not a whole number, and "3" is neither. numpy's
numbers become Python's own, and lists become tuples unless a field's type is a list. Floats are
finite unless a field allows other values (`Field(allow_inf_nan=True)`). A field whose type is
itself a checked class, or a list or dict of one, takes mappings too, whose values replace those of
the field's default; problems inside them are named by dotted keys. Problems between several fields
(`beta` against `kind`) are found by a method `problems`, which yields a clause for each problem.
"""

import dataclasses
import functools
import operator
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, dataclass_transform, get_args, get_origin

from pydantic import BeforeValidator, ConfigDict, Field, Strict, ValidationError, field_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo

from mtpkit.errors import UserError, listed, shown
from mtpkit.files import read_json

_NOUNS = {
    int: ("a whole number", "whole numbers"),
    float: ("a finite number", "finite numbers"),
    bool: ("True or False", "True or False"),
    str: ("a text", "texts"),
    Path: ("a path", "paths"),
    types.NoneType: ("None", "None"),
}
_BOUNDS = ("ge", "gt", "le", "lt")
_SAME: Any = object()


class WrongValues(UserError):
    """Values that a checked class refuses."""

    def __init__(self, what: str, clauses: Sequence[str]) -> None:
        super().__init__(f"{what}: {listed(clauses, width=320, separator='; ')}")
        self.clauses = list(clauses)
        """One clause for each problem; most begin with the key of the value."""


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, Field))
def checked[C: type](what: str, prefix: str = "") -> Callable[[C], C]:
    """Make a class a frozen dataclass that checks its values when an object is made and raises
    `WrongValues`.

    Args:
        what: name of the object in messages, such as `sampling parameters`.
        prefix: start of its fields' keys in files and messages. A field's plain name is accepted
            too.
    """

    def decorate(cls: C) -> C:
        config = ConfigDict(
            strict=True,
            extra="forbid",
            allow_inf_nan=False,
            arbitrary_types_allowed=True,
            use_attribute_docstrings=True,
            alias_generator=prefix.__add__,
            validate_by_name=True,
            validate_by_alias=False,
        )
        # Before pydantic reads the annotations and defaults.
        _share_fields(cls)
        extended: Any = cls
        extended.__annotations__ = {
            name: _open(kind) for name, kind in vars(cls).get("__annotations__", {}).items()
        }
        extended._plain = field_validator("*", mode="before")(staticmethod(plain))
        made: Any = pydantic_dataclass(frozen=True, config=config)(cls)
        # pydantic reads the docstrings of the class itself alone.
        for base in cls.__mro__[1:]:
            for name, info in getattr(base, "__pydantic_fields__", {}).items():
                own = fields_of(made)[name]
                own.description = own.description or info.description
        # `field_clauses` calls it, and makes clauses of the errors that it raises.
        made._pydantic_init = made.__init__

        @functools.wraps(made.__init__)
        def __init__(self: Any, /, *args: object, **values: object) -> None:
            values |= zip(fields_of(made), args, strict=False)
            clauses = _fill(self, values)
            # Values can be judged against each other only if each is right by itself.
            if not clauses and hasattr(self, "problems"):
                clauses += self.problems()
            if clauses:
                raise WrongValues(what, clauses)

        made.__init__ = __init__
        return cast(C, made)

    return decorate


def _open(kind: Any) -> Any:
    """Let mappings be given for a checked class inside a type, and other collections for its lists,
    tuples and dicts; the values inside stay strict."""
    origin = get_origin(kind)
    inner = get_args(kind)
    if origin is Annotated:
        return Annotated[_open(inner[0]), *inner[1:]]
    if origin in (Union, types.UnionType):
        return functools.reduce(operator.or_, map(_open, inner))
    if origin in (list, tuple, dict):
        return Annotated[origin[tuple(map(_open, inner))], Strict(False)]
    if isinstance(kind, type) and is_pydantic_dataclass(kind):
        cls: type = kind
        made = BeforeValidator(lambda given: cls(**given) if isinstance(given, Mapping) else given)
        return Annotated[cls, made]
    return kind


def fields_of(cls: Any) -> dict[str, FieldInfo]:
    """Map each field of a checked class to what pydantic knows of it: type, constraints, default,
    docstring."""
    return cast(dict[str, FieldInfo], cls.__pydantic_fields__)


def keys_of(cls: type) -> dict[str, str]:
    """Map each field of a checked class to its key in files and messages, in order."""
    return {name: cast(str, info.validation_alias) for name, info in fields_of(cls).items()}


@dataclasses.dataclass(frozen=True)
class _Shared:
    """A field that is declared in another checked class."""

    source: FieldInfo
    default: Any


def field_of(cls: type, name: str, default: Any = _SAME) -> Any:
    """Make a field with the constraints, the default and the docstring of another checked class's
    field.

        # in A: most: Annotated[int, Field(ge=1)] | None = None
        most: int | None = field_of(A, "most")

    The written type, for type checkers, is the other field's without its constraints.

    Args:
        default: replaces the other field's default. The new field then needs its own docstring,
            which says why.
    """
    return _Shared(fields_of(cls)[name], default)


def attempt[T](cls: Callable[..., T], values: Mapping[str, object], clauses: list[str]) -> T | None:
    """Make an object of a checked class, or return None and add a clause for each wrong value to
    `clauses`."""
    try:
        return cls(**values)
    except WrongValues as error:
        clauses += error.clauses
        return None


def from_file[T](cls: type[T], value: object, where: object) -> T:
    """Make the object of a checked class that a file describes.

    Args:
        where: file and line, for messages.

    Raises:
        UserError: the value is not a mapping, or has unknown, missing or wrong values, all of them
            named.
    """
    if not isinstance(value, Mapping):
        raise UserError(f"{where} is {shown(value)}, must be an object")
    try:
        return cls(**value)
    except WrongValues as error:
        raise WrongValues(str(where), error.clauses) from None


def from_json[T](
    cls: type[T],
    path: Path | str,
    remedy: str,
    what: str = "",
    version: int | None = None,
    oldest: int | None = None,
) -> T:
    """Make the object of a checked class that a JSON file describes.

    Args:
        remedy: what to do about a file that cannot be used, for messages.
        what: start of messages, such as `data: `.
        version: the `format` that the file must have; other formats are refused before their values
            are checked.
        oldest: the oldest `format` that is read as well; None: only `version`.

    Raises:
        UserError: the file cannot be read, has another format, or any error of `from_file`.
    """
    try:
        values = read_json(path)
        found = values.get("format")
        # A format that is no integer is a wrong value like any other: `from_file` reports it.
        if version is not None and type(found) is int:
            known = range(version if oldest is None else oldest, version + 1)
            if found not in known:
                raise UserError(f"{path} has format {shown(found)}, this mtpkit reads {version}")
        return from_file(cls, values, path)
    except UserError as error:
        raise UserError(f"{what}{error}; {remedy}") from error


def field_clauses(cls: type, values: Mapping[str, object]) -> list[str]:
    """One clause for each value that does not fit its field; the class's `problems` is not
    called."""
    return _fill(object.__new__(cls), values)


def is_whole(value: object) -> bool:
    """Whether a value is an integer, including numpy's; True and False are not."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def are_whole(values: Collection[object]) -> bool:
    """Whether all values are integers, see `is_whole`. Python's own are recognised by their types,
    at 20 ns each."""
    return set(map(type, values)) <= {int} or all(map(is_whole, values))


def is_list(value: object) -> bool:
    """Whether a value is a list, tuple, range or set; texts and bytes are not."""
    return isinstance(value, Sequence | Set) and not isinstance(
        value, str | bytes | bytearray | memoryview
    )


def plain(value: Any) -> Any:
    """Convert numbers and flags to Python's own, sets to frozensets, and other collections that
    have such numbers to tuples; keep all else."""
    numpy = sys.modules.get("numpy")  # not imported for this: that takes a third of `--help`
    # Flags before numbers: a bool is an Integral, too.
    if isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_)):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Set):
        return frozenset(map(plain, value))
    # Long lists, such as token ids, are seldom other than plain already.
    if is_list(value) and not set(map(type, value)) <= {int, float, str}:
        return tuple(map(plain, value))
    return value


def _share_fields(cls: type) -> None:
    """Put the type, the constraints, the default and the docstring of each field made by `field_of`
    in its place.

    Raises:
        TypeError: a field is annotated with a type other than that of the shared field.
    """
    for name, shared in list(vars(cls).items()):
        if not isinstance(shared, _Shared):
            continue
        source = shared.source
        written = _bare(cls.__annotations__[name])
        # Type checkers believe what is written here, not the shared field.
        if written != _bare(source.annotation):
            raise TypeError(
                f"{cls.__name__}.{name} is written as {written}, but the shared field has"
                f" {_bare(source.annotation)}"
            )
        kind: Any = source.annotation
        for constraint in source.metadata:
            kind = Annotated[kind, constraint]
        cls.__annotations__[name] = kind
        own = shared.default is not _SAME
        setattr(
            cls,
            name,
            cast(Any, Field)(
                default=shared.default if own else source.default,
                default_factory=None if own else source.default_factory,
                title=source.title,
                description=None if own else source.description,
            ),
        )


def _bare(annotation: Any) -> Any:
    """A type without constraints."""
    return typing.get_type_hints(types.SimpleNamespace(__annotations__={"it": annotation}))["it"]


def _fill(blank: Any, values: Mapping[str, object]) -> list[str]:
    """Give a new object of a checked class its values; return a clause for each wrong value."""
    cls: Any = type(blank)
    names = {key: name for name, key in keys_of(cls).items()}
    named = {names.get(key, key): value for key, value in values.items()}
    for name, value in named.items():
        info = fields_of(cls).get(name)
        # A mapping says how an object differs from the default one.
        if isinstance(value, Mapping) and info and dataclasses.is_dataclass(info.default):
            named[name] = vars(info.default) | dict(value)
    try:
        cls._pydantic_init(blank, **named)
    except ValidationError as error:
        return [*_clauses(cls, error, named)]
    return []


def _clauses(cls: type, error: ValidationError, values: Mapping[str, object]) -> Iterator[str]:
    """Yield the clauses of each wrong object inside, then one for each field with a wrong value."""
    keys = keys_of(cls)
    found: dict[str, Any] = {}
    for each in error.errors(include_url=False, include_input=False):
        inside = each.get("ctx", {}).get("error")
        if isinstance(inside, WrongValues):
            first, *places = each["loc"]
            key = "".join([keys[str(first)], *(f"[{place!r}]" for place in places)])
            yield from (f"{key}.{clause}" for clause in inside.clauses)
        else:
            # pydantic reports each member of a union; one clause per field says enough.
            found.setdefault(str(each["loc"][0]), each)
    for name, first in found.items():
        if name not in keys:
            yield f"{name if name.isidentifier() and len(name) <= 60 else shown(name)} is unknown"
        elif name not in values:
            yield f"{keys[name]} is missing"
        else:
            yield _clause(keys[name], fields_of(cls)[name], first, values[name])


def _clause(key: str, info: FieldInfo, error: Mapping[str, Any], value: Any) -> str:
    """Say in plain words why a value does not fit its field, given pydantic's error."""
    # Down to the entry of a list or dict that is wrong, so that the clause names that entry.
    for place in error["loc"][1:]:
        if get_origin(info.annotation) in (list, dict):
            key = f"{key}[{place!r}]"
            value = value[place]
            info = FieldInfo.from_annotation(get_args(info.annotation)[-1])
    context = error.get("ctx", {})
    text = f"must be {info.title or _kind(info.annotation)}"
    if error["type"] == "value_error":
        text = str(context["error"])
    elif any(bound in context for bound in _BOUNDS):
        text = " or ".join([f"must be {_limits(info)}", *map(repr, _words(info.annotation))])
    return f"{key} is {shown(value)}, {text}" if text.startswith("must ") else f"{key} {text}"


def _kind(annotation: Any, many: bool = False) -> str:
    """The values of a type in words, such as `a whole number or None`; with `many` in the plural:
    `whole numbers`."""
    origin = get_origin(annotation)
    inner = get_args(annotation)
    if origin is Annotated:
        return _kind(inner[0], many)
    if origin in (Union, types.UnionType):
        kinds = list(dict.fromkeys(_kind(member, many) for member in inner))
        if _NOUNS[float][many] in kinds:  # which include whole numbers
            kinds = [kind for kind in kinds if kind != _NOUNS[int][many]]
        return " or ".join(kinds)
    if origin is Literal:
        *others, last = map(repr, inner)
        return f"{', '.join(others)} or {last}" if others else last
    if origin in (tuple, list):
        members = list(
            dict.fromkeys(_kind(member, many=True) for member in inner if member is not Ellipsis)
        )
        fixed = origin is tuple and Ellipsis not in inner
        return f"a list of {f'{len(inner)} ' if fixed else ''}{' or '.join(members)}"
    if origin is dict:
        return "objects" if many else "an object"
    if dataclasses.is_dataclass(annotation):
        return "groups of values" if many else "a group of values"
    return _NOUNS[annotation][many] if annotation in _NOUNS else f"a {annotation.__name__}"


def _words(annotation: Any) -> Iterator[Any]:
    """Yield the values of the literals inside a type, such as `auto` beside numbers."""
    inner = get_args(annotation)
    if get_origin(annotation) is Literal:
        yield from inner
    else:
        for member in inner:
            yield from _words(member)


def _limits(info: FieldInfo) -> str:
    """The range of a field's numbers in words, such as `from 1 to 64`."""
    bounds = {
        name: f"{bound:.10g}" if isinstance(bound, float) else str(bound)
        for entry in _metadata(info.annotation, info.metadata)
        for name in _BOUNDS
        if (bound := getattr(entry, name, None)) is not None
    }
    if bounds.keys() == {"ge", "le"}:
        return f"from {bounds['ge']} to {bounds['le']}"
    if bounds == {"gt": "0"}:
        return "positive"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return " and ".join(f"{words[name]} {bound}" for name, bound in bounds.items())


def _metadata(annotation: Any, own: Sequence[Any] = ()) -> Iterator[Any]:
    """Yield the constraints of a type and of the types inside it."""
    for entry in (*own, *getattr(annotation, "__metadata__", ())):
        yield from entry.metadata if isinstance(entry, FieldInfo) else [entry]
    for inner in get_args(annotation):
        if get_args(inner):
            yield from _metadata(inner)
