"""Checks of data files: types, sizes, depth, encodings, missing and truncated content."""

import json
import os
import random
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from mtpkit.data.build import build_dataset
from mtpkit.data.documents import tokenize
from mtpkit.data.draft_vocab import build_draft_vocab
from mtpkit.data.options import DataOptions
from mtpkit.data.prepare import prepare
from mtpkit.data.prompts import read_prompts
from mtpkit.data.samples import read_samples
from mtpkit.data.sources import find_files
from mtpkit.data.tokenizer import fingerprint, load_tokenizer
from mtpkit.errors import UserError
from tests.shared import each, told_length

LENGTH = 8
WRONG = [5, 5.5, True, "x", "{}", {}, {"a": 1}]
"""Values that are no list and no JSON of one."""
WRONG_TOKENS = [-1, 5.5, 5.0, True, False, None, "5", [5], {"a": 5}, float("nan"), float("inf")]
WRONG_TEXTS = [5, 5.5, True, [], ["a"], {}, {"a": "b"}, float("nan")]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    return tokenizer


@pytest.fixture(scope="module")
def generated(tokenizer):
    """A row of `mtpkit data regenerate`."""
    return {
        "prompt": "the cat",
        "completion": " sat on the mat",
        "finish_reason": "stop",
        "tokenizer": fingerprint(tokenizer),
        "prompt_token_ids": [5, 6],
        "completion_token_ids": [7, 8, 9, 10, 0],
    }


