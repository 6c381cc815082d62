"""What is learnt of conversations is what the assistant writes when it is served, in the manner of
every family."""

import json

import numpy as np
import pytest
from transformers import AddedToken

from mtpkit.data.chat import Chat, NothingToLearn, SampleError
from mtpkit.data.conversations import read_conversation
from mtpkit.data.documents import tokenize
from mtpkit.data.options import DataOptions
from mtpkit.data.samples import Sample
from mtpkit.data.tokenizer import load_tokenizer
from tests.data.chat_families import ENDS, SPECIAL, TEMPLATES, TOKENS
from tests.shared import each

WITH_CALLS = [name for name in TEMPLATES if name != "parts only"]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]
ARGUMENTS = {"left": 1, "right": "the cat"}
CALL_ENDS = {"deepseek": "<|/calls|><eos>", "glm": "</tool_call><|observation|>"}


@pytest.fixture(scope="module")
def loaded(tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOKENS])
    return tokenizer


@pytest.fixture(params=TEMPLATES)
def family(request):
    return request.param


@pytest.fixture
def tokenizer(loaded, family):
    loaded.chat_template = TEMPLATES[family]
    return loaded


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(arguments=ARGUMENTS, **more):
    return {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "add", "arguments": arguments}}],
        **more,
    }


def parts(content):
    return [{"type": "text", "text": content[:3]}, {"type": "text", "text": content[3:]}]


def runs(tokenizer, token_ids, mask):
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    return [tokenizer.decode(token_ids[start:end]) for start, end in edges]


def learnt(tokenizer, messages, tools=None, kwargs=None, **options):
    """The texts of the runs of tokens that are learnt."""
    return runs(tokenizer, *Chat(tokenizer, kwargs).encode(messages, tools, **options))


def in_parts(family, messages):
    """The messages as the family's template reads them."""
    if family != "parts only":
        return messages
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]


def served(tokenizer, family, messages, **kwargs):
    """What the model writes for the last message: its prompt is rendered, and the rendering goes on
    until the end."""
    messages = in_parts(family, messages)

    def render(some, **more):
        return tokenizer.apply_chat_template(some, tokenize=False, **kwargs, **more)

    whole = render(messages)
    prompt = render(messages[:-1], add_generation_prompt=True)
    assert whole.startswith(prompt)
    end = ENDS.get(family, "<|im_end|>")
    if family == "glm":
        whole += end  # which the next message of the user would bring
    return whole[len(prompt) : whole.index(end, len(prompt)) + len(end)]


QUESTION = [user("the cat")]
ANSWERED = [*QUESTION, assistant("sat on the mat")]
TWICE = [*ANSWERED, user("def add"), assistant("return left")]


@each("messages", [ANSWERED, TWICE])
def test_an_answer_is_what_is_served_without_thinking(tokenizer, family, messages) -> None:
    """With `enable_thinking` off, the template's empty reasoning belongs to the prompt, and is not
    learnt."""
    want = served(tokenizer, family, messages, enable_thinking=False)
    assert messages[-1]["content"] in want and "think" not in want
    assert learnt(tokenizer, messages, kwargs={"enable_thinking": False})[-1] == want
    # The same holds of an empty reasoning if nothing is said about thinking.
    assert learnt(tokenizer, messages)[-1] == want
    before = [
        f"{message['content']}{ENDS.get(family, '<|im_end|>')}" for message in messages[1:-2:2]
    ]
    assert [text.strip() for text in learnt(tokenizer, messages)[:-1]] == before


def test_what_is_rendered_is_what_the_template_renders(tokenizer, family) -> None:
    token_ids, _ = Chat(tokenizer, {"enable_thinking": False}).encode(TWICE)
    rendered = tokenizer.apply_chat_template(
        in_parts(family, TWICE), tokenize=False, enable_thinking=False
    )
    stop = "<|user|>" if family == "glm" else ""
    assert tokenizer.decode(token_ids) == rendered + stop
    assert token_ids.tolist() == tokenizer(rendered + stop, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "glm", "nemotron3"], indirect=True)
def test_reasoning_is_served_and_learnt(tokenizer, family) -> None:
    turns = [
        *ANSWERED[:1],
        assistant("sat", reasoning_content="hm"),
        user("more"),
        assistant("b", reasoning_content="a"),
    ]
    *earlier, last = learnt(tokenizer, turns)
    assert last == served(tokenizer, family, turns) and "a" in last and "hm" not in "".join(earlier)
    # One sample per turn keeps the reasoning that later turns would lose.
    samples = tokenize(
        [Sample(messages=turns)], tokenizer, options=DataOptions(sample_per_turn=True)
    )
    found = [runs(tokenizer, one.token_ids, one.loss_mask) for one in samples]
    assert found == [[served(tokenizer, family, turns[:2])], [served(tokenizer, family, turns)]]
    assert "hm" in found[0][0]


