"""Chunks of streams are what their models render, byte for byte, although most of them are put
together from a template."""

import asyncio

import httpx
import pytest

from mtpkit.server.answers.reader import AnswerStyle
from mtpkit.server.app import make_app
from mtpkit.server.chunks import PLACE, Template, chunk_json
from mtpkit.server.protocol.base import Body
from mtpkit.server.protocol.chat import ChatChunk
from mtpkit.server.protocol.completions import CompletionChoice, CompletionResponse
from mtpkit.server.service import Service
from tests.data.chat_families import NEMOTRON3
from tests.server.test_chat_pieces import ANSWER, KnownAnswer

HARD = [
    "",
    " plain",
    'a "quoted" word',
    "back\\slash \\u0000 \\n",
    "".join(map(chr, range(32))),
    '"\\u0000"',
    "\x7f\x80\x9f\xa0\u2028\u2029\ufeff\ufffd\uffff",
    "é€😀\U0010ffff",
    "</script>/",
]
"""Texts of which JSON escapes some characters."""


def chunk(text: str, name: str) -> CompletionResponse:
    choice = CompletionChoice(index=3, text=text, logprobs=None, finish_reason=None)
    return CompletionResponse(id=f"cmpl-{name}", created=7, model=name, choices=[choice])


@pytest.mark.parametrize("name", HARD)
def test_a_template_renders_what_the_model_does(name):
    template = Template(chunk(PLACE, name))
    for text in (*HARD, "".join(HARD)):
        assert template.render(text) == chunk_json(chunk(text, name))


def events(path: str, answer: str, **body) -> list[str]:
    """What the events of a stream hold, whose engine says `answer`."""
    llm = KnownAnswer(answer, 3)
    service = Service(llm, 'a "model"', "dir", AnswerStyle(NEMOTRON3, "auto", "auto"))
    transport = httpx.ASGITransport(make_app(service))

    async def ask() -> str:
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            response = await http.post(path, json={"stream": True, **body})
            return response.text

    found = asyncio.run(ask()).split("\n\n")
    assert found[-2:] == ["data: [DONE]", ""]
    return [one.removeprefix("data: ") for one in found[:-2]]


def assert_rendered_by(model: type[Body], found: list[str]) -> None:
    assert len(found) > 5
    for one in found:
        assert chunk_json(model.model_validate_json(one)) == one


@pytest.mark.parametrize(
    "more", [{}, {"stream_options": {"continuous_usage_stats": True}}, {"return_token_ids": True}]
)
def test_streams_are_what_their_models_render(more):
    answer = "".join(HARD)
    found = events("/v1/completions", answer, prompt="a", **more)
    assert_rendered_by(CompletionResponse, found)
    choices = [CompletionResponse.model_validate_json(one).choices[0] for one in found]
    assert "".join(one.text for one in choices) == answer
    # All chunks have the same fields, but the first and the last one.
    fields = {frozenset(one.model_fields_set) for one in choices[1:-1]}
    assert len(fields) == 1 and ("token_ids" in fields.pop()) is ("return_token_ids" in more)

    messages = [{"role": "user", "content": "hi"}]
    for text in (answer, ANSWER):
        found = events("/v1/chat/completions", text, messages=messages, **more)
        assert_rendered_by(ChatChunk, found)
    chunks = [ChatChunk.model_validate_json(one) for one in found]
    assert all((one.usage is None) is ("stream_options" not in more) for one in chunks)
