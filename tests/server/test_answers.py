"""Answers taken apart: reasoning and calls in the formats of all families, whatever the parts in
which texts come."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtpkit.server.answers.calls import CallReader
from mtpkit.server.answers.formats import FORMATS, format_of
from mtpkit.server.answers.pieces import Call, Content, Reasoning
from mtpkit.server.answers.reader import AnswerReader, AnswerStyle
from mtpkit.server.answers.reasoning import ReasoningReader
from tests.data.chat_families import TEMPLATES

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "left": {"type": "integer"},
                    "right": {"type": ["number", "null"]},
                    "note": {"type": "string"},
                    "deep": {"type": "object"},
                    "sure": {"type": "boolean"},
                },
            },
        },
    }
]
ARGUMENTS = {"left": 1, "note": "2 <b>\n\nline", "deep": {"a": [1, "é"]}, "sure": True}


def texts_of(arguments: dict) -> dict[str, str]:
    """Arguments as XML has them."""
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in arguments.items()
    }


def written(name: str, arguments: dict) -> str:
    """A call of `add` as a model writes it."""
    texts = texts_of(arguments)
    as_json = json.dumps({"name": "add", "arguments": arguments}, ensure_ascii=False)
    match name:
        case "hermes":
            return f"<tool_call>\n{as_json}\n</tool_call>"
        case "nemotron":
            return f"<TOOLCALL>[{as_json}]</TOOLCALL>"
        case "qwen3_coder":
            inner = "".join(
                f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items()
            )
            return f"<tool_call>\n<function=add>\n{inner}</function>\n</tool_call>"
        case "glm45":
            inner = "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n"
                for key, text in texts.items()
            )
            return f"<tool_call>add\n{inner}</tool_call>"
        case "deepseek_v3":
            return (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
                f"{json.dumps(arguments)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            )
    raise AssertionError(name)


def joined(pieces: list) -> list:
    """Pieces with neighbours of one kind put together, and arguments as objects."""
    found: list = []
    for piece in pieces:
        if isinstance(piece, Call):
            found.append((piece.name, json.loads(piece.arguments)))
        elif found and type(found[-1]) is type(piece):
            found[-1] = type(piece)(found[-1].text + piece.text)
        else:
            found.append(piece)
    return found


def whole(reader, text: str) -> list:
    return joined(reader.read(text) + reader.end())


def in_parts(reader, text: str, cuts: list[int]) -> list:
    pieces = []
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    for start, end in zip([0, *ends], ends, strict=False):
        pieces += reader.read(text[start:end])
    return joined(pieces + reader.end())


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_in_the_format_of_each_family(name):
    call = written(name, ARGUMENTS)
    text = f"I add.\n\n{call}\n{call}"
    got = whole(CallReader(FORMATS[name], TOOLS), text)
    assert got == [Content("I add."), ("add", ARGUMENTS), ("add", ARGUMENTS)]
    assert whole(CallReader(FORMATS[name], TOOLS), written(name, {})) == [("add", {})]
    # An answer that is cut off inside a call, or has something else between the markers, is text.
    cut = text[: text.rindex(FORMATS[name].end)]
    assert whole(CallReader(FORMATS[name], TOOLS), cut)[-1] == Content(
        call[: call.rindex(FORMATS[name].end)]
    )
    wrong = f"see {FORMATS[name].begin} <what> {FORMATS[name].end} there "
    assert whole(CallReader(FORMATS[name], TOOLS), wrong) == [Content(wrong)]


def test_calls_of_deepseek_31_have_no_code_block():
    body = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"left": 1}<｜tool▁call▁end｜>'
    text = f"<｜tool▁calls▁begin｜>{body}{body}<｜tool▁calls▁end｜>"
    got = whole(CallReader(FORMATS["deepseek_v3"], TOOLS), text)
    assert got == [("add", {"left": 1})] * 2


def test_arguments_get_the_types_of_the_schema():
    given = {"left": "7", "right": "None", "note": "7", "sure": "False", "unknown": "7"}
    want = {"left": 7, "right": None, "note": "7", "sure": False, "unknown": "7"}
    for name in ("qwen3_coder", "glm45"):
        assert whole(CallReader(FORMATS[name], TOOLS), written(name, given)) == [("add", want)]
        # A text where the schema asks for a number is what the model wrote.
        odd = whole(CallReader(FORMATS[name], TOOLS), written(name, {"left": "seven"}))
        assert odd == [("add", {"left": "seven"})]
        none = whole(CallReader(FORMATS[name], [{"function": 3}]), written(name, {"left": "7"}))
        assert none == [("add", {"left": "7"})]


@pytest.mark.parametrize(
    ("opened", "text", "want"),
    [
        (False, "<think>\nhm\n</think>\n\nyes\n", [Reasoning("hm"), Content("yes\n")]),
        (False, "\n<think>hm</think>yes", [Reasoning("hm"), Content("yes")]),
        (False, "\n yes <think>no</think>", [Content("\n yes <think>no</think>")]),
        (False, "<think></think>\n", []),
        (False, "<thin", [Content("<thin")]),
        (True, "\n\nhm\nhm\n\n</think>\nyes", [Reasoning("hm\nhm"), Content("yes")]),
        (True, "hm </thi", [Reasoning("hm </thi")]),
        (True, "</think>yes</think>", [Content("yes</think>")]),
    ],
)
def test_reasoning_is_separated(opened, text, want):
    assert whole(ReasoningReader(opened), text) == want


BITS = st.sampled_from(
    [
        *("<think>", "</think>", "<thi", "</", "<", "\n", " ", "a", "é", "\n\n", "ok."),
        *(one.begin for one in FORMATS.values()),
        *(one.end for one in FORMATS.values()),
        *(written(name, {"left": 1, "note": "x"}) for name in FORMATS),
    ]
)


@settings(max_examples=600, deadline=None)
@given(
    st.lists(BITS, max_size=12).map("".join),
    st.lists(st.integers(0, 200), max_size=20),
    st.sampled_from([None, *FORMATS]),
    st.sampled_from([None, False, True]),
)
@example("<think>\na\n</think>\n<tool_call>x</tool_call>", list(range(200)), "hermes", False)
def test_parts_make_no_difference(text, cuts, name, opened):
    def reader() -> AnswerReader:
        reasoning = None if opened is None else ReasoningReader(opened)
        return AnswerReader(reasoning, CallReader(FORMATS[name], TOOLS) if name else None)

    want = whole(reader(), text)
    assert in_parts(reader(), text, cuts) == want
    assert in_parts(reader(), text, list(range(len(text)))) == want
    if name is None and opened is None:
        assert want == ([Content(text)] if text else [])


def test_templates_show_the_style():
    found = {name: AnswerStyle(text, "auto", "auto") for name, text in TEMPLATES.items()}
    formats = {one: name for name, one in FORMATS.items()}
    assert {name: style.tools and formats[style.tools] for name, style in found.items()} == {
        "qwen3": "hermes",
        "qwen3.5": "hermes",
        "deepseek": None,
        "glm": "glm45",
        "nemotron3": "qwen3_coder",
        "parts only": None,
    }
    reasoning = {"qwen3", "qwen3.5", "glm", "nemotron3"}
    assert {name for name, style in found.items() if style.reasons} == reasoning
    assert format_of("<｜tool▁calls▁begin｜>") == FORMATS["deepseek_v3"]
    style = AnswerStyle("", "hermes", "think")
    text = f"hm</think>{written('hermes', {})}"
    assert whole(style.reader("<think>\n", TOOLS), text) == [Reasoning("hm"), ("add", {})]
    assert whole(style.reader("", []), text) == [Content(text)]
    none = AnswerStyle(TEMPLATES["qwen3"], "none", "none")
    assert whole(none.reader("<think>\n", TOOLS), text) == [Content(text)]