@pytest.mark.parametrize("family", WITH_CALLS, indirect=True)
def test_calls_are_rendered_as_the_template_wants_them(tokenizer, family) -> None:
    """Arguments as objects and as JSON, messages without content, with null and with an empty one:
    all the same."""
    turns = [user("the cat"), call(), {"role": "tool", "content": "3"}, assistant("mat")]
    want = Chat(tokenizer).encode(turns, TOOLS)
    text = tokenizer.decode(want[0])
    assert (
        "add" in learnt(tokenizer, turns, TOOLS)[0] and "{'left'" not in text and "None" not in text
    )
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
        for more in ({}, {"content": None}, {"content": ""}):
            flat = {
                "role": "assistant",
                "tool_calls": [{"name": "add", "arguments": arguments}],
                **more,
            }
            for message in (call(arguments, **more), flat):
                found = Chat(tokenizer).encode([turns[0], message, *turns[2:]], TOOLS)
                np.testing.assert_array_equal(found[0], want[0])
                np.testing.assert_array_equal(found[1], want[1])
    first, second = learnt(tokenizer, turns, TOOLS)
    assert first.endswith(CALL_ENDS.get(family, "</tool_call><|im_end|>"))
    assert second.strip() == f"mat{ENDS.get(family, '<|im_end|>')}"
    # The last turn is a call, and ends as it would before its result.
    assert learnt(tokenizer, turns[:2], TOOLS)[0] == first


@pytest.mark.parametrize(
    ("family", "content"), [("parts only", ""), ("deepseek", "the cat")], indirect=["family"]
)
def test_calls_that_a_template_leaves_out_are_not_learnt_as_an_end(
    tokenizer, family, content
) -> None:
    """A template without calls, and one that renders them only beside no text: the rendered turn
    ends at once."""
    messages = [
        *QUESTION,
        call(content=content),
        {"role": "tool", "content": "3"},
        assistant("sat on the mat"),
    ]
    with pytest.raises(
        SampleError, match="the chat template does not render all calls of message 2"
    ):
        Chat(tokenizer).encode(messages, TOOLS)
    assert learnt(tokenizer, messages, TOOLS, loss="last_turn") == [
        f"sat on the mat{ENDS.get(family, '<|im_end|>')}"
    ]
    unlearnt = [messages[0], {**messages[1], "weight": 0}, *messages[2:]]
    assert learnt(tokenizer, unlearnt, TOOLS) == learnt(
        tokenizer, messages, TOOLS, loss="last_turn"
    )


@pytest.mark.parametrize("family", ["deepseek"], indirect=True)
def test_arguments_that_a_template_takes_as_text_stay_what_they_are(tokenizer) -> None:
    written = '{"left":1,  "right":"the cat"}'
    turns = [user("a"), call(written)]
    assert learnt(tokenizer, turns) == [
        f"<|calls|><|call|>function<|sep|>add\n{written}<|/call|><|/calls|><eos>"
    ]
    assert learnt(tokenizer, [user("a"), call("no JSON")])[0].count("no JSON<|/call|>") == 1


@pytest.mark.parametrize("family", ["deepseek"], indirect=True)
def test_a_prompt_with_calls_is_rendered_as_the_template_wants_them(tokenizer) -> None:
    text = Chat(tokenizer).prompt([user("a"), call(), {"role": "tool", "content": "3"}])
    assert text.endswith(
        f"add\n{json.dumps(ARGUMENTS)}<|/call|><|/calls|><eos><|outputs|><|output|>3<|/output|><|/outputs|>"
    )


