"""Answers that must call tools: in the format of every family, with arguments that follow the
schemas, streamed or not."""

import json
import random
import re
from typing import Any

import jsonschema_rs
import numpy as np
import openai
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from transformers import AddedToken

from mtpkit.cli.demo import ROOT
from mtpkit.engine import StructuredOutputsParams
from mtpkit.engine.requests.grammar import grammar_of
from mtpkit.errors import UserError
from mtpkit.server.answers.calls import CallReader
from mtpkit.server.answers.forced import Layout, forced_calls, read_tool
from mtpkit.server.answers.formats import FORMATS
from mtpkit.server.answers.pieces import Call
from tests.engine.tokenizers import byte_level
from tests.server.test_answers import in_parts, whole, written

TOKENIZER = byte_level()
SIZE = 300
COLOUR = {"enum": ["red", "</tool_call> \n", 7, None, "é"]}


def tool(name: str, properties: dict, **others) -> dict:
    schema = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **others,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    tool(
        "add",
        {
            "left": {"type": "integer", "minimum": -9, "maximum": 99},
            "unit": {"type": "string", "enum": ["m", "a b", "<i>"]},
            "deep": {
                "type": "object",
                "properties": {"c": {"$ref": "#/$defs/colour"}},
                "required": ["c"],
                "additionalProperties": False,
            },
            "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        required=["left", "deep"],
        **{"$defs": {"colour": COLOUR}},
    ),
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {
    "add": TOOLS[0]["function"]["parameters"],
    "now": {"type": "object", "maxProperties": 0},
}


def grammar(name: str, tools: list[dict], several: bool = True, marks: dict | None = None) -> str:
    form = FORMATS[name]
    read = [*map(read_tool, tools)]
    rules = forced_calls(form.begin, form.end, form.layout, read, several, marks or {})
    return grammar_of(StructuredOutputsParams(grammar=rules))


def matcher(text: str, tokenizer=TOKENIZER) -> LLMatcher:
    wrapped = from_tokenizer(tokenizer, SIZE, [tokenizer.eos_token_id])
    return LLMatcher(wrapped, text, log_level=0)


MARKS = """
<tool_call> </tool_call> <TOOLCALL> </TOOLCALL> <arg_key> </arg_key> <arg_value> </arg_value>
<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>
""".split()  # noqa: SIM905


def marked() -> tuple[Any, dict[str, int]]:
    """A tokenizer with tokens for the marks of formats, as those of most models have; and these."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return tokenizer, {mark: tokenizer.convert_tokens_to_ids(mark) for mark in MARKS}


def drawn(text: str, seed: int, tokenizer=TOKENIZER) -> str:
    """An output that follows a grammar, drawn at random: of a model that knows nothing."""
    rng = random.Random(seed)
    walked = matcher(text, tokenizer)
    bits = allocate_token_bitmask(1, SIZE)
    tokens: list[int] = []
    while not walked.is_stopped() and len(tokens) < 4000:
        fill_next_token_bitmask(walked, bits)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:SIZE])
        if tokenizer.eos_token_id in allowed and rng.random() < 0.5:
            break
        tokens.append(int(rng.choice(allowed)))
        assert walked.consume_token(tokens[-1])
    return tokenizer.decode([one for one in tokens if one != tokenizer.eos_token_id])


@pytest.mark.parametrize("tokens", [False, True], ids=["texts", "tokens"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_follows_the_grammar_is_calls_that_follow_the_schemas(name, tokens):
    """Whether marks are tokens or texts."""
    tokenizer, marks = marked() if tokens else (TOKENIZER, {})
    rules = grammar(name, TOOLS, marks=marks)
    counts = set()
    called = set()
    for seed in range(40):
        text = drawn(rules, seed, tokenizer)
        calls = whole(CallReader(FORMATS[name], TOOLS, sure=True), text.lstrip("\n"))
        assert calls, text
        for function, arguments in calls:
            jsonschema_rs.validate(SCHEMAS[function], arguments)
            called.add(function)
        parts = in_parts(CallReader(FORMATS[name], TOOLS, sure=True), text, [*range(len(text))])
        assert parts[-len(calls) :] == calls
        counts.add(len(calls))
    assert called == {"add", "now"} and {1, 2} < counts
    one = grammar(name, TOOLS[:1], several=False)
    for seed in range(10):
        reader = CallReader(FORMATS[name], TOOLS, sure=True)
        ((function, _),) = whole(reader, drawn(one, seed).lstrip("\n"))
        assert function == "add"


@pytest.mark.parametrize("tokens", [False, True], ids=["texts", "tokens"])
@pytest.mark.parametrize("name", FORMATS)
def test_models_write_as_they_were_taught(name, tokens):
    """The grammar takes what the chat templates show, and no other tool, argument or text."""
    note = {"note": {"type": "string"}, "left": {"type": "integer"}}
    tokenizer, marks = marked() if tokens else (TOKENIZER, {})
    rules = grammar(name, [tool("add", note, required=["note"])], marks=marks)
    fine = {"note": "1 <b> </i>\n\nline", "left": 3}
    for arguments, right in (
        (fine, True),
        ({"note": ""}, True),
        ({"left": 3}, False),
        (fine | {"left": "three"}, False),
        (fine | {"other": 1}, False),
    ):
        text = written(name, arguments)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        walked = matcher(rules, tokenizer)
        taken = walked.try_consume_tokens(tokens) == len(tokens) and walked.is_accepting()
        assert taken == right, text
        if right:
            assert whole(CallReader(FORMATS[name], [], sure=True), text)
    text = written(name, fine).replace("add", "sub")
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert matcher(rules, tokenizer).try_consume_tokens(tokens) < len(tokens)


def test_marks_inside_arguments_end_nothing():
    for name, form in FORMATS.items():
        for mark in (form.end, f"{form.end}\n", "</parameter>\n", "</arg_value>", form.begin):
            tools = [tool("add", {"deep": {"type": "array"}})]
            text = written(name, {"deep": [mark]})
            reader = CallReader(form, tools, sure=True)
            assert whole(reader, text) == [("add", {"deep": [mark]})], (name, mark)
    # Where calls may be anything, what is between two markers is one or text.
    text = written("hermes", {"note": "</tool_call>"})
    assert not any(isinstance(one, Call) for one in whole(CallReader(FORMATS["hermes"], []), text))


def test_signs_of_regular_expressions_in_a_mark_are_signs():
    """A format of the future, whose marks are written like those of many vocabularies."""
    end = "<|end.of/it|>"
    layout = Layout("", "", "", lambda tool, notation: f'"{tool.name} " text', end, (end,))
    rules = forced_calls("", "", layout, [read_tool(TOOLS[1])], False, {})
    text = grammar_of(StructuredOutputsParams(grammar=rules))
    for words, follows in ((f"now a < end | b{end}", True), (f"now {end}{end}", False)):
        tokens = TOKENIZER.encode(words, add_special_tokens=False)
        assert (matcher(text).try_consume_tokens(tokens) == len(tokens)) == follows


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("hermes", {"function": {"name": 3}}, "each of tools needs a function with a name"),
        ("hermes", {"function": {"name": "a", "parameters": []}}, "a JSON schema of an object"),
        ("hermes", tool("a", {}, type="array"), "a JSON schema of an object"),
        ("glm45", tool("a", {}, anyOf=[{}]), "'a' has 'anyOf', which cannot be held"),
        (
            "qwen3_coder",
            tool("a", {"b": {"type": "string", "pattern": "x"}}),
            "'a.b' has 'pattern'",
        ),
        ("qwen3_coder", tool("a", {"b>": {}}), "'b>' is no name"),
        (
            "qwen3_coder",
            tool("a", {"b": {"type": "string", "enum": ["</parameter>"]}}),
            "have a mark of the format",
        ),
    ],
)
def test_tools_that_cannot_be_held_are_refused(name, wrong, said):
    with pytest.raises(UserError, match=said):
        grammar(name, [wrong])


QUESTION = [{"role": "user", "content": "the cat"}]
NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def terse(start, tmp_path_factory):
    """A server whose prompts leave room for answers."""
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text("{% for one in messages %}{{ one.content }}{% endfor %}:")
    return start(f"--chat-template={template}", "--tool-call-parser=hermes")


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_server_answers_with_calls(terse, choice):
    """From a model that writes bytes at random otherwise; most answers have an end."""
    client = terse.client()
    ends = 0
    for seed in range(6):
        body = dict(model="tiny", messages=QUESTION, tools=TOOLS, tool_choice=choice, seed=seed)
        body |= dict(max_tokens=400, parallel_tool_calls=seed % 2 > 0)
        answer = client.chat.completions.create(**body).choices[0]
        stream = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
        assert stream[-1].finish_reason == answer.finish_reason
        calls = answer.message.tool_calls or []
        streamed = [call for one in stream for call in one.delta.tool_calls or []]
        told, streamed = (
            [(call.function.name, call.function.arguments) for call in some]
            for some in (calls, streamed)
        )
        assert streamed == told
        if answer.finish_reason == "length":
            continue
        ends += 1
        assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
        assert calls and answer.message.content is None
        for call in calls:
            jsonschema_rs.validate(SCHEMAS[call.function.name], json.loads(call.function.arguments))
        if seed % 2 == 0 or choice == NAMED:
            assert len(calls) == 1
        if choice == NAMED:
            assert calls[0].function.name == "now"
    assert ends >= 3


def test_the_program_of_the_page_asks_for_calls_and_for_a_schema(terse, capsys):
    page = (ROOT / "docs/serving.md").read_text()
    (program,) = (one for one in re.findall("```python\n(.*?)```", page, re.S) if "tool" in one)
    exec(program.replace("http://localhost:8000", terse.url).replace("mine", "tiny"), {})
    assert "name='weather'" in capsys.readouterr().out


def test_calls_that_cannot_be_forced_are_refused(server):
    client = server.client()
    other = {"type": "function", "function": {"name": "other"}}
    for body, said in (
        ({"tool_choice": other, "tools": TOOLS}, "asks for a tool that is not among tools"),
        ({"tool_choice": "required"}, "asks for a tool that is not among tools"),
        ({"tool_choice": {"name": "now"}, "tools": TOOLS}, "or name a function"),
        (
            {"tool_choice": "required", "tools": [tool("a", {"b": {"type": "odd"}})]},
            "structured_outputs cannot be compiled",
        ),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            client.chat.completions.create(model="tiny", messages=QUESTION, **body)
