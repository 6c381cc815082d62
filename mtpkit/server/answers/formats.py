"""Formats in which models call tools: the markers around calls, how what is between is read, and
how it is written where a model must call a tool."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from mtpkit.server.answers.forced import Layout, Notation, Tool
from mtpkit.server.answers.pieces import Call

type Tools = Sequence[dict[str, Any]]
"""The tools of a request, in OpenAI's form."""


_DECODER = json.JSONDecoder()


class WrongCall(ValueError):
    """What stands between the markers is no call."""


class ToolFormat(NamedTuple):
    """How a family of models calls tools."""

    mark: str
    """Text that chat templates of this format have, and those of formats further down in `FORMATS`
    have not."""
    begin: str
    end: str
    read: Callable[[str, Tools], list[Call]]
    """Reads the text between `begin` and `end`; raises `WrongCall`."""
    layout: Layout
    """How the text between `begin` and `end` is written."""


def _read_json(body: str, _: Tools) -> list[Call]:
    """`{"name": .., "arguments": {..}}`, or a list of these."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WrongCall from error
    calls = found if isinstance(found, list) else [found]
    return [_json_call(call) for call in calls]


def _json_call(call: Any) -> Call:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise WrongCall
    arguments = call.get("arguments", call.get("parameters", {}))
    # Some models write the arguments as a text that holds JSON.
    if isinstance(arguments, str):
        arguments = _object(arguments)
    if not isinstance(arguments, dict):
        raise WrongCall
    return Call(call["name"], _dumped(arguments))


def _write_json(tool: Tool, notation: Notation) -> str:
    begin = f'{{"name": {json.dumps(tool.name)}, "arguments": '
    value = notation.value(tool.parameters, tool.parameters)
    return f"{notation.literal(begin)} {value} {notation.literal('}')}"


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_PARAMETER_END = re.compile(r"\n?</parameter>\s*|\n?(?=<parameter=)|\n?\Z")


def _read_xml(body: str, tools: Tools) -> list[Call]:
    """`<function=NAME><parameter=KEY>VALUE</parameter>..</function>`; a newline on either side of a
    value is not part of it."""
    function = _FUNCTION.fullmatch(body)
    if function is None:
        raise WrongCall
    name = function[1].strip()
    types = _types(name, tools)
    return [Call(name, _arguments(function[2], _PARAMETER, _PARAMETER_END, types))]


def _write_xml(tool: Tool, notation: Notation) -> str:
    begin = notation.literal(f"<function={tool.name}>\n")
    arguments = notation.arguments(tool, "<parameter={}>\n", "\n</parameter>")
    return f"{begin} {arguments} {notation.literal('</function>')}"


_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL)
_ARGUMENT_END = re.compile(r"</arg_value>\s*")


def _read_keys(body: str, tools: Tools) -> list[Call]:
    """`NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>..`."""
    name, mark, rest = body.partition("<arg_key>")
    name = name.strip()
    if not name or "\n" in name or "<" in name:
        raise WrongCall
    types = _types(name, tools)
    return [Call(name, _arguments(mark + rest, _ARGUMENT, _ARGUMENT_END, types))]


def _write_keys(tool: Tool, notation: Notation) -> str:
    begin = "<arg_key>{}</arg_key>\n<arg_value>"
    arguments = notation.arguments(tool, begin, "</arg_value>")
    return f"{notation.literal(tool.name + '\n')} {arguments}"


_DEEPSEEK_END = "\n```<｜tool▁call▁end｜>"
_DEEPSEEK = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([^\n]+)\n```json\n(.*?)\n```"
    r"|([^\n<]+)<｜tool▁sep｜>(.*?))\s*<｜tool▁call▁end｜>\s*",
    re.DOTALL,
)


def _read_deepseek(body: str, _: Tools) -> list[Call]:
    """Calls between markers of their own: of V3 `function<｜tool▁sep｜>NAME` and JSON in a code
    block, of V3.1 `NAME<｜tool▁sep｜>JSON`."""
    calls = [
        Call((name or short).strip(), _dumped(_object(arguments or brief)))
        for name, arguments, short, brief in _matches(_DEEPSEEK, body)
    ]
    if not calls:
        raise WrongCall
    return calls


def _write_deepseek(tool: Tool, notation: Notation) -> str:
    begin = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{tool.name}\n```json\n"
    value = notation.value(tool.parameters, tool.parameters)
    return f"{notation.literal(begin)} {value} {notation.literal(_DEEPSEEK_END)}"


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[tuple[str, ...]]:
    """The groups of matches that follow each other and make up a text."""
    place = 0
    while place < len(text.rstrip()):
        found = pattern.match(text, place)
        if found is None:
            raise WrongCall
        yield found.groups(default="")
        place = found.end()


def _arguments(
    text: str, begin: re.Pattern[str], end: re.Pattern[str], types: dict[str, Any]
) -> str:
    """JSON of arguments that were written as texts, with the types that the tool's schema gives
    them.

    Args:
        begin: matches what is before a value; its first group is the key.
        end: matches what is after a value.
        types: schemas by key.
    """
    found = dict[str, Any]()
    place = 0
    while place < len(text.rstrip()):
        begun = begin.match(text, place)
        if begun is None:
            raise WrongCall
        key = begun[1].strip()
        schema = types.get(key)
        whole = None if _is_text(schema) else _json_at(text, begun.end(), end)
        if whole is not None:
            found[key], place = whole
            continue
        ended = end.search(text, begun.end())
        if ended is None:
            raise WrongCall
        found[key] = _value(text[begun.end() : ended.start()], schema)
        place = ended.end()
    return _dumped(found)


def _json_at(text: str, place: int, end: re.Pattern[str]) -> tuple[Any, int] | None:
    """A JSON value and the place after its end mark; None: there is none. The value's own texts may
    have such a mark."""
    try:
        found, place = _DECODER.raw_decode(text, place)
    except (ValueError, RecursionError):
        return None
    ended = end.match(text, place)
    return None if ended is None else (found, ended.end())


def _types(name: str, tools: Tools) -> dict[str, Any]:
    """The schemas of a tool's parameters."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            return properties if isinstance(properties, dict) else {}
    return {}


