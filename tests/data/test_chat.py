"""Masks of conversations: what the template marks and what is found without its marks are the same
tokens."""

import json
import logging
import re

import numpy as np
import pytest
from transformers import AddedToken

from mtpkit.data.chat import Chat, NothingToLearn, SampleError
from mtpkit.data.documents import tokenize
from mtpkit.data.samples import Sample
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.errors import UserError
from tests.data.packed import in_memory

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{"
    " m.content }}<|end|>{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}<|end|>\n{% endif"
    " %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
NO_GENERATION_PROMPT = (
    "{{ eos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{"
    " m.content | trim }}{{ eos_token }}{% endgeneration %}{% else %}[{{ m.content }}] {% endif"
    " %}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{"
    " raise_exception('alternate') }}{% endif %}{% endfor %}{% if messages | length < 2 %}{{"
    " raise_exception('too short') }}{% endif %}" + CHATML
)
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last"
    " = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|start|>{{ m.role }}\n{% if"
    " m.role == 'assistant' %}{% generation %}{% if m.reasoning_content and loop.index0 > ns.last"
    " %}<think>{{ m.reasoning_content }}</think>{% endif %}>{{ m.content }}{% for call in"
    " m.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments | tojson"
    " }}</call>{% endfor %}<|end|>{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}<|end|>\n{%"
    " endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TOOLS_LAST = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last"
    " = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant'"
    " %}<|bot|>{% generation %}{{ m.content }}{% if loop.last %}<|user|>{% elif"
    " messages[loop.index0 + 1].role == 'user' %}<|user|>{% else %}<|tool|>{% endif %}{%"
    " endgeneration %}{% else %}{% if loop.first %}<|user|>{% endif %}{% if loop.index0 == ns.last"
    " %}{{ tools | tojson }}{% endif %}{{ m.content }}{% endif %}{% endfor %}{% if"
    " add_generation_prompt %}<|bot|>{% endif %}"
)

TEMPLATES = {
    "chatml": CHATML,
    "no generation prompt": NO_GENERATION_PROMPT,
    "strict": STRICT,
    "thinking": THINKING,
    "tools last": TOOLS_LAST,
}
SPECIAL = ["<|start|>", "<|end|>", "<|bot|>", "<|user|>", "<|tool|>"]
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


TURNS = [
    user("the cat"),
    assistant("sat on the mat"),
    user("the mat"),
    assistant("the cat"),
    user("on"),
    assistant("A"),
]


@pytest.fixture
def tokenizer(tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def unmarked(template):
    return re.sub(r"\{% (end)?generation %\}", "", template)


def learnt(tokenizer, messages, tools=None):
    """The texts of the runs of tokens that are learnt."""
    token_ids, mask = Chat(tokenizer).encode(messages, tools)
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    return [tokenizer.decode(token_ids[start:end]) for start, end in edges]


@pytest.mark.parametrize("turns", [2, 4, 6])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_same_tokens_with_and_without_marks(tokenizer, name, turns) -> None:
    tokenizer.chat_template = TEMPLATES[name]
    marked = Chat(tokenizer).encode(TURNS[:turns], TOOLS)
    assert len(learnt(tokenizer, TURNS[:turns], TOOLS)) == turns // 2
    tokenizer.chat_template = unmarked(TEMPLATES[name])
    found = Chat(tokenizer).encode(TURNS[:turns], TOOLS)
    np.testing.assert_array_equal(found[0], marked[0])
    np.testing.assert_array_equal(found[1], marked[1])


def test_what_is_learnt_ends_with_the_turn(tokenizer) -> None:
    tokenizer.chat_template = unmarked(CHATML)
    assert learnt(tokenizer, TURNS[:4]) == ["sat on the mat<|end|>", "the cat<|end|>"]
    assert learnt(
        tokenizer, [{"role": "system", "content": "def"}, assistant("cat"), user("x")]
    ) == ["cat<|end|>"]
    tokenizer.chat_template = unmarked(TOOLS_LAST)
    assert learnt(tokenizer, TURNS[:4], TOOLS) == ["sat on the mat<|user|>", "the cat<|user|>"]


def test_reasoning_that_older_turns_lose(tokenizer) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"left": 1}'}}
    turns = [
        user("the cat"),
        assistant("", reasoning_content="one", tool_calls=[call]),
        {"role": "tool", "content": "3"},
        assistant("two", reasoning_content="three"),
        user("more"),
        assistant("mat", reasoning_content="four"),
    ]
    want = ['><call>add{"left": 1}</call><|end|>', ">two<|end|>", "<think>four</think>>mat<|end|>"]
    for template in (THINKING, unmarked(THINKING)):
        tokenizer.chat_template = template
        assert learnt(tokenizer, turns) == want
    # A generation prompt that opens the reasoning is not learnt; where history shows none, neither
    # is its place.
    tokenizer.chat_template = unmarked(THINKING).replace(
        "<|start|>assistant\n{% endif", "<|start|>assistant\n<think>{% endif"
    )
    assert learnt(tokenizer, turns) == [want[0][1:], want[1][1:], "four</think>>mat<|end|>"]


