"""The official client against a server: texts are those of `LLM`, streams or not."""

import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from mtpkit.engine import SamplingParams

PROMPTS = ["the cat", "a", "é€ and 😀", "we re", "don't"]
QUESTION = [{"role": "user", "content": "the cat sat"}]
"""A conversation."""


def params(index: int, max_tokens: int = 24) -> dict:
    """Greedy or drawn, with penalties or without."""
    drawn = {"temperature": 1.0, "seed": index} if index % 2 else {"temperature": 0.0}
    penalties = {"frequency_penalty": 0.5} if index % 3 == 2 else {}
    return {"max_tokens": max_tokens, **drawn, **penalties}


def wanted(llm, index: int, **more):
    return llm.generate(PROMPTS[index], SamplingParams(**params(index), **more), use_tqdm=False)[0]


def usage_of(output) -> tuple[int, int]:
    return len(output.prompt_token_ids), len(output.outputs[0].token_ids)


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_completions_are_those_of_an_llm(server, llm, index):
    want = wanted(llm, index)
    client = server.client()
    got = client.completions.create(model="tiny", prompt=PROMPTS[index], **params(index))
    assert got.choices[0].text == want.outputs[0].text
    assert got.choices[0].finish_reason == want.outputs[0].finish_reason
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == usage_of(want)

    stream = list(
        client.completions.create(
            model="tiny",
            prompt=want.prompt_token_ids,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
            **params(index),
        )
    )
    *chunks, last = stream
    assert "".join(one.choices[0].text for one in chunks) == want.outputs[0].text
    tokens = [token for one in chunks for token in one.choices[0].token_ids]
    assert tokens == want.outputs[0].token_ids
    assert chunks[0].choices[0].prompt_token_ids == want.prompt_token_ids
    reasons = [one.choices[0].finish_reason for one in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [want.outputs[0].finish_reason]
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == usage_of(want)
    assert len({one.id for one in stream}) == 1


def test_several_prompts_have_one_choice_each(server, llm):
    client = server.client()
    prompts = ["the cat", "a", "we re"]
    wants = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    ids = [want.prompt_token_ids for want in wants]
    for given in (prompts, ids):
        got = client.completions.create(
            model="tiny", prompt=given, temperature=0, max_tokens=9, extra_body={"echo": True}
        )
        assert [one.index for one in got.choices] == [0, 1, 2]
        assert [one.text for one in got.choices] == [
            prompt + want.outputs[0].text for prompt, want in zip(prompts, wants, strict=True)
        ]
        assert got.usage.completion_tokens == 27

        texts = ["", "", ""]
        ends = []
        for chunk in client.completions.create(
            model="tiny", prompt=given, temperature=0, max_tokens=9, stream=True
        ):
            (choice,) = chunk.choices
            texts[choice.index] += choice.text
            ends += [choice.index] if choice.finish_reason else []
        assert texts == [want.outputs[0].text for want in wants]
        assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize("thinking", [True, False])
def test_chats_are_those_of_an_llm(server, llm, thinking):
    variables = {"enable_thinking": thinking}
    messages = [*QUESTION, {"role": "assistant", "content": "on the mat"}, *QUESTION]
    (want,) = llm.chat(
        messages,
        SamplingParams(temperature=0, max_tokens=24),
        chat_template_kwargs=variables,
        use_tqdm=False,
    )
    parts = [{"type": "text", "text": "the cat "}, {"type": "text", "text": "sat"}]
    asked = {
        "model": "tiny",
        "messages": [*messages[:-1], {"role": "user", "content": parts}],
        "temperature": 0,
        "max_completion_tokens": 24,
        "max_tokens": 3,
        "extra_body": {"chat_template_kwargs": variables, "return_token_ids": True},
    }
    client = server.client()
    got = client.chat.completions.create(**asked)
    assert got.prompt_token_ids == want.prompt_token_ids
    assert got.choices[0].token_ids == want.outputs[0].token_ids
    # The template has opened the reasoning, or closed it.
    text = want.outputs[0].text
    told = (None, text.lstrip("\n")) if thinking else (text, None)
    message = got.choices[0].message
    assert (message.content, message.reasoning_content) == told
    assert got.choices[0].message.role == "assistant"
    assert got.choices[0].finish_reason == "length"
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == usage_of(want)

    usage = {"include_usage": True, "continuous_usage_stats": True}
    stream = list(client.chat.completions.create(**asked, stream=True, stream_options=usage))
    first, *between, end, last = stream
    assert first.choices[0].delta.role == "assistant"
    deltas = [one.choices[0].delta.model_dump(exclude_unset=True) for one in between]
    name = "reasoning_content" if thinking else "content"
    assert "".join(delta.get(name, "") for delta in deltas) == told[thinking]
    tokens = [token for one in between for token in one.choices[0].token_ids]
    assert tokens == want.outputs[0].token_ids
    assert first.prompt_token_ids == want.prompt_token_ids
    assert all(one.choices[0].delta.role is None for one in between)
    assert all(one.choices[0].finish_reason is None for one in (first, *between))
    assert end.choices[0].finish_reason == "length"
    assert end.choices[0].delta.model_dump(exclude_unset=True) == {}
    assert last.choices == [] and last.usage.completion_tokens == 24
    counts = [one.usage.completion_tokens for one in stream]
    assert counts == sorted(counts) and all(one.usage.prompt_tokens for one in stream)


def test_streams_side_by_side_have_the_texts_of_an_llm(server, llm):
    prompts = [f"{PROMPTS[index % 5]} {index}" for index in range(24)]
    wants = llm.generate(
        prompts, [SamplingParams(**params(index, 12)) for index in range(24)], use_tqdm=False
    )
    client = server.client()

    def text(index: int) -> str:
        stream = client.completions.create(
            model="tiny", prompt=prompts[index], stream=True, **params(index, 12)
        )
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(text, range(24))) == [want.outputs[0].text for want in wants]