def test_contents_in_parts_are_texts(tokenizer) -> None:
    row = {"messages": [{**message, "content": parts(message["content"])} for message in TWICE]}
    found = read_conversation(row, "messages", "row").messages
    for one, other in zip(
        Chat(tokenizer).encode(found), Chat(tokenizer).encode(TWICE), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    assert "return left" in learnt(tokenizer, found)[-1] and "type" not in tokenizer.decode(
        Chat(tokenizer).encode(found)[0]
    )


@each("flag", ["weight", "loss_mask", "trainable", "train", "loss"])
@each("value", [0, False, 0.0])
@pytest.mark.parametrize("family", ["qwen3", "glm"], indirect=True)
def test_messages_that_are_not_to_be_learnt(tokenizer, flag, value) -> None:
    first, last = learnt(tokenizer, TWICE)
    turns = [*TWICE[:1], {**TWICE[1], flag: value}, *TWICE[2:]]
    assert learnt(tokenizer, turns) == [last]
    assert learnt(tokenizer, [{**message, flag: 1} for message in TWICE]) == [first, last]
    turns = [*TWICE[:3], {**TWICE[3], flag: value}]
    assert learnt(tokenizer, turns) == [first]
    with pytest.raises(NothingToLearn, match="no message is to be learnt"):
        Chat(tokenizer).encode(turns, loss="last_turn")


@pytest.mark.parametrize("family", ["qwen3", "deepseek", "glm"], indirect=True)
def test_only_the_last_turn(tokenizer, family) -> None:
    assert learnt(tokenizer, TWICE, loss="last_turn") == learnt(tokenizer, TWICE)[-1:]
    assert (
        learnt(tokenizer, [*TWICE, user("x")], loss="last_turn")[0].strip()
        == f"return left{ENDS.get(family, '<|im_end|>')}"
    )


@pytest.mark.parametrize("family", ["glm"], indirect=True)
def test_turns_that_no_token_of_their_own_ends(tokenizer) -> None:
    """The header of a second answer is not learnt as the end of the first; the last turn ends like
    the others."""
    assert learnt(tokenizer, [user("a"), assistant("b"), assistant("c")]) == ["\nb", "\nc<|user|>"]
    assert learnt(tokenizer, [user("a"), call(), user("b")])[0].endswith("</tool_call><|user|>")
    assert learnt(tokenizer, [user("a"), assistant("b")], complete=False) == ["\nb"]


@pytest.mark.parametrize("family", ["qwen3", "deepseek", "nemotron3"], indirect=True)
def test_two_answers_in_a_row(tokenizer, family) -> None:
    end = ENDS.get(family, "<|im_end|>")
    found = learnt(
        tokenizer, [user("a"), assistant("b"), assistant("c")], kwargs={"enable_thinking": False}
    )
    assert found == [f"b{end}", f"c{end}"]


@pytest.mark.parametrize("family", ["qwen3", "deepseek", "nemotron3"], indirect=True)
def test_no_end_is_learnt_of_what_was_cut_off(tokenizer) -> None:
    token_ids, mask = Chat(tokenizer).encode(ANSWERED, complete=False)
    assert runs(tokenizer, token_ids, mask) == ["sat on the mat"]
    assert (
        runs(tokenizer, *Chat(tokenizer).encode(TWICE, complete=False))[0]
        == learnt(tokenizer, ANSWERED)[0]
    )


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_empty_answers_are_left_out(tokenizer) -> None:
    for empty in (
        assistant(""),
        assistant(" \n"),
        assistant(None),
        {"role": "assistant"},
        assistant("", tool_calls=[]),
    ):
        assert learnt(tokenizer, [*QUESTION, empty, *TWICE]) == learnt(
            tokenizer, [*QUESTION, assistant(""), *TWICE]
        )
        assert len(learnt(tokenizer, [*QUESTION, empty, *TWICE])) == 2
        with pytest.raises(NothingToLearn, match="empty answer"):
            Chat(tokenizer).encode([*QUESTION, empty])
    assert learnt(tokenizer, [*QUESTION, assistant("", reasoning_content="hm")]) == [
        "<think>\nhm\n</think>\n\n<|im_end|>"
    ]


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_reasoning_alone_that_is_not_rendered_is_no_empty_answer(tokenizer) -> None:
    """Older turns lose their reasoning."""
    alone = assistant("", reasoning_content="hm")
    with pytest.raises(
        SampleError, match="does not render the reasoning of message 2, which holds nothing else"
    ):
        Chat(tokenizer).encode([*QUESTION, alone, *ANSWERED])
    # Each turn is rendered as the last one, or is not learnt.
    options = DataOptions(sample_per_turn=True)
    found = list(
        tokenize([Sample(messages=[*QUESTION, alone, *ANSWERED])], tokenizer, options=options)
    )
    assert [runs(tokenizer, one.token_ids, one.loss_mask) for one in found] == [
        ["<think>\nhm\n</think>\n\n<|im_end|>"],
        ["sat on the mat<|im_end|>"],
    ]
    assert learnt(tokenizer, [*QUESTION, alone, *ANSWERED], loss="last_turn") == [
        "sat on the mat<|im_end|>"
    ]


@pytest.mark.parametrize("family", ["qwen3.5"], indirect=True)
def test_variables_of_the_row_take_precedence(tokenizer) -> None:
    """With thinking on, the model writes the empty reasoning; the token that holds the prompt's end
    is not its own."""
    on = {"enable_thinking": True}
    off = {"enable_thinking": False}
    samples = [Sample(messages=ANSWERED, template_kwargs=on), Sample(messages=ANSWERED)]
    documents = list(tokenize(samples, tokenizer, options=DataOptions(chat_template_kwargs=off)))
    found = [runs(tokenizer, one.token_ids, one.loss_mask) for one in documents]
    assert found == [["</think>\n\nsat on the mat<|im_end|>"], ["sat on the mat<|im_end|>"]]


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_marks_of_the_template_and_flags_of_messages(tokenizer) -> None:
    marked = TEMPLATES["qwen3"].replace(
        "<|im_start|>assistant\n{% if loop", "<|im_start|>assistant\n{% generation %}{% if loop"
    )
    marked = marked.replace(
        "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add",
        "{% endfor %}<|im_end|>{% endgeneration %}\n{% endif %}{% endfor %}{% if add",
    )
    assert marked.count("generation %}") == 2
    turns = [*TWICE, user("x"), assistant("y", weight=0)]
    want = [
        learnt(tokenizer, messages, **more)
        for messages in (TWICE, turns)
        for more in ({}, {"loss": "last_turn"})
        if more == {} or messages is TWICE
    ]
    tokenizer.chat_template = marked
    found = [
        learnt(tokenizer, messages, **more)
        for messages in (TWICE, turns)
        for more in ({}, {"loss": "last_turn"})
        if more == {} or messages is TWICE
    ]
    assert found == want and want[2] == [
        text for text in learnt(tokenizer, turns) if "y" not in text
    ]
