"""Chat data as people have it: rows of other shapes, rows that cannot be used, and conversations
that are too long."""

import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from mtpkit.data.build import build_dataset
from mtpkit.data.documents import tokenize
from mtpkit.data.draft_vocab import build_draft_vocab
from mtpkit.data.options import DataOptions
from mtpkit.data.prepare import prepare
from mtpkit.data.prepared import read_manifest
from mtpkit.data.prompts import read_prompts
from mtpkit.data.samples import read_samples
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.errors import UserError
from tests.shared import each

TEMPLATE = (
    "{% if strict and messages | length % 2 %}{{ raise_exception('alternate') }}{% endif %}{% for m"
    " in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}<{{"
    " call.function.name }}{{ call.function.arguments | tojson }}>{% endfor %}{{ eos_token }}{%"
    " endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TALK = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write(path: Path, *rows: object) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def texts(tokenizer, file: Path, options: DataOptions | None = None) -> list[tuple[str, str]]:
    """Each document as text, and the text that is learnt of it."""
    found = tokenize(read_samples([file]), tokenizer, options=options)
    return [
        (tokenizer.decode(one.token_ids), tokenizer.decode(one.token_ids[one.loss_mask]))
        for one in found
    ]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text"])
def test_turns_of_sharegpt(tmp_path, tokenizer, kind) -> None:
    call = {"name": "add", "arguments": {"left": 1}}
    turns = [
        {"from": "human", "value": "the cat"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "sat"},
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "mat", "weight": 0},
    ]
    row = {"conversations": turns, "system": "def", "tools": "[]"}
    if kind == "parquet":
        file = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pa.table({key: [value] for key, value in row.items()}), file)
    else:
        text = {**row, "conversations": json.dumps(turns)}
        file = write(tmp_path / "a.jsonl", row if kind == "jsonl" else text)
    ((whole, learnt),) = texts(tokenizer, file)
    said = '<add{"left": 1}><eos>'
    assert (
        whole == "[system]def<eos>[user]the"
        f" cat<eos>[assistant]{said}[tool]3<eos>[assistant]sat<eos>[user]a<eos>"
        "[assistant]mat<eos>"
    )
    assert learnt == f"{said}sat<eos>"
    prompts, _ = read_prompts([file], tokenizer)
    assert [tokenizer.decode(prompt.token_ids) for prompt in prompts] == [
        whole.removesuffix("mat<eos>")
    ]


def test_messages_of_either_kind_under_either_name(tmp_path, tokenizer) -> None:
    want = texts(tokenizer, write(tmp_path / "a.jsonl", {"messages": TALK}))
    turns = [{"from": "user", "value": "the cat"}, {"from": "assistant", "value": "sat on the mat"}]
    for row in (
        {"conversations": TALK},
        {"messages": turns},
        {"conversations": turns, "text": "x", "id": 3},
    ):
        assert texts(tokenizer, write(tmp_path / "b.jsonl", row)) == want


def test_rows_of_alpaca(tmp_path, tokenizer) -> None:
    rows = [
        {"instruction": "the cat", "input": "on", "output": "mat", "text": "Below is ... mat"},
        {
            "instruction": "the cat",
            "input": "",
            "output": "mat",
            "system": "def",
            "history": [["a", "b"]],
        },
        {"instruction": "the cat", "input": None, "output": ""},
    ]
    file = write(tmp_path / "a.jsonl", *rows)
    assert texts(tokenizer, file) == [
        ("[user]the cat\non<eos>[assistant]mat<eos>", "mat<eos>"),
        (
            "[system]def<eos>[user]a<eos>[assistant]b<eos>[user]the cat<eos>[assistant]mat<eos>",
            "b<eos>mat<eos>",
        ),
        ("", ""),
    ]
    prompts, _ = read_prompts([file], tokenizer)
    assert [prompt.text for prompt in prompts][::2] == [
        "[user]the cat\non<eos>[assistant]",
        "[user]the cat<eos>[assistant]",
    ]
    (tmp_path / "a.csv").write_text("instruction,input,output\nthe cat,,mat\nthe cat,,\n")
    assert texts(tokenizer, tmp_path / "a.csv") == [
        ("[user]the cat<eos>[assistant]mat<eos>", "mat<eos>"),
        ("", ""),
    ]


