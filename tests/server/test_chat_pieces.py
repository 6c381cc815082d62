"""Reasoning and calls of tools in chats, as the official client reads them, from an engine whose
answer is known."""

import asyncio
import json

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from mtpkit.engine import CompletionOutput, RequestOutput
from mtpkit.engine.requests.stats import RequestStats
from mtpkit.server.answers.reader import AnswerStyle
from mtpkit.server.app import make_app
from mtpkit.server.service import Service
from tests.data.chat_families import NEMOTRON3, PARTS_ONLY
from tests.server.test_answers import TOOLS

CALL = "<tool_call>\n<function=add>\n<parameter=left>\n{}\n</parameter>\n</function>\n</tool_call>"
ANSWER = f"I think.\n</think>\n\nI add.\n{CALL.format(1)}\n{CALL.format(2)}"


class KnownAnswer:
    """Stands in for an `AsyncLLM`: says `ANSWER`, a few characters at a time."""

    max_model_len = 1000
    tokenizer = None

    def __init__(self, answer: str, size: int) -> None:
        self.answer = answer
        self.size = size
        self.prompts: list = []

    async def with_tokenizer(self, function):
        """What a function makes of no tokenizer."""
        return function(self.tokenizer)

    async def generate(self, prompt, params):
        """Outputs that hold what is new, or the only one."""
        self.prompts.append(prompt)
        step = self.size if params.output_kind.name == "DELTA" else len(self.answer)
        for start in range(0, len(self.answer), step):
            text = self.answer[start : start + step]
            last = start + step >= len(self.answer)
            completion = CompletionOutput([7], text, "stop" if last else None)
            yield RequestOutput(
                "0", "user: hi <think>\n", [1, 2], [completion], RequestStats(), last
            )


def asked(answer: str = ANSWER, size: int = 3, template: str = NEMOTRON3, **body):
    """The whole answer, the chunks of a stream, and the prompts that the engine got."""
    llm = KnownAnswer(answer, size)
    style = AnswerStyle(template, "auto", "auto")
    app = make_app(Service(llm, "tiny", "dir", style))
    transport = httpx.ASGITransport(app)

    async def ask():
        async with httpx.AsyncClient(transport=transport) as http:
            client = AsyncOpenAI(base_url="http://x/v1", api_key="x", http_client=http)
            body_of = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **body}
            whole = await client.chat.completions.create(**body_of)
            stream = await client.chat.completions.create(**body_of, stream=True)
            return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(ask())
    return whole.choices[0], [chunk.choices[0] for chunk in chunks], llm.prompts


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_reasoning_and_calls_are_separate(size):
    whole, chunks, prompts = asked(size=size, tools=TOOLS)
    assert prompts[0]["tools"] == TOOLS
    assert whole.message.reasoning_content == "I think."
    assert whole.message.content == "I add."
    assert whole.finish_reason == "tool_calls"
    calls = [
        (one.function.name, json.loads(one.function.arguments)) for one in whole.message.tool_calls
    ]
    assert calls == [("add", {"left": 1}), ("add", {"left": 2})]

    deltas = [one.delta for one in chunks]
    assert deltas[0].role == "assistant"
    reasoning = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(reasoning) == "I think."
    assert "".join(delta.content or "" for delta in deltas) == "I add."
    streamed = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in streamed] == [0, 1] and len({call.id for call in streamed}) == 2
    got = [(one.function.name, json.loads(one.function.arguments)) for one in streamed]
    assert got == calls
    assert [one.finish_reason for one in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    assert not deltas[-1].tool_calls and deltas[-1].content is None


def test_calls_are_read_only_where_there_are_tools():
    text = ANSWER.partition("</think>\n\n")[2]
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        whole, _, prompts = asked(**body)
        assert whole.message.content == text and whole.message.tool_calls is None
        assert whole.finish_reason == "stop" and prompts[0]["tools"] is None
    whole, chunks, _ = asked(tools=TOOLS, parallel_tool_calls=False)
    assert len(whole.message.tool_calls) == 1
    assert sum(len(one.delta.tool_calls or []) for one in chunks) == 1
    alone, _, _ = asked("hm</think>" + CALL.format(1), tools=TOOLS)
    assert alone.message.content is None and alone.finish_reason == "tool_calls"


def test_tools_that_cannot_be_called_are_refused():
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        asked(template=PARTS_ONLY, tools=TOOLS)
    with pytest.raises(openai.BadRequestError, match="tool_choice needs a format of calls"):
        asked(template=PARTS_ONLY, tool_choice="required")


def test_an_error_while_decoding_is_an_event():
    class Failing(KnownAnswer):
        async def generate(self, prompt, params):
            yield RequestOutput(
                "0", "", [1], [CompletionOutput([7], "a", None)], RequestStats(), False
            )
            failed = CompletionOutput([], "", "error", error="messages: the logits are NaN")
            yield RequestOutput("0", "", [1], [failed], RequestStats(), True)

    service = Service(Failing("", 1), "tiny", "dir", AnswerStyle("", "none", "none"))
    transport = httpx.ASGITransport(make_app(service))

    async def ask() -> tuple[httpx.Response, str]:
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            plain = await http.post("/v1/completions", json={"prompt": "a"})
            stream = await http.post("/v1/completions", json={"prompt": "a", "stream": True})
            return plain, stream.text

    plain, events = asyncio.run(ask())
    assert plain.status_code == 500
    assert plain.json()["error"]["message"] == "messages: the logits are NaN"
    *_, error, done = events.strip().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 500
    assert done == "data: [DONE]"
    assert service.metrics.text().count(b'finished_reason="error",model_name="tiny"} 2.0') == 1
