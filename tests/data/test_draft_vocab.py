"""The draft vocabulary: the most frequent tokens, in a file that is checked when it is read."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mtpkit.data import draft_vocab
from mtpkit.data.draft_vocab import (
    DraftVocab,
    build_draft_vocab,
    check_draft_vocab,
    load_draft_vocab,
)
from mtpkit.data.prepare import prepare
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.errors import UserError
from tests.shared import each

TEXTS = ["the cat sat on the mat\n" * 20, "def add(left, right):\n    return left + right\n", ""]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "b.txt").write_text("on the right mat")
    return [tmp_path / "a.jsonl", tmp_path / "b.txt"]


@each("size", [1, 2, 5, 20, 300, 310])
def test_the_most_frequent_tokens_and_their_share(files, tokenizer_dir, size) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    vocab = build_draft_vocab(files, tokenizer, vocab_size=310, size=size)
    counts = Counter(
        token
        for text in [*TEXTS[:2], "on the right mat"]
        for token in [*tokenizer(text)["input_ids"], 0]
    )
    others = sorted(range(1, 310), key=lambda token: (-counts[token], token))
    want = sorted([0, *others[: size - 1]])
    assert vocab.token_ids == want and vocab.vocab_size == 310
    assert vocab.files == [str(file) for file in files]
    assert vocab.coverage == sum(counts[token] for token in want) / sum(counts.values())
    assert (vocab.coverage == 1) == (size >= len(counts))


def test_prompts_do_not_count_and_all_ends_are_included(tmp_path, tokenizer_dir) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"q": "the the the the", "a": " mat"}) + "\n")
    tokenizer = load_tokenizer(tokenizer_dir)
    columns = draft_vocab.Columns(prompt="q", response="a")
    answer = tokenizer(" mat")["input_ids"]
    vocab = build_draft_vocab([file], tokenizer, 300, len(answer) + 2, [299], columns)
    assert vocab.token_ids == sorted([0, 299, *answer]) and vocab.coverage == 1


def test_prepared_data_counts_as_the_files_that_it_is_from(files, tokenizer_dir, tmp_path) -> None:
    rows = [
        {"prompt": "the the the mat", "completion": "the cat"},
        {"prompt": "add", "completion": " right" * 20},
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(tokenizer_dir)
    paths = [*files, tmp_path / "pairs.jsonl"]
    (tmp_path / "out").mkdir()
    prepare(paths[1:], tokenizer, 16, tmp_path / "out")
    plain = build_draft_vocab(paths, tokenizer, 300, 12)
    mixed = build_draft_vocab([files[0], tmp_path / "out"], tokenizer, 300, 12)
    assert (
        mixed == replace(plain, files=[str(files[0]), str(tmp_path / "out")]) and plain.coverage < 1
    )


@each(
    ("arguments", "message"),
    [
        ({"size": 301}, "size is 301, must be 1 to 300"),
        ({"size": 0}, "size is 0, must be 1 to 300"),
        ({"size": 2, "eos_token_ids": [5, 7]}, "there are 3 special tokens"),
        (
            {"eos_token_ids": [300]},
            "special token 300 lies outside of the model's vocabulary of 300",
        ),
        ({"vocab_size": 250}, "the tokenizer gives token 2.., but the model's vocabulary has 250"),
        ({"paths": []}, "no files"),
        ({"paths": ["nowhere.txt"]}, "nowhere.txt does not exist"),
    ],
)
def test_what_cannot_be_built(files, tokenizer_dir, arguments, message) -> None:
    settings = {"paths": files, "vocab_size": 300, "size": 10} | arguments
    with pytest.raises(UserError, match=message):
        build_draft_vocab(tokenizer=load_tokenizer(tokenizer_dir), **settings)


def test_nothing_to_count(tmp_path, tokenizer_dir) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="no tokens to count"):
        build_draft_vocab([tmp_path / "a.jsonl"], load_tokenizer(tokenizer_dir), 300, 10)


def test_a_saved_vocabulary_is_read_back(tmp_path) -> None:
    vocab = DraftVocab([1, 5, 7], 300, 0.5, ["a.txt"])
    for _ in range(2):
        (tmp_path / "vocab.json").write_text(vocab.to_json())
    assert (
        load_draft_vocab(tmp_path / "vocab.json", 300)
        == load_draft_vocab(str(tmp_path / "vocab.json"))
        == [1, 5, 7]
    )
    assert json.loads((tmp_path / "vocab.json").read_text())["coverage"] == 0.5
    assert [path.name for path in tmp_path.iterdir()] == ["vocab.json"]


@each(
    ("content", "message"),
    [
        (None, "No such file or directory; write one with mtpkit data draft-vocab"),
        ("{", "cannot be read as JSON"),
        ("[1, 2]", "is not a JSON object"),
        (
            '{"token_ids": 3, "vocab_size": 300}',
            "token_ids is 3, must be a list of whole numbers; write one with",
        ),
        ('{"token_ids": [1]}', "vocab.json: vocab_size is missing; write one with"),
        ('{"token_ids": [1], "vocab_size": 0}', "vocab_size is 0, must be at least 1"),
        ('{"token_ids": [1], "vocab_size": 300, "covrage": 1}', "covrage is unknown"),
        (
            '{"token_ids": [1], "vocab_size": 400}',
            "is for a vocabulary of 400, but the model's is 300",
        ),
        ('{"token_ids": [], "vocab_size": 300}', "is empty"),
        (
            '{"token_ids": [1, 300, -1], "vocab_size": 300}',
            "300, -1 must be integers from 0 to 299",
        ),
        (
            '{"token_ids": [1, "2", true, 1.5], "vocab_size": 300}',
            r"token_ids\[1\] is '2', must be a whole number",
        ),
        ('{"token_ids": [4, 7, 4, 7, 1], "vocab_size": 300}', "4, 7 repeated"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, content, message) -> None:
    path = tmp_path / "vocab.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        load_draft_vocab(path, 300)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_ids_from_elsewhere_are_named() -> None:
    check_draft_vocab(range(7), 7, "draft_vocab")
    with pytest.raises(
        UserError, match=r"draft_vocab: 7, 8, .*, 15, 16 and 3 more must be integers from 0 to 6"
    ):
        check_draft_vocab(list(range(20)), 7, "draft_vocab")