@each(
    ("row", "says"),
    [
        (
            {"conversations": [{"from": "nobody", "value": "a"}]},
            "message 1 of 'conversations' is from 'nobody', must be",
        ),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, "is from ['human'], must be"),
        (
            {"conversations": [{"from": "human", "value": 5}]},
            "message 1 of 'conversations' has the content 5",
        ),
        ({"conversations": [{"from": "function_call", "value": "no"}]}, "cannot be read as JSON"),
        (
            {"conversations": [{"from": "function_call", "value": "[]"}]},
            "must be a call, JSON of name and arguments",
        ),
        ({"conversations": [{"value": "a"}]}, "message 1 of 'conversations' has no role"),
        ({"instruction": 5, "output": "a"}, "column 'instruction' holds int"),
        (
            {"instruction": "a", "output": "b", "history": [["a"]]},
            "'history' holds ['a'], must be pairs",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "the type 'image_url'",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]},
            "has the weight 0.5, must be 0, 1, false",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "train": "no"}]},
            "has the train 'no', must be 0, 1, false",
        ),
        (
            {"messages": TALK, "chat_template_kwargs": 5},
            "'chat_template_kwargs' holds int, not an object",
        ),
        (
            {"messages": TALK, "chat_template_kwargs": {"tools": 5}},
            "has 'tools', no variable of chat templates",
        ),
    ],
)
def test_rows_that_are_none_of_these(tmp_path, tokenizer, row, says) -> None:
    file = write(tmp_path / "a.jsonl", row)
    for read in (lambda: list(read_samples([file])), lambda: read_prompts([file], tokenizer)):
        with pytest.raises(UserError) as caught:
            read()
        assert str(caught.value).startswith(f"data: {file}:1") and says in str(caught.value)
        assert "--on-bad-row skip leaves such rows out" in str(caught.value)


BAD_ROWS = [
    '{"messages": ',
    {"other": 1},
    {"messages": TALK[:1] + TALK[1:] + TALK[:1]},
    {"messages": 5},
]
"""One that is no JSON, one without the column, one that the template refuses, and one of a wrong
type."""
STRICT = {"strict": True}


def both(tokenizer, file: Path, directory: Path, length: int, options: DataOptions, most: int = 1):
    """The counts of a file, the same whether it is packed in memory, or prepared by 1 to `most`
    processes."""
    found = build_dataset([file], tokenizer, length, options=options).counts
    for processes in range(1, most + 1):
        manifest = prepare(
            [file],
            tokenizer,
            length,
            directory / str(processes),
            num_proc=processes,
            options=options,
        )
        assert manifest.sources == found and manifest.options == options
    (counts,) = found
    return counts


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_one_rule_for_rows_that_cannot_be_used(tmp_path, tokenizer, bad, caplog) -> None:
    file = write(tmp_path / "a.jsonl", *[{"messages": TALK}] * 10, bad, {"messages": TALK})
    stop, skip = (
        DataOptions(on_bad_row=rule, chat_template_kwargs=STRICT) for rule in ("stop", "skip")
    )
    for number, make in enumerate(
        (
            lambda: build_dataset([file], tokenizer, 32, options=stop),
            lambda: prepare([file], tokenizer, 32, tmp_path / "out", num_proc=1, options=stop),
            lambda: build_draft_vocab([file], tokenizer, 300, 30, options=stop),
        )
    ):
        with pytest.raises(
            UserError, match=f"data: {file}:11.*--on-bad-row skip leaves such rows out"
        ):
            make()
        assert not list((tmp_path / "out").glob("**/*")), number
    with caplog.at_level(logging.WARNING):
        counts = both(tokenizer, file, tmp_path, 32, skip)
    assert (counts.num_documents, counts.num_left_out, sum(counts.left_out_by_reason.values())) == (
        12,
        1,
        1,
    )
    assert f"1 of 12 documents have no token to learn and are left out: {file}:11 (" in caplog.text
    assert build_draft_vocab([file], tokenizer, 300, 30, options=skip)