def test_stops_end_texts(server, llm):
    text = wanted(llm, 0).outputs[0].text
    stop = text[5:7]
    want = wanted(llm, 0, stop=stop)
    assert want.outputs[0].finish_reason == "stop"
    client = server.client()
    for given in (stop, [stop, "never"]):
        got = client.completions.create(model="tiny", prompt=PROMPTS[0], stop=given, **params(0))
        assert got.choices[0].text == text[: text.index(stop)] == want.outputs[0].text
        assert got.choices[0].finish_reason == "stop"
    token = want.outputs[0].token_ids[2]
    got = client.completions.create(
        model="tiny",
        prompt=PROMPTS[0],
        extra_body={"stop_token_ids": [token], "return_token_ids": True},
        **params(0),
    )
    assert got.choices[0].token_ids[-1] == token and got.choices[0].finish_reason == "stop"


def test_log_probabilities_are_those_of_an_llm(server, llm):
    asked = {"temperature": 1.0, "seed": 4, "max_tokens": 12}
    (want,) = llm.generate(PROMPTS[0], SamplingParams(**asked, logprobs=3), use_tqdm=False)
    client = server.client()
    got = client.completions.create(model="tiny", prompt=PROMPTS[0], logprobs=3, **asked)
    ids = want.outputs[0].token_ids
    positions = want.outputs[0].logprobs
    own = [tokens[token].logprob for token, tokens in zip(ids, positions, strict=True)]
    found = got.choices[0].logprobs
    assert found.token_logprobs == pytest.approx(own, abs=1e-4)
    texts = [tokens[token].decoded_token for token, tokens in zip(ids, positions, strict=True)]
    assert found.tokens == texts
    assert found.text_offset == [len("".join(texts[:place])) for place in range(12)]
    tops = zip(found.top_logprobs, found.tokens, strict=True)
    assert [top[token] for top, token in tops] == found.token_logprobs
    stream = client.completions.create(
        model="tiny", prompt=PROMPTS[0], logprobs=3, stream=True, **asked
    )
    parts = [chunk.choices[0].logprobs for chunk in stream]
    assert [one for part in parts for one in part.text_offset] == found.text_offset
    tops = [one for part in parts for one in part.top_logprobs]
    assert [one.keys() for one in tops] == [one.keys() for one in found.top_logprobs]

    (want,) = llm.chat(QUESTION, SamplingParams(**asked, logprobs=2), use_tqdm=False)
    chat = {"model": "tiny", "messages": QUESTION, "logprobs": True, "top_logprobs": 2, **asked}
    content = client.chat.completions.create(**chat).choices[0].logprobs.content
    for token, tokens, entry in zip(
        want.outputs[0].token_ids, want.outputs[0].logprobs, content, strict=True
    ):
        assert entry.token == tokens[token].decoded_token
        assert entry.logprob == pytest.approx(tokens[token].logprob, abs=1e-4)
        assert bytes(entry.bytes).decode() == entry.token
        best = sorted(tokens.values(), key=lambda each: each.rank)[:2]
        assert [one.token for one in entry.top_logprobs] == [one.decoded_token for one in best]
    chunks = list(client.chat.completions.create(**chat, stream=True))
    parts = [one.choices[0].logprobs for one in chunks if one.choices[0].logprobs]
    streamed = [entry for part in parts for entry in part.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    values = [entry.logprob for entry in content]
    assert [entry.logprob for entry in streamed] == pytest.approx(values, abs=1e-4)
    for wrong in ({"top_logprobs": 2, "logprobs": False}, {"top_logprobs": 21}):
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            client.chat.completions.create(**chat | wrong)


def test_log_probs_of_prompts(server, llm):
    """In both forms: a field of its own, and with the prompt's text where that is echoed."""
    client = server.client()
    asked = {"temperature": 0, "max_tokens": 5}
    params = SamplingParams(**asked, logprobs=2, prompt_logprobs=2)
    wants = llm.generate(PROMPTS[:3], params, use_tqdm=False)

    def same(found: list, want: list) -> None:
        assert found[0] is want[0] is None and len(found) == len(want)
        for one, tokens in zip(found[1:], want[1:], strict=True):
            assert [int(token) for token in one] == list(tokens)
            for entry, each in zip(one.values(), tokens.values(), strict=True):
                assert entry["logprob"] == pytest.approx(each.logprob, abs=1e-4)
                assert entry["rank"] == each.rank
                assert entry["decoded_token"] == each.decoded_token

    body = {"prompt": PROMPTS[:3], "prompt_logprobs": 2, **asked}
    choices = server.http.post("/v1/completions", json=body).json()["choices"]
    for choice, want in zip(choices, wants, strict=True):
        same(choice["prompt_logprobs"], want.prompt_logprobs)
    chat = {"messages": QUESTION, "prompt_logprobs": 2, **asked}
    (want,) = llm.chat(QUESTION, params, use_tqdm=False)
    found = server.http.post("/v1/chat/completions", json=chat).json()
    same(found["prompt_logprobs"], want.prompt_logprobs)

    echoed = {"model": "tiny", "prompt": PROMPTS[:3], "echo": True, "logprobs": 2}
    whole = client.completions.create(**echoed, **asked)
    for choice, prompt, want in zip(whole.choices, PROMPTS[:3], wants, strict=True):
        assert choice.text == prompt + want.outputs[0].text
        places = [*want.prompt_logprobs, *want.outputs[0].logprobs]
        ids = [*want.prompt_token_ids, *want.outputs[0].token_ids]
        values = [tokens and tokens[one].logprob for one, tokens in zip(ids, places, strict=True)]
        found = choice.logprobs
        assert found.token_logprobs[0] is found.top_logprobs[0] is values[0] is None
        assert found.token_logprobs[1:] == pytest.approx(values[1:], abs=1e-4)
        assert found.text_offset[1:] == list(itertools.accumulate(map(len, found.tokens[:-1])))
    stream = [
        chunk.choices[0] for chunk in client.completions.create(**echoed, **asked, stream=True)
    ]
    for place, choice in enumerate(whole.choices):
        parts = [one.logprobs for one in stream if one.index == place]
        assert [one for part in parts for one in part.tokens] == choice.logprobs.tokens
        assert [one for part in parts for one in part.text_offset] == choice.logprobs.text_offset

    # Of a prompt alone, as evaluation harnesses ask.
    alone = client.completions.create(**echoed, max_tokens=0)
    for choice, prompt, one in zip(alone.choices, PROMPTS[:3], whole.choices, strict=True):
        assert choice.text == prompt and choice.finish_reason == "length"
        count = len(choice.logprobs.tokens)
        assert choice.logprobs.tokens == one.logprobs.tokens[:count]
    assert alone.usage.completion_tokens == 0
    with pytest.raises(openai.BadRequestError, match="max_tokens is 0"):
        client.completions.create(model="tiny", prompt="a", max_tokens=0)


def test_several_outputs_per_prompt(server, llm):
    asked = {"temperature": 1.0, "seed": 4, "max_tokens": 9, "n": 3}
    wants = llm.generate(["the cat", "a"], SamplingParams(**asked), use_tqdm=False)
    texts = [one.text for want in wants for one in want.outputs]
    assert len(set(texts)) > 3
    client = server.client()
    got = client.completions.create(model="tiny", prompt=["the cat", "a"], **asked)
    assert [one.index for one in got.choices] == list(range(6))
    assert [one.text for one in got.choices] == texts
    assert got.usage.completion_tokens == 54
    assert got.usage.prompt_tokens == sum(len(want.prompt_token_ids) for want in wants)
    found = dict.fromkeys(range(6), "")
    for chunk in client.completions.create(
        model="tiny", prompt=["the cat", "a"], stream=True, **asked
    ):
        found[chunk.choices[0].index] += chunk.choices[0].text
    assert [*found.values()] == texts

    variables = {"enable_thinking": False}
    (want,) = llm.chat(
        QUESTION, SamplingParams(**asked), chat_template_kwargs=variables, use_tqdm=False
    )
    chat = {"model": "tiny", "messages": QUESTION, **asked}
    chat["extra_body"] = {"chat_template_kwargs": variables}
    got = client.chat.completions.create(**chat)
    assert [one.message.content for one in got.choices] == [one.text for one in want.outputs]
    chunks = [one.choices[0] for one in client.chat.completions.create(**chat, stream=True)]
    for index in range(3):
        own = [one for one in chunks if one.index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(one.delta.content or "" for one in own) == want.outputs[index].text
        assert [one.finish_reason for one in own] == [None] * (len(own) - 1) + ["length"]


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}


def test_outputs_are_constrained(server):
    client = server.client()
    asked = {"model": "tiny", "temperature": 1.0, "seed": 3, "max_tokens": 60}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    chat = client.chat.completions.create(
        messages=QUESTION, response_format=form, extra_body=off, **asked
    )
    assert json.loads(chat.choices[0].message.content)["a"] in (1, 2)
    assert chat.choices[0].finish_reason == "stop"
    for constraint, wanted in (
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"regex": "[ab]{3}c"}, "[ab]{3}c"),
    ):
        got = client.completions.create(
            prompt="a", extra_body={"structured_outputs": constraint}, **asked
        )
        assert re.fullmatch(wanted, got.choices[0].text)
    # The template has opened the reasoning: a constraint begins after it, and this never ends.
    chat = client.chat.completions.create(messages=QUESTION, response_format=form, **asked)
    assert chat.choices[0].message.content is None and chat.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError):
        bad = {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}, "name": "it"}}
        client.chat.completions.create(messages=QUESTION, response_format=bad, **asked)