def refused(*paths: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        list(read_samples(find_files(paths)))
    message = " ".join(str(caught.value).split())
    assert told_length(message) < 400
    return message


def write(path: Path, *rows: object) -> Path:
    """Lines of JSON, or of text that is to stand there as it is."""
    lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


@each("column", ["prompt_token_ids", "completion_token_ids"])
@each("wrong", WRONG_TOKENS)
def test_token_ids_that_are_none_name_the_row(tmp_path, generated, column, wrong) -> None:
    rows = [generated, b"", {**generated, column: [5, wrong, 6]}]
    assert f"{tmp_path / 'a.jsonl'}:3: {column!r} holds " in refused(
        write(tmp_path / "a.jsonl", *rows)
    )
    as_text = [{**row, column: json.dumps(row[column])} for row in (generated, rows[2])]
    assert f"{tmp_path / 'b.jsonl'}:2: {column!r} holds " in refused(
        write(tmp_path / "b.jsonl", *as_text)
    )


@each("column", ["prompt_token_ids", "completion_token_ids", "messages", "tools"])
@each("wrong", WRONG)
def test_columns_of_lists_that_hold_something_else(tmp_path, generated, column, wrong) -> None:
    row = (
        generated
        if column.endswith("ids")
        else {"messages": [{"role": "assistant", "content": "a"}]}
    )
    message = refused(write(tmp_path / "a.jsonl", row, {**row, column: wrong}))
    assert message.startswith(f"data: {tmp_path / 'a.jsonl'}:2: ") and repr(column) in message


def test_token_ids_come_in_pairs(tmp_path, generated) -> None:
    for column, says in (
        ("prompt_token_ids", "no prompt_token_ids"),
        ("completion_token_ids", "no completion_token_ids"),
    ):
        file = write(tmp_path / "a.jsonl", generated, {**generated, column: None})
        assert (
            f"a.jsonl:2 has {'completion' if 'prompt' in column else 'prompt'}_token_ids, but"
            f" {says}" in refused(file)
        )
    both = write(
        tmp_path / "a.jsonl", {**generated, "prompt_token_ids": None, "completion_token_ids": None}
    )
    assert next(read_samples([both])).completion_token_ids is None


@pytest.mark.parametrize("column", ["prompt_token_ids", "completion_token_ids"])
@pytest.mark.parametrize("token", [300, 99_999, 2**31, 10**14, 10**400])
def test_tokens_outside_of_the_vocabulary_name_the_row(
    tmp_path, tokenizer, generated, column, token
) -> None:
    file = write(tmp_path / "a.jsonl", generated, {**generated, column: [5, token]})
    says = f"a.jsonl:2: '{column}' holds .*, but the vocabulary has the tokens 0 to 299"
    with pytest.raises(UserError, match=says):
        list(tokenize(read_samples([file]), tokenizer, vocab_size=300))
    with pytest.raises(UserError, match=says):
        build_dataset([file], tokenizer, LENGTH, vocab_size=300)
    with pytest.raises(UserError, match=says):
        prepare([file], tokenizer, LENGTH, tmp_path / "out", num_proc=1, vocab_size=300)
    with pytest.raises(UserError, match=says):
        build_draft_vocab([file], tokenizer, 300, 10)
    assert not list((tmp_path / "out").glob("**/*"))


def test_a_model_may_have_more_tokens_than_its_tokenizer(tmp_path, tokenizer, generated) -> None:
    file = write(tmp_path / "a.jsonl", {**generated, "completion_token_ids": [310] * 10})
    assert build_dataset([file], tokenizer, LENGTH, vocab_size=311).counts[0].max_token == 310
    with pytest.raises(UserError, match=r"a.jsonl:1: 'completion_token_ids' holds 310"):
        build_dataset([file], tokenizer, LENGTH)
    with pytest.raises(UserError, match="'prompt_token_ids' holds 1000000"):
        bare = {"prompt_token_ids": [10**14], "completion_token_ids": []}
        build_dataset([write(tmp_path / "a.jsonl", {**generated, **bare})], tokenizer, LENGTH)
    foreign = write(
        tmp_path / "b.jsonl",
        {**generated, "tokenizer": "another", "completion_token_ids": [10**14]},
    )
    assert len(build_dataset([foreign], tokenizer, 4)), "its text is learnt"


@each("wrong", WRONG_TEXTS)
def test_texts_that_are_none_name_the_row(tmp_path, tokenizer, wrong) -> None:
    for column, row in (
        ("text", {"text": "a"}),
        ("prompt", {"prompt": "a", "response": "b"}),
        ("response", {"prompt": "a", "response": "b"}),
        ("completion", {"prompt": "a", "completion": "b"}),
    ):
        file = write(tmp_path / "a.jsonl", row, {**row, column: wrong})
        says = (
            f"data: {file}:2: column {column!r} holds {type(wrong).__name__}, not text;"
            " --on-bad-row skip leaves"
        )
        assert refused(file).startswith(says)
    with pytest.raises(UserError, match=r"a.jsonl:2: column 'prompt' holds"):
        read_prompts([write(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": wrong})], tokenizer)


@each(
    "message",
    [
        *(
            5,
            "a",
            None,
            [],
            {},
            {"content": "a"},
            {"role": 5, "content": "a"},
            {"role": None, "content": "a"},
        ),
        *({"role": "user", "content": wrong} for wrong in (5, True, {}, [5], [None], 1.5)),
        *(
            {"role": "user", "tool_calls": wrong}
            for wrong in (5, "x", {}, [5], [None], [{"function": None}], True)
        ),
    ],
)
@each("as_text", [False, True])
def test_messages_that_are_none_name_the_row(tmp_path, tokenizer, message, as_text) -> None:
    rows = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
    rows.append([*rows[0], message])
    file = write(
        tmp_path / "a.jsonl", *({"messages": json.dumps(one) if as_text else one} for one in rows)
    )
    assert refused(file).startswith(f"data: {file}:2: ")
    with pytest.raises(UserError, match=r"a.jsonl:2: "):
        read_prompts([file], tokenizer)


@each("tools", [[5], ["f"], [None], [[]], "[5]"])
def test_tools_that_are_none_name_the_row(tmp_path, tools) -> None:
    row = {"messages": [{"role": "assistant", "content": "b"}]}
    file = write(tmp_path / "a.jsonl", row, {**row, "tools": tools})
    assert refused(file).startswith(f"data: {file}:2: 'tools' must be a list of objects")


@pytest.mark.parametrize("depth", [70, 400, 900, 100_000])
def test_deep_nesting(tmp_path, tokenizer, depth) -> None:
    deep = b"[" * depth + b"]" * depth
    for name, row in (
        ("text", b'{"text": ' + deep + b"}"),
        ("tools", b'{"messages": [{"role": "assistant", "content": "a"}], "tools": ' + deep + b"}"),
        ("calls", b'{"messages": [{"role": "assistant", "tool_calls": [{"a": ' + deep + b"}]}]}"),
        ("in_text", b'{"messages": "' + deep + b'"}'),
    ):
        file = write(tmp_path / f"{name}.jsonl", b"", row)
        assert f"{file}:2" in refused(file)
        with pytest.raises(UserError):
            prepare([file], tokenizer, LENGTH, tmp_path / "out", num_proc=1)
    assert not list((tmp_path / "out").glob("**/*"))
    (tmp_path / "a.json").write_bytes(deep)
    refused(tmp_path / "a.json")


@each(
    ("content", "says"),
    [
        (b"\n \n\t\n\r\n", "has no rows"),
        (b"\xef\xbb\xbf\n", "has no rows"),
        ('{"text": "a"}\n'.encode("utf-16"), ":1 is not UTF-8 text"),
        ('{"text": "a"}\n'.encode("utf-16-le"), ":1 has a NUL byte"),
        (b'{"text": "a"}\n{"text": "\xe9"}\n', ":2 is not UTF-8 text"),
        (b'{"text": "a"}\n{"text": "\xed\xa0\x80"}\n', ":2 is not UTF-8 text"),
        (b'{"text": "a"}\n\0\n', ":2 has a NUL byte"),
        (b'{"text": "a\0b"}\n', ":1 has a NUL byte"),
        (
            b'{"text": "a"}\n\n{"text": "half \\ud83d"}\n',
            ":3: column 'text' has '\\ud83d', half of a surrogate",
        ),
        (b'{"text": "a"}\n[{"text": "a"}]\n', ":2 is not an object with columns"),
        *(
            (b'{"text": "a"}\n' + row + b"\n", ":2 is not an object")
            for row in (b"5", b'"a"', b"null", b"true", b"NaN")
        ),
        (b'{"text": "a"}\n{"n": ' + b"9" * 5000 + b"}\n", ":2 cannot be read as JSON"),
        (b'{"text": "a"}\n{"text": "a"}{"text": "b"}\n', ":2 cannot be read as JSON"),
        (b'{"text": "a", "text": "b"}\n', ":1 cannot be read as JSON"),
        (b'{"n": 1}\n{"text": "a"', "has the columns n, but neither"),
        (b'{"m": 1}\n{"n": 2}\n', "has the columns m, n, but neither"),
        (json.dumps({f"column{n}": 1 for n in range(500)}).encode(), "has the columns column0, "),
    ],
)
def test_lines_of_json(tmp_path, content, says) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    assert f"{tmp_path / 'a.jsonl'}{'' if says.startswith(':') else ' '}{says}" in refused(
        tmp_path / "a.jsonl"
    )


@each("place", ["content", "role", "name", "tools"])
def test_halves_of_characters_in_conversations(tmp_path, place) -> None:
    row: dict = {"messages": [{"role": "assistant", "content": "a"}], "tools": []}
    if place == "tools":
        row["tools"] = [{"a \udc00": 1}]
    else:
        row["messages"][0][place] = "\udc00"
    assert "a.jsonl:1: column" in refused(write(tmp_path / "a.jsonl", row))


def test_a_file_that_is_cut_off_anywhere(tmp_path, generated) -> None:
    whole = write(tmp_path / "whole.jsonl", generated, generated).read_bytes()
    parquet = tmp_path / "whole.parquet"
    pyarrow.parquet.write_table(
        pa.table({key: [value] * 3 for key, value in generated.items()}), parquet
    )
    second = whole.index(b"\n") + 1
    for end in range(second + 1, len(whole) - 2, 7):
        (tmp_path / "a.jsonl").write_bytes(whole[:end])
        assert f"{tmp_path / 'a.jsonl'}:2 cannot be read as JSON" in refused(tmp_path / "a.jsonl")
    content = parquet.read_bytes()
    for end in range(1, len(content), len(content) // 60):
        (tmp_path / "a.parquet").write_bytes(content[:end])
        assert "a.parquet cannot be read as parquet" in refused(tmp_path / "a.parquet")


def test_bytes_that_were_changed_are_an_error_or_other_rows(tmp_path, generated) -> None:
    rng = random.Random(0)
    files = [
        write(tmp_path / "a.jsonl", *[generated] * 3),
        tmp_path / "b.parquet",
        tmp_path / "c.csv",
    ]
    pyarrow.parquet.write_table(
        pa.table({key: [value] * 3 for key, value in generated.items()}), files[1]
    )
    files[2].write_text('prompt,completion\n"a, b",c\nd,"e\n""f"""\n')
    for file in files:
        content = file.read_bytes()
        for _ in range(150):
            changed = bytearray(content)
            for _ in range(rng.choice((1, 1, 4))):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            file.write_bytes(changed)
            try:
                list(read_samples([file]))
            except UserError as error:
                assert str(file) in str(error) and told_length(error) < 400


@each(
    ("columns", "says"),
    [
        ({"text": pa.array([1, 2])}, ":1: column 'text' holds int"),
        ({"text": pa.array([b"a", b"b"])}, ":1: column 'text' holds bytes"),
        ({"text": pa.array([["a"], ["b"]])}, ":1: column 'text' holds list"),
        (
            {"text": pa.array(["a", "b"]), "when": pa.array([2**62, 2**62], pa.timestamp("us"))},
            " cannot be read as parq",
        ),
        ({"text": pa.array([], pa.string())}, " has no rows"),
        ({"messages": pa.array([5, 6])}, ":1: 'messages' holds int"),
        ({"messages": pa.array(["[5]"])}, ":1: 'messages' must be a list of objects"),
        (
            {
                "prompt": ["a"],
                "completion": ["b"],
                "prompt_token_ids": [[1.5]],
                "completion_token_ids": [[1]],
            },
            ":1: 'prompt",
        ),
        (
            {
                "prompt": ["a"],
                "completion": ["b"],
                "prompt_token_ids": [[1]],
                "completion_token_ids": [[None]],
            },
            ":1: 'comp",
        ),
        ({}, " has no rows"),
    ],
)
def test_parquet_of_odd_types(tmp_path, columns, says) -> None:
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert f"a.parquet{says}" in refused(tmp_path / "a.parquet")


def test_parquet_with_a_column_twice(tmp_path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert "has more than one column 'text'" in refused(tmp_path / "a.parquet")


def test_a_csv_of_very_many_columns_is_read_at_once(tmp_path) -> None:
    header = ",".join(map(str, range(60_000)))
    (tmp_path / "a.csv").write_text(f"text,{header}\na,{header}\n")
    start = time.monotonic()
    assert [sample.text for sample in read_samples([tmp_path / "a.csv"])] == ["a"]
    assert time.monotonic() - start < 20  # some tenths; counting each name among all takes minutes


def test_columns_missing_in_some_rows_are_known_from_others(tmp_path, tokenizer) -> None:
    rows = [{"id": 1}, {"prompt": "a", "response": "b"}, {"prompt": "c"}]
    samples = list(read_samples([write(tmp_path / "a.jsonl", *rows)], on_bad_row="skip"))
    assert [(one.prompt, one.text, one.problem) for one in samples] == [
        ("", "", "no column 'prompt'; it has: id"),
        ("a", "b", ""),
        ("", "", "no column 'response'; it has: prompt"),
    ]
    options = DataOptions(on_bad_row="skip", bad_rows_allowed=0.4)
    prompts, left_out = read_prompts([tmp_path / "a.jsonl"], tokenizer, options=options)
    assert [prompt.text for prompt in prompts] == ["a", "c"]
    assert left_out == [f"{tmp_path / 'a.jsonl'}:1 (no column 'prompt'; it has: id)"]


def test_texts_stay_what_they_are(tmp_path) -> None:
    texts = [
        "2024-01-01",
        "2024-01-01T00:00:00Z",
        "007",
        "true",
        "null",
        "NaN",
        "1e5",
        "",
        " ",
        "a\r\nb\u2028c",
        "\u0000",
    ]
    samples = list(
        read_samples([write(tmp_path / "a.jsonl", *({"text": text, "n": 2**70} for text in texts))])
    )
    assert [sample.text for sample in samples] == texts
    assert samples[-1].name == f"{tmp_path / 'a.jsonl'}:{len(texts)}"
    # An empty key is a column like others.
    assert "has the columns , but neither" in refused(write(tmp_path / "b.jsonl", {"": 5}))


def test_lists_of_json(tmp_path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a"}, {"text": "b"}], indent=1))
    (tmp_path / "b.json").write_text(json.dumps({"text": "c"}, indent=1))
    (tmp_path / "c.json").write_text('{"text": "d"}\n\n{"text": "e"}')
    samples = list(read_samples(find_files([tmp_path])))
    assert "".join(sample.text for sample in samples) == "abcde"
    assert [Path(sample.name).name for sample in samples] == [
        "a.json:1",
        "a.json:2",
        "b.json:1",
        "c.json:1",
        "c.json:3",
    ]
    (tmp_path / "a.json").write_text('[{"text": "a"},\n 5]')
    assert "a.json:2 is not an object" in refused(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("[]")
    assert "a.json has no rows" in refused(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("5")
    assert "a.json:1 is not an object" in refused(tmp_path / "a.json")


def test_csv_is_read_by_columns(tmp_path, tokenizer, generated) -> None:
    long = "x" * 200_000
    (tmp_path / "a.csv").write_bytes(
        b'\xef\xbb\xbfprompt,response,n\r\n"a, b","c\n""d""",1\r\n\r\n007,2024-01-01,\r\ne,,2\r\nf,'
        + long.encode()
        + b",3\r\n"
    )
    samples = list(read_samples([tmp_path / "a.csv"]))
    assert [(one.prompt, one.text, one.problem, one.name.rsplit(":")[-1]) for one in samples] == [
        ("a, b", 'c\n"d"', "", "2"),
        ("007", "2024-01-01", "", "5"),
        ("e", "", "", "6"),
        ("f", long, "", "7"),
    ]
    (tmp_path / "b.tsv").write_text("text\tn\na, b\t1\n")
    assert [one.text for one in read_samples(find_files([tmp_path / "b.tsv"]))] == ["a, b"]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": 'b "c"'}]
    quoted = json.dumps(messages).replace('"', '""')
    (tmp_path / "c.csv").write_text(f'messages,tools\n"{quoted}",\n')
    assert [one.messages for one in read_samples([tmp_path / "c.csv"])] == [messages]
    row = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in generated.items()
    }
    quoted = ",".join('"' + value + '"' for value in row.values())
    (tmp_path / "d.csv").write_text(f"{','.join(row)}\n{quoted}\n")
    (document,) = tokenize(read_samples([tmp_path / "d.csv"]), tokenizer)
    assert document.token_ids.tolist() == [5, 6, 7, 8, 9, 10, 0]
    (tmp_path / "d.csv").write_text(f"{','.join(row)}\n{quoted.replace('[5, 6]', '[5, 6.5]')}\n")
    assert "d.csv:2: 'prompt_token_ids' holds 6.5" in refused(tmp_path / "d.csv")


@each(
    ("content", "says"),
    [
        (b"text\n", " has no rows"),
        (b"\n\n", " has no rows"),
        (b"text,n\na,1\nb\n", ":3 has 1 cell, but the header has 2"),
        (b'text,n\n"a\nb",1\nb,2,3\n', ":4 has 3 cells, but the header has 2"),
        (b'text,n\na,1\n"b,2\nc,3\n', ":3 cannot be read as CSV"),
        (b'text,n\n"a"b,1\n', ":2 cannot be read as CSV"),
        (b"text,n,text\na,1,b\n", " has more than one column 'text'"),
        (b"text\na\xff\n", ":2 is not UTF-8 text"),
        ("text\na\n".encode("utf-16"), ":1 is not UTF-8 text"),
        (b"text\na\0b\n", ":2 has a NUL byte"),
        (b"a;b\n1;2\n", " has the columns a;b, but neither"),
        (b"messages\n[5]\n", ":2: 'messages' must be a list of objects"),
        (b"messages\nhello\n", ":2: the text in 'messages' cannot be read as JSON"),
    ],
)
def test_csv_that_cannot_be_used(tmp_path, content, says) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    assert f"{tmp_path / 'a.csv'}{says}" in refused(tmp_path / "a.csv")


@each("name", ["a.bin", "a.csv.gz", "a.jsonl.gz", "a.pdf", "a.xlsx", "a.arrow", "a", "a.ipynb"])
def test_kinds_that_are_not_known(tmp_path, name) -> None:
    (tmp_path / name).write_text("text\na\n")
    says = refused(tmp_path / name)
    assert (
        says.startswith(f"data: {tmp_path / name} is of an unknown kind")
        and ".csv .json .jsonl" in says
    )
    (tmp_path / "b.txt").write_text("b")
    assert name in refused(f"{tmp_path}/*")
    with pytest.raises(UserError, match="unknown kind"):
        list(read_samples([tmp_path / name]))


@each("name", ["a.txt", "A.MD", "a.rst", "a.py", "a.c", "a.rs", "a.js", "a.tex", "a.yaml", "a.sh"])
def test_text_stays_one_document(tmp_path, name) -> None:
    (tmp_path / name).write_text("text\na\n")
    (sample,) = read_samples(find_files([tmp_path / name]))
    assert sample.text == "text\na\n"
    (tmp_path / name).write_bytes(b"a\0b")
    assert f"{tmp_path / name} has a NUL byte" in refused(tmp_path / name)


def test_what_is_no_file(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.jsonl")
    os.symlink("two.jsonl", "one.jsonl")
    os.symlink("one.jsonl", "two.jsonl")
    os.symlink("gone.jsonl", "dangling.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "empty.jsonl").touch()
    for path, says in (
        ("pipe.jsonl", "pipe.jsonl is neither a file nor a folder"),
        ("one.jsonl", "one.jsonl is a link that leads nowhere"),
        ("dangling.jsonl", "dangling.jsonl is a link that leads nowhere"),
        ("folder.jsonl", "folder folder.jsonl has no data files"),
        ("empty.jsonl", "empty.jsonl is empty"),
        ("*.parquet", "*.parquet matches no file"),
        ("*pe.jsonl", "*pe.jsonl matches no file"),
        ("a" * 5000, "File name too long"),
        ("a\0b.jsonl", "does not exist"),
        ("", "one of the paths is empty"),
    ):
        assert says in refused(path)
    (tmp_path / "good.jsonl").write_text('{"text": "a"}\n')
    assert find_files([tmp_path]) == [tmp_path / "good.jsonl"]
    if os.geteuid():
        (tmp_path / "good.jsonl").chmod(0)
        assert "good.jsonl cannot be read: Permission denied" in refused("good.jsonl")