def test_more_than_a_tenth_is_an_error_unless_allowed(tmp_path, tokenizer) -> None:
    """60 of 82 rows without the column, and two that are no JSON."""
    file = write(
        tmp_path / "a.jsonl", *[{"text": "the cat"}] * 20, *[{"other": 1}] * 60, *["{"] * 2
    )
    skip = DataOptions(on_bad_row="skip")
    says = (
        r"data: a: 62 of 82 rows cannot be used \(60 no column 'text', 2 cannot be read as JSON\),"
        rf" the first is {file}:21"
        r" \(no column 'text'; it has: other\); mend them, or allow a larger share of them with"
        r" --bad-rows-allowed"
    )
    for make in (
        lambda: build_dataset([file], tokenizer, 32, options=skip),
        lambda: prepare([file], tokenizer, 32, tmp_path / "out", options=skip),
        lambda: build_draft_vocab([file], tokenizer, 300, 30, options=skip),
    ):
        with pytest.raises(UserError, match=says):
            make()
    allowed = DataOptions(on_bad_row="skip", bad_rows_allowed=0.8)
    counts = both(tokenizer, file, tmp_path, 32, allowed, most=2)
    assert counts.left_out_by_reason == {"no column 'text'": 60, "cannot be read as JSON": 2}


def test_empty_answers_are_counted_and_stop_nothing(tmp_path, tokenizer) -> None:
    empty = [TALK[0], {"role": "assistant", "content": ""}]
    file = write(
        tmp_path / "a.jsonl",
        *[{"messages": TALK}] * 2,
        {"messages": empty},
        {"messages": [*empty, *TALK]},
    )
    counts = both(tokenizer, file, tmp_path, 32, DataOptions())
    assert counts.left_out_by_reason == {"empty answer": 1}
    assert (counts.num_documents, counts.num_left_out, counts.num_empty_answers) == (4, 1, 2)
    pairs = write(
        tmp_path / "b.jsonl",
        {"prompt": "the", "response": "cat"},
        {"prompt": "the", "response": ""},
    )
    assert both(tokenizer, pairs, tmp_path / "pairs", 32, DataOptions()).left_out_by_reason == {
        "empty answer": 1
    }


@pytest.mark.parametrize("rule", ["split", "cut", "drop"])
@pytest.mark.parametrize("pair", [False, True])
def test_conversations_longer_than_a_sequence(tmp_path, tokenizer, rule, pair, caplog) -> None:
    """Texts are split in any case; they do not count."""
    answer = " ".join(["sat on the mat"] * 20)
    long = {"prompt": "the cat", "response": answer}
    if not pair:
        long = {"messages": [TALK[0], {"role": "assistant", "content": answer}]}
    file = write(tmp_path / "a.jsonl", {"messages": TALK}, long)
    options = DataOptions(long_conversations=rule)
    length = 32
    documents = [document.token_ids for document in tokenize(read_samples([file]), tokenizer)]
    assert len(documents[0]) < length < 2 * length < len(documents[1])
    with caplog.at_level(logging.WARNING):
        counts = both(tokenizer, file, tmp_path, length, options)
    want = {
        "split": sum(map(len, documents)),
        "cut": len(documents[0]) + length,
        "drop": len(documents[0]),
    }
    left_out = {"longer than a sequence": 1} if rule == "drop" else {}
    assert (counts.num_long, counts.num_tokens, counts.left_out_by_reason) == (
        1,
        want[rule],
        left_out,
    )
    assert "1 of 2 documents are conversations longer than a sequence of 32 tokens" in caplog.text
    text = write(tmp_path / "b.jsonl", {"text": answer})
    whole = both(tokenizer, text, tmp_path / "text", length, options)
    assert (whole.num_long, whole.num_left_out) == (0, 0) and whole.num_tokens > 2 * length


def test_a_prompt_that_fills_the_sequence_leaves_nothing_when_cut(tmp_path, tokenizer) -> None:
    long = {"prompt": " ".join(["the cat"] * 20), "response": "sat"}
    file = write(tmp_path / "a.jsonl", {"prompt": "the", "response": "cat"}, long)
    counts = both(tokenizer, file, tmp_path, 16, DataOptions(long_conversations="cut"))
    assert (counts.num_long, counts.left_out_by_reason) == (1, {"longer than a sequence": 1})