def test_a_call_that_cannot_be_exchanged(tokenizer) -> None:
    """A template without generation prompt that refuses a result without its call, and puts tools
    where it likes."""
    marked = (
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls"
        " %}{{ raise_exception('no call') }}{% endif %}{% if m.role == 'assistant' %}{% generation"
        " %}{{ m.content }}{% for call in m.tool_calls or [] %}<call>{{ call.function.name"
        " }}</call>{% endfor %}{{ eos_token }}{% endgeneration %}{% else %}{% if loop.index0 =="
        " place %}{{ tools | tojson }}{% endif %}[{{ m.content }}]{% endif %}{% endfor %}"
    )
    turns = [
        user("a"),
        assistant("", tool_calls=[{"function": {"name": "f"}}]),
        {"role": "tool", "content": "3"},
    ]
    turns = [*turns, assistant("b"), user("c"), assistant("d")]
    for template in (marked, unmarked(marked)):
        tokenizer.chat_template = "{% set place = 0 %}" + template
        assert learnt(tokenizer, turns, TOOLS) == ["<call>f</call><eos>", "b<eos>", "d<eos>"]
    tokenizer.chat_template = "{% set place = messages | length - 2 %}" + unmarked(marked)
    with pytest.raises(SampleError, match="message 2, the assistant's, is not found"):
        Chat(tokenizer).encode(turns, TOOLS)


def test_repeated_texts_are_told_apart(tokenizer) -> None:
    tokenizer.chat_template = unmarked(THINKING)
    turns = [
        user("A"),
        assistant("A"),
        user("A-A"),
        assistant("A-A"),
        user("B"),
        assistant("B-B", reasoning_content="A"),
    ]
    assert learnt(tokenizer, turns) == [">A<|end|>", ">A-A<|end|>", "<think>A</think>>B-B<|end|>"]


def test_a_tokenizer_without_offsets_learns_the_same_text(tokenizer) -> None:
    class Slow:
        is_fast = False

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __call__(self, *args, **kwargs):
            return tokenizer(*args, **kwargs)

    for template in (CHATML, unmarked(THINKING), unmarked(TOOLS_LAST)):
        tokenizer.chat_template = template
        assert learnt(Slow(), TURNS, TOOLS) == learnt(tokenizer, TURNS, TOOLS)
        assert tokenizer.decode(Chat(Slow()).encode(TURNS, TOOLS)[0]) == tokenizer.decode(
            Chat(tokenizer).encode(TURNS, TOOLS)[0]
        )


@pytest.mark.parametrize("template", [STRICT, unmarked(STRICT)])
def test_conversations_that_cannot_be_learnt(tokenizer, template) -> None:
    tokenizer.chat_template = template
    with pytest.raises(SampleError, match="the chat template refuses it: alternate"):
        Chat(tokenizer).encode([assistant("a"), user("b")])
    with pytest.raises(NothingToLearn, match="no assistant message"):
        Chat(tokenizer).encode([user("b")])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(SampleError, match="message 2, the assistant's, is not found"):
        Chat(tokenizer).encode([user("b"), assistant("c")])


def test_samples_whose_mask_is_empty_are_listed(tokenizer, caplog) -> None:
    tokenizer.chat_template = CHATML.replace("{% generation %}", "").replace(
        "<|end|>{% endgeneration %}",
        "{% if m.train %}{% generation %}<|end|>{% endgeneration %}{% endif %}",
        1,
    )
    samples = [
        Sample(
            messages=[user("the cat"), assistant("sat", train=number != 2)] if number else [],
            name=f"a.jsonl:{number}",
        )
        for number in range(4)
    ]
    with caplog.at_level(logging.WARNING):
        dataset = in_memory(tokenize(samples, tokenizer), 8, pad_id=0)
    assert "2 of 4 documents" in caplog.text
    assert "a.jsonl:0 (no assistant message), a.jsonl:2 (no message is to be learnt)" in caplog.text
    assert (dataset.counts[0].num_documents, dataset.counts[0].num_left_out) == (4, 2)


def test_a_tokenizer_without_template(tokenizer) -> None:
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"has no chat template .*--chat-template"):
        list(tokenize([Sample(messages=TURNS)], tokenizer))


def test_prompts_end_where_the_answer_begins(tokenizer) -> None:
    tokenizer.chat_template = CHATML
    assert (
        Chat(tokenizer).prompt(TURNS[:1], None)
        == "<|start|>user\nthe cat<|end|>\n<|start|>assistant\n"
    )
    call = {"function": {"name": "add", "arguments": json.dumps({"left": 1})}}
    tokenizer.chat_template = THINKING
    text = Chat(tokenizer).prompt([user("a"), assistant("", tool_calls=[call]), user("b")], TOOLS)
    assert '<call>add{"left": 1}</call>' in text and isinstance(call["function"]["arguments"], str)