def _value(text: str, schema: Any) -> Any:
    """A value of the type of a schema, as far as the text is one; the text where the schema asks
    for a text or is unknown."""
    if _is_text(schema):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)


def _is_text(schema: Any) -> bool:
    """Whether values of a schema are texts, as far as that is known."""
    return not isinstance(schema, dict) or schema.get("type") == "string"


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WrongCall from error
    if not isinstance(found, dict):
        raise WrongCall
    return found


def _dumped(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


_BETWEEN = "\n</tool_call>\n<tool_call>\n"

FORMATS = {
    "deepseek_v3": ToolFormat(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        _read_deepseek,
        Layout("", "\n", "", _write_deepseek),
    ),
    "nemotron": ToolFormat(
        "<TOOLCALL>",
        "<TOOLCALL>",
        "</TOOLCALL>",
        _read_json,
        Layout("[", ", ", "]", _write_json),
    ),
    "glm45": ToolFormat(
        "<arg_key>",
        "<tool_call>",
        "</tool_call>",
        _read_keys,
        Layout(
            "",
            "</tool_call>\n<tool_call>",
            "",
            _write_keys,
            "</arg_value>",
            ("<arg_key>", "</tool_call>"),
        ),
    ),
    "qwen3_coder": ToolFormat(
        "<function=",
        "<tool_call>",
        "</tool_call>",
        _read_xml,
        Layout(
            "\n",
            _BETWEEN,
            "\n",
            _write_xml,
            "</parameter>",
            ("<parameter=", "</function>", "</tool_call>"),
        ),
    ),
    "hermes": ToolFormat(
        "<tool_call>",
        "<tool_call>",
        "</tool_call>",
        _read_json,
        Layout("\n", _BETWEEN, "\n", _write_json),
    ),
}
"""All formats, by vLLM's names of their parsers."""


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template shows to its model; None if it shows none."""
    return next((one for one in FORMATS.values() if one.mark in template), None)