def test_a_sample_per_turn_and_only_the_last(tmp_path, tokenizer) -> None:
    turns = [*TALK, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = write(tmp_path / "a.jsonl", {"messages": turns}, {"messages": TALK})
    first = "[user]the cat<eos>[assistant]sat on the mat<eos>"
    last = "[user]a<eos>[assistant]b<eos>"
    assert texts(tokenizer, file)[0] == (first + last, "sat on the mat<eos>b<eos>")
    assert texts(tokenizer, file, DataOptions(loss="last_turn"))[0] == (first + last, "b<eos>")
    per_turn = DataOptions(sample_per_turn=True)
    assert texts(tokenizer, file, per_turn)[:2] == [
        (first, "sat on the mat<eos>"),
        (first + last, "b<eos>"),
    ]
    both_of = DataOptions(sample_per_turn=True, loss="last_turn")
    assert texts(tokenizer, file, both_of)[0] == (first + last, "b<eos>")
    assert both(tokenizer, file, tmp_path, 64, per_turn, most=2).num_documents == 3


def test_a_row_counts_once_however_many_turns_it_has(tmp_path, tokenizer) -> None:
    """Two of ten rows are bad, though only two of 82 documents are."""
    many = {"messages": TALK * 10}
    file = write(tmp_path / "a.jsonl", *[many] * 8, "{", "{")
    options = DataOptions(on_bad_row="skip", sample_per_turn=True)
    for make in (
        lambda: build_dataset([file], tokenizer, 64, options=options),
        lambda: prepare([file], tokenizer, 64, tmp_path / "out", num_proc=1, options=options),
    ):
        with pytest.raises(UserError, match="2 of 10 rows cannot be used"):
            make()


def test_a_greeting_is_no_answer_to_a_prompt(tmp_path, tokenizer) -> None:
    """A conversation may begin with the assistant, as many of ShareGPT do."""
    greeting = {"role": "assistant", "content": "hello"}
    file = write(tmp_path / "a.jsonl", {"messages": [greeting, *TALK]}, {"messages": [greeting]})
    (every, refused), (last, _) = (
        read_prompts([file], tokenizer, turns=turns) for turns in ("all", "last")
    )
    assert [prompt.messages for prompt in every] == [[greeting, TALK[0]]] and every == last
    assert refused == [f"{file}:2 (no question)"]


def test_less_than_a_sequence_is_padded(tmp_path, tokenizer) -> None:
    file = write(tmp_path / "a.jsonl", {"messages": TALK})
    counts = both(tokenizer, file, tmp_path, 512, DataOptions())
    dataset = build_dataset([tmp_path / "1"], tokenizer, 512)
    assert (
        len(dataset) == 1
        and counts.num_tokens < 64
        and dataset.batch([0]).token_ids.shape == (1, 512)
    )


def test_options_that_prepared_data_ignores(tmp_path, tokenizer, caplog) -> None:
    file = write(tmp_path / "a.jsonl", {"messages": TALK})
    prepare([file], tokenizer, 32, tmp_path / "out", options=DataOptions(long_conversations="cut"))
    with caplog.at_level(logging.WARNING):
        build_dataset(
            [tmp_path / "out"], tokenizer, 32, options=DataOptions(long_conversations="cut")
        )
        assert "was prepared with" not in caplog.text
        build_dataset([tmp_path / "out"], tokenizer, 32, options=DataOptions(loss="last_turn"))
    assert f"{tmp_path / 'out'} was prepared with loss 'all_turns', which stays" in caplog.text
    # Data that was prepared before there were options.
    path = tmp_path / "out" / "mtpkit_data.json"
    values = json.loads(path.read_text())
    new = ("num_long", "num_empty_answers", "left_out_by_reason")
    sources = [
        {key: value for key, value in one.items() if key not in new} for one in values["sources"]
    ]
    path.write_text(
        json.dumps(
            {key: value for key, value in values.items() if key != "options"} | {"sources": sources}
        )
    )
    assert read_manifest(tmp_path / "out").options == DataOptions()
    assert len(build_dataset([tmp_path / "out"], tokenizer, 32)) == 1