def test_texts_end_and_prompts_begin_as_asked(server, llm):
    text = wanted(llm, 0).outputs[0].text
    client = server.client()
    body = {"include_stop_str_in_output": True}
    got = client.completions.create(
        model="tiny", prompt=PROMPTS[0], stop=text[5:7], extra_body=body, **params(0)
    )
    assert got.choices[0].text == text[: text.index(text[5:7]) + 2]
    assert got.choices[0].stop_reason == text[5:7]
    asked = dict(model="tiny", extra_body={"truncate_prompt_tokens": 5}, **params(0))
    for prompts in (["x" * 700], ["x" * 700, "x" * 600]):
        short = client.completions.create(prompt=prompts, **asked)
        assert short.usage.prompt_tokens == 5 * len(prompts)
        chunks = list(client.completions.create(prompt=prompts, **asked, stream=True))
        assert {chunk.choices[0].index for chunk in chunks} == set(range(len(prompts)))


def test_characters_come_whole(server):
    """Of several tokens each, in steps that accept drafts: the text is forced."""
    text = "é€😀 ünï 漢字 🏳️‍🌈"
    body = {"structured_outputs": {"choice": [text]}, "return_token_ids": True}
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 99, "extra_body": body}
    usage = {"include_usage": True}
    client = server.client()
    before = server.wait_until_idle()
    stream = client.completions.create(**asked, stream=True, stream_options=usage)
    *chunks, last = list(stream)
    after = server.wait_until_idle()
    accepted = "spec_decode_num_accepted_tokens_total"
    assert after[accepted] > before[accepted]
    parts = [one.choices[0].text for one in chunks]
    assert "".join(parts) == text and not any("\ufffd" in part for part in parts)
    tokens = [token for one in chunks for token in one.choices[0].token_ids]
    assert len(tokens) > len(text) and last.usage.completion_tokens == len(tokens)
    plain = client.completions.create(**asked)
    assert plain.choices[0].text == text and plain.choices[0].token_ids == tokens


