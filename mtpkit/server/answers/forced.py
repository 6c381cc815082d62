"""Grammars of answers that call tools, for requests that leave the model no choice but to call one.

What a format looks like is said in `formats`; here is what all of them are made of.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mtpkit.errors import UserError

type Schema = dict[str, Any]

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space of JSON as chat templates write it."""
_OF_TEXTS = (
    "pattern",
    "format",
    "minLength",
    "maxLength",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "$ref",
)
_OF_OBJECTS = (
    *("allOf", "anyOf", "oneOf", "not", "if", "$ref", "minProperties", "dependentRequired"),
    *("dependentSchemas", "patternProperties", "propertyNames"),
)
_NEWLINE = "\n"
_DEFINITIONS = ("$defs", "definitions")


class Layout(NamedTuple):
    """How calls are written, so that a grammar can be made of it."""

    opening: str
    """Text between the begin of a format and the first call."""
    between: str
    """Text between two calls."""
    closing: str
    """Text between the last call and the end of a format."""
    call: "Callable[[Tool, Notation], str]"
    """Returns the rule of a call of a tool."""
    text_end: str = ""
    """Where arguments are written as texts: the mark at the end of an argument."""
    not_in_text: tuple[str, ...] = ()
    """Marks that no such argument may have."""


class Tool(NamedTuple):
    """A tool that may be called."""

    name: str
    parameters: Schema
    """Schema of its arguments, which are an object."""


def read_tool(tool: dict[str, Any]) -> Tool:
    """A tool in OpenAI's form.

    Raises:
        UserError: it has no name, or its parameters are no schema of an object.
    """
    function = tool.get("function")
    if not isinstance(function, dict):
        function = {}
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise UserError("each of tools needs a function with a name")
    schema = function.get("parameters")
    if schema is None:
        schema = {"properties": {}, "additionalProperties": False}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise UserError(f"parameters of the tool {name!a} must be a JSON schema of an object")
    return Tool(name, {**schema, "type": "object"})


class Notation:
    """Writes the parts of a grammar.

    Args:
        marks: tokens that are marks such as `<tool_call>`, by their texts. Where a text has one,
            the model may write the token or its text.
    """

    def __init__(self, marks: Mapping[str, int]) -> None:
        self._marks = marks
        self._split = re.compile("|".join(map(re.escape, marks)) or r"\Z")

    def literal(self, text: str) -> str:
        """A text."""
        parts = []
        place = 0
        for found in self._split.finditer(text):
            if found[0]:
                parts += [_quoted(text[place : found.start()]), self._mark(found[0])]
                place = found.end()
        parts.append(_quoted(text[place:]))
        return " ".join(part for part in parts if part)

    def _mark(self, mark: str) -> str:
        return f"(<[{self._marks[mark]}]> | {_quoted(mark)})"

    def value(self, schema: Schema, root: Schema) -> str:
        """JSON that follows a schema, which may refer to definitions of another schema around
        it."""
        known = {name: root[name] for name in _DEFINITIONS if name in root}
        return f"%json {json.dumps({**known, **schema, 'x-guidance': _STYLE})}"

    def arguments(self, tool: Tool, begin: str, end: str) -> str:
        """The arguments of a call, one after another, in a format that writes them as texts.

        Args:
            begin: what is before a value, with {} for its key.
            end: what is after a value.

        Raises:
            UserError: see `forced_calls`.
        """
        schema = tool.parameters
        _check_word(tool.name)
        _check_keywords(tool.name, schema, _OF_OBJECTS)
        required = schema.get("required") or ()
        properties: Schema = {
            **(schema.get("properties") or {}),
            **{key: {} for key in required if key not in (schema.get("properties") or {})},
        }
        rules = []
        for key, one in properties.items():
            _check_word(key)
            if isinstance(one, dict) and one.get("type") == "string":
                value = self._text(f"{tool.name}.{key}", one, end)
            else:
                follows = one if isinstance(one, dict) else {}
                value = f"{self.value(follows, schema)} {self.literal(end)}"
            rule = f"{self.literal(begin.format(key))} {value} {_quoted(_NEWLINE)}"
            rules.append(rule if key in required else f"({rule})?")
        return " ".join(rules)

    def _text(self, name: str, schema: Schema, end: str) -> str:
        """An argument that is a text, and what is after it."""
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if choices is None:
            _check_keywords(name, schema, _OF_TEXTS)
            return "text"
        if any(end.strip() in str(one) for one in choices):
            raise UserError(f"the choices of {name!a} have a mark of the format of calls")
        texts = " | ".join(_quoted(str(one)) for one in choices)
        return f"({texts}) {self.literal(end)}"

    def text_rules(self, layout: Layout) -> list[str]:
        """Rules for any text, and the mark after it."""
        end = layout.text_end
        if not end:
            return []
        suffix = f"text_to_mark[suffix={_quoted(end)}]: {_without(layout.not_in_text)}"
        if end not in self._marks:
            return ["text: text_to_mark", suffix]
        return [
            f"text: text_to_mark | TEXT <[{self._marks[end]}]>",
            suffix,
            f"TEXT: {_without((*layout.not_in_text, end))}",
        ]


def forced_calls(
    begin: str,
    end: str,
    layout: Layout,
    tools: Sequence[Tool],
    several: bool,
    marks: Mapping[str, int],
) -> str:
    """The grammar of answers that are calls of these tools and nothing else.

    Args:
        several: whether there may be more than one call.
        marks: see `Notation`.

    Raises:
        UserError: a schema cannot be followed in this format.
    """
    notation = Notation(marks)
    # Templates let a newline or two stand between reasoning and what follows it.
    parts = [r"/\n{0,2}/", notation.literal(begin + layout.opening), "call"]
    if several:
        parts.append(f"({notation.literal(layout.between)} call)*")
    parts.append(notation.literal(layout.closing + end))
    names = [f"call_{index}" for index in range(len(tools))]
    calls = [
        f"{name}: {layout.call(tool, notation)}" for name, tool in zip(names, tools, strict=True)
    ]
    rules = [f"start: {' '.join(parts)}", f"call: {' | '.join(names)}", *calls]
    return "\n".join(rules + notation.text_rules(layout))


def _quoted(text: str) -> str:
    """A text as such; nothing for none."""
    return json.dumps(text) if text else ""


def _without(marks: Sequence[str]) -> str:
    """A regular expression of texts that have none of the marks."""
    listed = "|".join(re.escape(mark).replace("/", r"\/") for mark in marks)
    return rf"/(?s:.*)/ & ~/(?s:.*)({listed})(?s:.*)/"


def _check_keywords(name: str, schema: Schema, wrong: Sequence[str]) -> None:
    found = [keyword for keyword in wrong if keyword in schema]
    if found:
        raise UserError(
            f"the schema of {name!a} has {found[0]!a}, which cannot be held in the format of calls"
            " of this model: leave it out, or set tool_choice to 'auto'"
        )


def _check_word(name: str) -> None:
    if name != name.strip() or set(name) & set("<>\n"):
        raise UserError(f"{name!a} is no name in the format of calls of this model")
