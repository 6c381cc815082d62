"""Prompt files: their forms, and what is wrong with others."""

import json
import os
import re

import pytest

from mtpkit.bench.shapes import as_conversations, read_prompts
from mtpkit.errors import UserError
from tests.shared import each


@pytest.fixture
def write(tmp_path):
    def write(content: str, name: str = "prompts.jsonl"):
        (tmp_path / name).write_text(content)
        return tmp_path / name

    return write


def contents(path, limit=None):
    """Texts and token ids without their names."""
    return [next(iter(prompt.values())) for prompt in read_prompts(path, limit)]


def test_jsonl_holds_texts_and_token_ids(write):
    path = write(
        '{"prompt": "a\\nb"}\n\n{"prompt_token_ids": [3, 4], "prompt": "ignored"}\n{"prompt":'
        ' "c"}\n'
    )
    assert contents(path) == ["a\nb", [3, 4], "c"]


def test_places_of_checkpoints_are_read(write):
    path = write(
        '{"prompt": "a", "checkpoint_at": 1}\n{"prompt_token_ids": [3], "checkpoint_at": null}\n'
    )
    assert [prompt.get("checkpoint_at") for prompt in read_prompts(path)] == [1, None]


USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}


def test_conversations_are_read_without_the_answer_at_their_end(write):
    rows = [
        {"messages": [USER, ANSWER], "tools": [{"type": "function"}], "source": "x"},
        {"messages": [USER, ANSWER, USER], "chat_template_kwargs": {"thinking": False}},
        {"messages": [USER, ANSWER], "add_generation_prompt": False, "checkpoint_at": 3},
        {"messages": [ANSWER], "prompt": None},
        {"messages": [USER], "prompt": "c"},
        {"messages": ["what?", 5]},
    ]
    path = write("\n".join(map(json.dumps, rows)))
    found = [{**prompt} for prompt in read_prompts(path)]
    assert [prompt.pop("name") for prompt in found] == [f"{path}:{line}" for line in range(1, 7)]
    assert found == [
        {"messages": [USER], "tools": [{"type": "function"}]},
        {"messages": [USER, ANSWER, USER], "chat_template_kwargs": {"thinking": False}},
        {"messages": [USER, ANSWER], "add_generation_prompt": False, "checkpoint_at": 3},
        {"messages": [ANSWER]},
        {"prompt": "c"},
        {"messages": ["what?", 5]},  # refused when it is rendered, without the others
    ]


def test_texts_become_questions_and_conversations_get_variables():
    prompts = [
        {"prompt": "a\n", "name": "one"},
        {"prompt_token_ids": [1]},
        {"messages": [USER], "chat_template_kwargs": {"thinking": True}},
        {"messages": [USER], "chat_template_kwargs": "no object"},
    ]
    off = {"thinking": False, "robot": "c"}
    assert as_conversations(prompts, False, {}) == prompts
    assert as_conversations(prompts, True, off) == [
        {"messages": [USER], "name": "one", "chat_template_kwargs": off},
        {"prompt_token_ids": [1]},
        {"messages": [USER], "chat_template_kwargs": {"thinking": True, "robot": "c"}},
        prompts[3],
    ]
    assert as_conversations(prompts, False, off)[0] == prompts[0]


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_a_byte_order_mark_is_no_text(write, name):
    content = "a" if name.endswith("txt") else '{"prompt": "a"}'
    assert contents(write("\ufeff" + content, name)) == ["a"]
    (path := write("", name)).write_bytes(b"\xef\xbb\xbfab\xff")
    with pytest.raises(UserError, match="invalid start byte at byte 5"):
        read_prompts(path)


def test_a_limit_spreads_over_the_file(write):
    path = write("a\n\nb\nc\nd\ne\n", "prompts.txt")
    assert [contents(path, limit) for limit in (1, 2, 5, 9)] == [
        ["a"],
        ["a", "c"],
        [*"abcde"],
        [*"abcde"],
    ]


def test_other_files_hold_one_text_a_line(write):
    assert contents(write('  if x:\n\n{"prompt": "a"}\n', "prompts.txt")) == [
        "  if x:",
        '{"prompt": "a"}',
    ]


@each("end", ["\u2028", "\x0c", "\x85", "\x1c"])
def test_a_line_ends_with_a_line_feed_alone(write, end):
    """JSON allows the other line separators unescaped in a string."""
    assert contents(write(f"a{end}b\nc\r\n", "prompts.txt")) == [f"a{end}b", "c"]
    if end not in "\x0c\x1c":
        assert contents(write(f'{{"prompt": "a{end}b"}}\n')) == [f"a{end}b"]


@each(
    ("content", "message"),
    [
        ("", "prompts.jsonl holds no prompts; write one a line"),
        ("\n \n", "prompts.jsonl holds no prompts"),
        ('{"prompt": "a"}\n{"prompt"\n', "prompts.jsonl:2 cannot be read as JSON"),
        (
            '{"prompt": "a"}\n' + "[" * 100_000,
            "prompts.jsonl:2 cannot be read as JSON: it is nested too deeply",
        ),
        ('{"prompt": ' + "1" * 5000 + "}", "prompts.jsonl:1 cannot be read as JSON"),
        (
            '{"prompt": "a", "checkpont_at": 1}\n',
            "prompts.jsonl:1 has the key 'checkpont_at'; did you mean checkpoint_at",
        ),
        ('{"text": "a"}\n', 'prompts.jsonl:1 must be an object with "prompt"'),
        ('"a"\n', "prompts.jsonl:1 must be an object"),
        ('{"prompt_token_ids": [1, "2"]}\n', "prompts.jsonl:1 must be an object"),
        ('{"prompt": 5}\n', "prompts.jsonl:1 must be an object"),
        ('{"messages": {"role": "user"}}\n', "prompts.jsonl:1 must be an object"),
    ],
)
def test_a_bad_file_is_named_with_its_line(write, content, message):
    with pytest.raises(UserError, match=re.escape(message)):
        read_prompts(write(content))


def test_unreadable_files(tmp_path):
    with pytest.raises(
        UserError, match=r"nothing.txt cannot be read: No such file or directory; name a .jsonl"
    ):
        read_prompts(tmp_path / "nothing.txt")
    with pytest.raises(UserError, match="it is a directory, not a file"):
        read_prompts(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe cannot be read: it is a pipe"):
        read_prompts(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"ab\xff")
    with pytest.raises(UserError, match="binary is not UTF-8 text: invalid start byte at byte 2"):
        read_prompts(tmp_path / "binary")


def test_prompts_are_named_by_file_and_line(write):
    path = write('\n{"prompt": ""}\n\n{"prompt_token_ids": [1, 2]}\n')
    assert read_prompts(path) == [
        {"prompt": "", "name": f"{path}:2"},
        {"prompt_token_ids": [1, 2], "name": f"{path}:4"},
    ]
    assert contents(path) == ["", [1, 2]]
    text = write("a\n\nb\n", "prompts.txt")
    assert read_prompts(text, limit=1) == [{"prompt": "a", "name": f"{text}:1"}]
    assert read_prompts(text)[1]["name"] == f"{text}:3"