def test_the_usage_is_the_number_of_token_ids(server):
    """With several outputs, stop strings inside accepted drafts, and streams."""
    client = server.client()
    body = {"return_token_ids": True}
    asked = {"model": "tiny", "prompt": ["the cat", "a"], "n": 3, "seed": 1, "max_tokens": 30}
    asked |= {"stop": ["a", "e", "\n", "0"], "extra_body": body}
    got = client.completions.create(**asked)
    counts = [len(one.token_ids) for one in got.choices]
    assert got.usage.completion_tokens == sum(counts) and len(set(counts)) > 1
    prompts = [len(one.prompt_token_ids) for one in got.choices[::3]]
    assert got.usage.prompt_tokens == sum(prompts)
    usage = {"include_usage": True}
    *chunks, last = list(client.completions.create(**asked, stream=True, stream_options=usage))
    assert last.usage.completion_tokens == sum(
        len(one.token_ids) for chunk in chunks for one in chunk.choices
    )
    assert last.usage.model_dump() | {"prompt_tokens_details": 0} == (
        got.usage.model_dump() | {"prompt_tokens_details": 0}
    )


def test_a_prompt_of_the_greatest_length_has_one_token(server):
    client = server.client()
    asked = {"model": "tiny", "prompt": [65] * 599, "max_tokens": 20}
    asked["extra_body"] = {"ignore_eos": True}
    got = client.completions.create(**asked)
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (599, 1)
    assert got.choices[0].finish_reason == "length"
    (*_, last) = list(client.completions.create(**asked, stream=True))
    assert last.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="leave no room for output"):
        client.completions.create(**asked | {"prompt": [65] * 600})


