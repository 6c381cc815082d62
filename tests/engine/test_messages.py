"""Conversations as prompts: what `LLM.chat` reads is what transformers renders, and the next turn
goes on from where the last one was asked."""

import re

import pytest
from transformers import AddedToken

from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.engine import SamplingParams
from mtpkit.engine.requests.prompts import encode
from mtpkit.errors import UserError
from mtpkit.model import build_model
from tests.data.chat_families import SPECIAL, TEMPLATES, TOKENS
from tests.engine.tiny import greedy, make_llm, tiny_config, tiny_model

BARE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""No special token stands between the question and the generation prompt."""
GLUED = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}t{% endif %}"
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('no ' + messages[0].role) }}" + (
    "{% endif %}" + BARE
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


QUESTION = [user("the cat sat")]
TURNS = [*QUESTION, assistant("on the mat"), user("def add")]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOKENS])
    return tokenizer


@pytest.fixture(scope="module")
def model():
    return build_model(
        tiny_config().replace(vocab_size=400, max_position_embeddings=600), device="cpu", seed=1
    )


@pytest.fixture
def llm(model, tokenizer):
    tokenizer.chat_template = BARE
    return make_llm(model, 2, tokenizer=tokenizer)


def reference(tokenizer, messages, **more):
    """What transformers makes of a conversation."""
    return tokenizer.apply_chat_template(messages, tokenize=False, **more)


@pytest.mark.parametrize("family", [*(one for one in TEMPLATES if one != "parts only"), "bare"])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_conversation_is_read_as_transformers_renders_it(tokenizer, family, tools):
    tokenizer.chat_template = TEMPLATES.get(family, BARE)
    asked = {"messages": TURNS, "tools": tools}
    text, token_ids, at = encode(asked, tokenizer, "it")
    assert text == reference(tokenizer, TURNS, tools=tools, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(
        TURNS, tools=tools, add_generation_prompt=True, return_dict=False
    )
    assert token_ids == whole
    before = tokenizer.apply_chat_template(TURNS, tools=tools, return_dict=False)
    if before == whole:  # this template writes no generation prompt
        assert at is None
    else:
        assert token_ids[:at] == before[:at] and token_ids[at] not in before[at : at + 1]


def test_arguments_of_the_template(llm, tokenizer):
    tokenizer.chat_template = TEMPLATES["qwen3.5"]

    def prompt_of(messages, **arguments):
        return llm.chat(messages, greedy(1), **arguments)[0].prompt

    more = dict(add_generation_prompt=True)
    assert prompt_of(TURNS) == reference(tokenizer, TURNS, **more)
    assert prompt_of(TURNS, tools=TOOLS) == reference(tokenizer, TURNS, tools=TOOLS, **more)
    thoughtless = dict(enable_thinking=False)
    assert prompt_of(TURNS, chat_template_kwargs=thoughtless) == reference(
        tokenizer, TURNS, **thoughtless, **more
    )
    assert prompt_of(TURNS, chat_template=BARE) == reference(
        tokenizer, TURNS, chat_template=BARE, **more
    )
    assert prompt_of(TURNS, add_generation_prompt=False) == reference(tokenizer, TURNS)
    open_turn = prompt_of(TURNS[:2], add_generation_prompt=False, continue_final_message=True)
    assert open_turn == reference(tokenizer, TURNS[:2], continue_final_message=True)
    assert open_turn.endswith("on the mat")
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat sat"}]
    assert prompt_of([user(parts)]) == prompt_of(QUESTION)
    assert prompt_of([user(parts)], chat_template_content_format="auto") == prompt_of(QUESTION)


def test_a_template_of_its_own_needs_none_beside_the_tokenizer(llm, tokenizer):
    tokenizer.chat_template = None
    assert llm.chat(QUESTION, greedy(1), chat_template=BARE)[0].prompt == (
        "user: the cat sat\nassistant:"
    )


def test_the_checkpoint_is_before_the_generation_prompt(tokenizer):
    """Where a token has characters of both sides, tokens before it count."""
    tokenizer.chat_template = BARE
    _, token_ids, at = encode({"messages": TURNS}, tokenizer, "it")
    assert tokenizer.decode(token_ids[at:]) == "assistant:"
    tokenizer.chat_template = GLUED
    text, token_ids, at = encode({"messages": [user("the ca")]}, tokenizer, "it")
    alone = tokenizer("the ca")["input_ids"]
    assert text == "the cat" and token_ids[: len(alone)] != alone  # "cat" is one token
    assert at == len([1 for one, other in zip(token_ids, alone, strict=False) if one == other]) > 0
    # Here even the first token is another one.
    _, token_ids, at = encode({"messages": [user("a")]}, tokenizer, "it")
    assert len(token_ids) == 1 and at is None
    # A user's own place counts.
    tokenizer.chat_template = BARE
    llm = make_llm(tiny_model(), 0)
    llm.engine.intake.tokenizer = tokenizer
    llm.engine.intake.vocab_size = 400
    read = llm.engine.intake.read
    asked = {"messages": TURNS}
    _, _, at = encode(asked, tokenizer, "it")
    assert read(asked, greedy(), "a", "it", False).checkpoint_at == at
    assert read({**asked, "checkpoint_at": 2}, greedy(), "b", "it", False).checkpoint_at == 2


def test_no_checkpoint_where_the_template_insists_on_an_answer(tokenizer):
    tokenizer.chat_template = (
        "{% if not add_generation_prompt %}{{ raise_exception('ask') }}{% endif %}" + BARE
    )
    assert encode({"messages": QUESTION}, tokenizer, "it").checkpoint_at is None


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "deepseek", "bare"])
@pytest.mark.parametrize("k", [0, 2])
def test_the_next_turn_goes_on_from_the_last_question(model, tokenizer, family, k):
    """Whatever the template makes of the answer, which is why the end of the prompt is no good
    place for a checkpoint."""
    tokenizer.chat_template = TEMPLATES.get(family, BARE)
    cached = make_llm(model, k, tokenizer=tokenizer, enable_prefix_caching=True)
    plain = make_llm(model, k, tokenizer=tokenizer)
    messages = [user("the cat sat on the mat, " * 3)]
    asked = 0
    for _ in range(3):
        output = cached.chat(messages, greedy(6))[0]
        assert output.num_cached_tokens >= asked
        assert (output.num_cached_tokens > 0) == (asked > 0)
        want = plain.chat(messages, greedy(6))[0].outputs[0]
        assert output.outputs[0].token_ids == want.token_ids
        asked = encode({"messages": messages}, tokenizer, "it").checkpoint_at
        messages = [*messages, assistant("on the mat", reasoning_content="hm"), user("def add")]
    cached.engine.scheduler.check_integrity()


def test_conversations_and_answers_come_in_order(llm):
    several = [QUESTION, TURNS, [user("left")]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 5, 4)]
    outputs = llm.chat(several, params)
    assert [len(one.outputs[0].token_ids) for one in outputs] == [3, 5, 4]
    for messages, one, output in zip(several, params, outputs, strict=True):
        alone = llm.chat(messages, one)[0]
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        streamed = list(llm.stream({"messages": messages}, one))
        assert streamed[-1].outputs[0].text == output.outputs[0].text
    assert [one.prompt for one in outputs] == [
        reference(llm.tokenizer, one, add_generation_prompt=True) for one in several
    ]


BAD = {
    "messages[1] has no messages: give at least one": [],
    "messages[1]: 'messages' must be a list of objects, not of 'hello'": ["hello"],
    "messages[1]: 'messages' holds int, not a list": 7,
    "messages[1]: message 1 of 'messages' has no role": [{"content": "a"}],
    "messages[1]: message 1 of 'messages' has a part of the type 'image_url'; models read and write"
    " text only": [user([{"type": "image_url", "image_url": {"url": "x"}}])],
    "messages[1]: message 1 of 'messages' has a part whose text is None; give a text": [
        user([{"type": "text", "text": None}])
    ],
    "messages[1]: message 1 of 'messages' has the content 5, which is not text": [user(5)],
    "messages[1]: the chat template refuses it: no robot": [{"role": "robot", "content": "a"}],
    "messages[1]: column 'messages' has '\\ud800', half of a surrogate pair": [user("a \ud800")],
}


@pytest.mark.parametrize("message", BAD)
def test_a_conversation_that_cannot_be_rendered_costs_no_other(llm, tokenizer, message):
    tokenizer.chat_template = STRICT
    outputs = llm.chat([QUESTION, BAD[message], TURNS], greedy(3))
    assert [one.outputs[0].finish_reason for one in outputs] == ["length", "error", "length"]
    assert message in outputs[1].error and "\n" not in outputs[1].error
    if BAD[message] not in ([], 7, ["hello"]):  # these are no conversation, or a list of them
        with pytest.raises(UserError, match=re.escape(message.partition(": ")[2])):
            llm.chat(BAD[message], greedy(3))
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    ("messages", "arguments", "message"),
    [
        ("hello", {}, "^messages is 'hello': give a list of messages, or a list of such lists$"),
        ({}, {}, "^messages is {}: give a list of messages"),
        ([], {}, "^the conversation has no messages: give at least one$"),
        (["hello"], {}, "^the conversation: 'messages' must be a list of objects, not of 'hello'$"),
        (QUESTION, {"tools": ["add"]}, "'tools' must be a list of objects, not of 'add'"),
        (
            QUESTION,
            {"chat_template_kwargs": {"tokenize": True}},
            "'chat_template_kwargs' has 'tokenize', no variable of chat templates",
        ),
        (QUESTION, {"chat_template_kwargs": 3}, "'chat_template_kwargs' holds int, not an object"),
        (QUESTION, {"chat_template": 3}, "chat_template is 3, must be a text"),
        (QUESTION, {"chat_template": "{% if"}, "the chat template refuses it: "),
        (QUESTION, {"add_generation_prompt": 1}, "add_generation_prompt is 1, must be True or"),
        (
            TURNS,
            {"continue_final_message": True},
            "goes on with the last message, and add_generation_prompt begins a new one: set"
            " add_generation_prompt=False$",
        ),
        (QUESTION, {"lora_request": 1}, r"lora_request \(adapters must be merged into the weights"),
        (QUESTION, {"tool": []}, r"^LLM.chat has no argument tool \(did you mean tools\?\)"),
    ],
)
def test_mistakes_are_one_line(llm, messages, arguments, message):
    with pytest.raises(UserError, match=message) as caught:
        llm.chat(messages, greedy(3), **arguments)
    assert "\n" not in str(caught.value) and not llm.engine.has_unfinished


def test_without_a_template_or_a_tokenizer_the_remedy_is_said(llm, tokenizer):
    tokenizer.chat_template = None
    for call in (lambda: llm.chat(QUESTION), lambda: llm.chat([QUESTION, QUESTION])):
        with pytest.raises(UserError, match=r"has no chat template: add chat_template\.jinja to"):
            call()
    with pytest.raises(UserError, match="is a conversation, which needs a tokenizer: put one"):
        make_llm(tiny_model(), 0).chat(QUESTION)