def test_errors_are_those_of_the_client(server):
    client = server.client()
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match=r"temperature is -1.0, must be") as refused:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert refused.value.param == "temperature" and refused.value.type == "BadRequestError"
    with pytest.raises(openai.BadRequestError, match="leave no room for output in max_model_len"):
        client.completions.create(model="tiny", prompt=[1] * 600, stream=True)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="a")


def test_models_and_tokens(server, llm):
    (model,) = server.client().models.list().data
    assert (model.id, model.max_model_len) == ("tiny", 600)
    http = server.http
    got = http.post("/tokenize", json={"prompt": "the cat é", "return_token_strs": True}).json()
    want = llm.tokenizer.encode("the cat é")
    assert got["tokens"] == want and got["count"] == len(want) == len(got["token_strs"])
    assert http.post("/detokenize", json={"tokens": want}).json() == {"prompt": "the cat é"}
    got = http.post("/tokenize", json={"messages": QUESTION}).json()
    assert got["tokens"] == llm.chat(QUESTION, use_tqdm=False)[0].prompt_token_ids
    assert got["max_model_len"] == 600 and got["token_strs"] is None
    for path in ("/health", "/ping", "/version", "/openapi.json"):
        assert http.get(path).status_code == 200


def test_request_ids_come_back(server):
    given = server.http.get("/version", headers={"X-Request-Id": "mine"})
    assert given.headers["x-request-id"] == "mine"
    body = {"prompt": "a", "max_tokens": 1}
    for _ in range(2):  # the same id twice is the client's business
        got = server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
        assert got.headers["x-request-id"] == "mine" and got.json()["id"] == "cmpl-mine"
    one, other = (server.http.post("/v1/completions", json=body) for _ in range(2))
    assert one.headers["x-request-id"] != other.headers["x-request-id"]
