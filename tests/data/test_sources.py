"""Real files of every format, and what is said about those that cannot be used."""

import io
import json
import logging
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtpkit.data.build import build_dataset
from mtpkit.data.documents import tokenize
from mtpkit.data.options import DataOptions
from mtpkit.data.samples import Columns, Sample, read_samples
from mtpkit.data.sources import find_files, find_sources, tell_apart
from mtpkit.data.tokenizer import fingerprint, load_tokenizer
from mtpkit.errors import UserError
from tests.shared import each


def write_jsonl(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, **columns: list) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def read(*paths: Path | str, columns: Columns | None = None) -> list[Sample]:
    return list(read_samples(find_files(paths), columns))


def test_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffone\n\ntwo\n")  # with a byte order mark
    assert read(tmp_path / "a.txt") == [Sample("one\n\ntwo\n")]


def test_jsonl_and_parquet_rows(tmp_path: Path) -> None:
    rows = [{"text": "one"}, {"text": "two", "other": 3}]
    assert read(write_jsonl(tmp_path / "a.jsonl", *rows)) == [Sample("one"), Sample("two")]
    assert read(write_parquet(tmp_path / "a.parquet", text=["one", None])) == [
        Sample("one"),
        Sample(""),
    ]


def test_prompt_and_response_columns(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "a.jsonl", {"prompt": "p", "response": "r", "text": "t"})
    assert read(plain) == [Sample("r", "p")]
    assert read(plain, columns=Columns(prompt="none")) == [Sample("t")]
    renamed = write_parquet(tmp_path / "b.parquet", q=["p"], a=["r"])
    assert read(renamed, columns=Columns(prompt="q", response="a")) == [Sample("r", "p")]
    assert read(write_jsonl(tmp_path / "c.jsonl", {"prompt": "p", "completion": "r"})) == [
        Sample("r", "p")
    ]


def test_conversations(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{"x": {"y": 1}}]},
    ]
    tools = [{"function": {"name": "f"}}]
    row = {"messages": messages, "tools": tools, "text": "t"}
    assert read(write_jsonl(tmp_path / "a.jsonl", row)) == [Sample(messages=messages, tools=tools)]
    as_text = {"messages": json.dumps(messages), "tools": json.dumps(tools)}
    assert read(write_jsonl(tmp_path / "b.jsonl", as_text)) == [
        Sample(messages=messages, tools=tools)
    ]
    # Parquet has one set of keys for all messages; those that were not given are not invented.
    dense = write_parquet(
        tmp_path / "c.parquet",
        messages=[messages, [{"role": "user", "name": "n"}]],
        tools=[None, None],
    )
    sparse = [messages[0], {"role": "assistant", "tool_calls": [{"x": {"y": 1}}]}]
    assert read(dense) == [
        Sample(messages=sparse),
        Sample(messages=[{"role": "user", "name": "n"}]),
    ]
    talks = write_jsonl(tmp_path / "d.jsonl", {"talk": messages, "text": "t"})
    assert read(talks) == [Sample("t")] and read(talks, columns=Columns(messages="talk")) == [
        Sample(messages=messages)
    ]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("rows", "problems"),
    [
        (
            [{"text": "one"}, {"foo": 1, "bar": "x"}, {"text": ""}, {"text": None}],
            ["", "no column 'text'; it has: foo, bar", "", ""],
        ),
        (
            [{"foo": "x"}, {"prompt": "p", "response": "r"}, {"response": "r"}],
            ["no column 'prompt'; it has: foo", "", "no column 'prompt'; it has: response"],
        ),
        (
            [{"messages": "[]"}, {"text": "t"}, {"prompt": "p", "response": "r"}, {"prompt": "p"}],
            ["", "no column 'messages'; it has: text", "", "no column 'messages'; it has: prompt"],
        ),
    ],
)
def test_rows_without_the_column_say_what_they_have(
    tmp_path: Path, kind: str, rows, problems
) -> None:
    if kind == "jsonl":
        file = write_jsonl(tmp_path / "a.jsonl", *rows)
    else:
        names = dict.fromkeys(name for row in rows for name in row)
        file = write_parquet(
            tmp_path / "a.parquet", **{name: [row.get(name) for row in rows] for name in names}
        )
    samples = list(read_samples([file], on_bad_row="skip"))
    assert [sample.problem for sample in samples] == problems
    assert [sample.bad for sample in samples] == [bool(problem) for problem in problems]
    first = next(number for number, problem in enumerate(problems, start=1) if problem)
    with pytest.raises(
        UserError,
        match=rf"data: {file}:{first}: no column .*; --on-bad-row skip leaves such rows out",
    ):
        read(file)


def test_an_empty_cell_for_an_answer_is_an_empty_answer(tmp_path: Path) -> None:
    """A cell of a CSV or Parquet file that is empty for any other reason may as well be missing."""
    rows = [{"prompt": "p", "response": "r"}, {"prompt": "p", "response": None}]
    (tmp_path / "a.csv").write_text("prompt,response\np,r\np,\n")
    dense = write_parquet(tmp_path / "a.parquet", prompt=["p", "p"], response=["r", None])
    for file in (write_jsonl(tmp_path / "a.jsonl", *rows), tmp_path / "a.csv", dense):
        assert read(file) == [Sample("r", "p"), Sample("", "p")]
    without = write_jsonl(tmp_path / "b.jsonl", {"prompt": "p", "response": "r"}, {"prompt": "p"})
    with pytest.raises(UserError, match=r"b.jsonl:2: no column 'response'; it has: prompt"):
        read(without)


def test_samples_say_where_they_are_from(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"})
    (tmp_path / "b.txt").write_text("three")
    assert [sample.name for sample in read_samples([file, tmp_path / "b.txt"])] == [
        f"{file}:1",
        f"{file}:2",
        str(tmp_path / "b.txt"),
    ]


def test_names_of_sources(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    for name in ("code/a.py", "code/b.py", "chat.v2.jsonl", "x=y.txt"):
        (tmp_path / name).write_text("a")
    paths = [
        tmp_path / "code" / "a.py",
        f"all={tmp_path / 'code'}",
        tmp_path / "chat.v2.jsonl",
        tmp_path / "x=y.txt",
        f"{tmp_path}/**/*.py",
    ]
    sources = find_sources(paths)
    # Nothing is left for the last one.
    assert [(source.name, [file.name for file in source.files]) for source in sources] == [
        ("a", ["a.py"]),
        ("all", ["b.py"]),
        ("chat.v2", ["chat.v2.jsonl"]),
        ("x=y", ["x=y.txt"]),
    ]
    assert [source.name for source in find_sources([f"{tmp_path}/code/*.py", tmp_path])] == [
        "code",
        tmp_path.name,
    ]


def test_folders_and_globs(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.py").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "empty.py").touch()
    (tmp_path / ".hidden.txt").write_text("h")
    (tmp_path / "weights.bin").write_text("w")
    (tmp_path / "c[1].c").write_text("c")
    assert read(tmp_path) == [Sample("a"), Sample("b")]
    assert read(tmp_path / "*.c", f"{tmp_path}/**/*.py", tmp_path / "c[1].c") == [
        Sample("c"),
        Sample("b"),
    ]
    assert read(f"{tmp_path}/*.txt", tmp_path / "a.txt") == [Sample("a")]


def test_file_name_with_glob_characters(tmp_path: Path) -> None:
    assert read(write_jsonl(tmp_path / "a[1].jsonl", {"text": "one"})) == [Sample("one")]


@each(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "missing.txt does not exist"),
        ("empty.jsonl", b"", "empty.jsonl is empty"),
        ("binary.txt", b"\xff\xfe", "binary.txt is not UTF-8 text"),
        (
            "broken.jsonl",
            b'{"text": "a"}\n{"text": ',
            "broken.jsonl:2 cannot be read as JSON: Expecting value",
        ),
        (
            "broken.jsonl",
            b'{"text": "a"}\n\n{"text": "\xff"}\n',
            "broken.jsonl:3 is not UTF-8 text",
        ),
        ("rows.jsonl", b'{"text": "a"}\n["b"]\n', "rows.jsonl:2 is not an object"),
        ("spread.jsonl", b'{\n"text": "a"}\n{"text": ', "spread.jsonl:1 cannot be read as JSON"),
        (
            "deep.jsonl",
            b'{"text": ' + b"[" * 100_000 + b'\n{"text": ',
            "deep.jsonl:1 cannot be read as JSON: it is nested too deeply",
        ),
        ("broken.json", b'{"text": ', "broken.json cannot be read as JSON"),
        ("broken.parquet", b"not parquet", "broken.parquet cannot be read as parquet"),
        (
            "other.jsonl",
            b'{"body": "a"}\n',
            "other.jsonl has the columns body, but neither 'messages' or",
        ),
        (
            "number.jsonl",
            b'{"text": "a"}\n{"text": 3}\n',
            "number.jsonl:2: column 'text' holds int",
        ),
        (
            "chat.jsonl",
            b'{"messages": "hello"}\n',
            "chat.jsonl:1: the text in 'messages' cannot be read as JSON",
        ),
        (
            "chat.jsonl",
            b'{"messages": [{"content": "a"}]}\n',
            (
                "chat.jsonl:1: message 1 of 'messages' has no role; a message has role and content,"
                " or from"
            ),
        ),
        (
            "chat.jsonl",
            b'{"messages": {"role": "user"}}\n',
            "chat.jsonl:1: 'messages' holds dict, not a list",
        ),
        (
            "chat.jsonl",
            b'{"messages": "\\"hello\\""}\n',
            "chat.jsonl:1: 'messages' holds str, not a list",
        ),
        (
            "chat.jsonl",
            b'{"messages": [{"role": "assistant", "content": "a", "weight": 2}]}\n',
            "chat.jsonl:1: message 1 of 'messages' has the weight 2, must be 0, 1, false or true",
        ),
    ],
)
def test_unusable_files_are_named(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_all_missing_paths_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(
        UserError, match=r"one\.txt does not exist.*folder has no data files.*two\* matches no file"
    ):
        find_files(["one.txt", "folder", "two*"])
    (tmp_path / "folder" / "__init__.py").touch()
    with pytest.raises(UserError, match=r"folder has no data files.*\*\.py holds no data"):
        find_files(["folder", "folder/*.py"])
    with pytest.raises(UserError, match="no files"):
        find_files([])


def test_documents_end_with_eos_and_mask_the_prompt(tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    text, pair, empty = tokenize(
        [Sample("the cat"), Sample("sat", "the mat"), Sample("", "the")], tokenizer
    )
    assert text.token_ids[-1] == tokenizer.eos_token_id and text.loss_mask.all()
    assert tokenizer.decode(text.token_ids[:-1]) == "the cat"
    assert tokenizer.decode(pair.token_ids[~pair.loss_mask]) == "the mat"
    assert tokenizer.decode(pair.token_ids[pair.loss_mask]) == "sat<eos>"
    assert not empty.usable_parts(9)


def test_generated_tokens_are_learnt_by_their_own_tokenizer(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    row = {
        "prompt": "the cat",
        "completion": " sat",
        "prompt_token_ids": [5, 6],
        "completion_token_ids": [7, 8, 0],
    }
    own = {**row, "tokenizer": fingerprint(tokenizer)}
    cut = {**own, "tokenizer": "another", "finish_reason": "length"}
    file = write_jsonl(
        tmp_path / "a.jsonl",
        own,
        {**row, "tokenizer": "another"},
        cut,
        {"prompt": "a", "completion": "b"},
    )
    exact, other, cut_off, plain = tokenize(read(file), tokenizer)
    assert (
        exact.token_ids.tolist() == [5, 6, 7, 8, 0]
        and exact.loss_mask.tolist() == [False] * 2 + [True] * 3
    )
    assert tokenizer.decode(other.token_ids[other.loss_mask]) == " sat<eos>"
    assert tokenizer.decode(cut_off.token_ids[cut_off.loss_mask]) == " sat"
    assert tokenizer.decode(plain.token_ids[plain.loss_mask]) == "b<eos>"


def test_fingerprints_of_tokenizers(tmp_path: Path, tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    mark = fingerprint(tokenizer)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer(["a", "b c"], padding=False, truncation=True, max_length=1)
    tokenizer.save_pretrained(tmp_path)
    assert fingerprint(tokenizer) == fingerprint(load_tokenizer(tmp_path)) == mark
    tokenizer.add_tokens(["cat"])
    assert fingerprint(tokenizer) != mark


def test_build_dataset_counts_documents_without_targets(
    tmp_path: Path, tokenizer_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"prompt": "the cat", "response": "sat on the mat"},
        {"prompt": "the mat", "response": ""},
    ]
    file = write_jsonl(tmp_path / "a.jsonl", *rows)
    with caplog.at_level(logging.WARNING):
        dataset = build_dataset([file], load_tokenizer(tokenizer_dir), 4)
    (counts,) = dataset.counts
    assert (counts.name, counts.num_documents, counts.num_left_out) == ("a", 2, 1)
    assert (
        f"1 of 2 documents have no token to learn and are left out: {file}:2 (empty answer)"
        in caplog.text
    )
    assert counts.num_target_tokens < dataset.num_tokens <= len(dataset) * 4
    write_jsonl(file, {"text": "the cat sat on the mat"}, {"foo": "x"})
    options = DataOptions(on_bad_row="skip", bad_rows_allowed=0.5)
    build_dataset([file], load_tokenizer(tokenizer_dir), 4, options=options)
    assert f"{file}:2 (no column 'text'; it has: foo)" in caplog.text


def test_tokens_that_the_model_does_not_know_are_refused(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    size = len(tokenizer)
    tokenizer.add_tokens(["dog"])
    (tmp_path / "a.txt").write_text("the cat sat\n")
    (tmp_path / "b.txt").write_text("the dog sat\n")
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    assert len(build_dataset(files[:1], tokenizer, 4, vocab_size=size))
    assert len(build_dataset(files, tokenizer, 4, vocab_size=size + 1))
    with pytest.raises(
        UserError,
        match=rf"data: b has token {size}, 'dog', but the model's vocabulary is of {size}",
    ):
        build_dataset(files, tokenizer, 4, vocab_size=size)
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    with pytest.raises(UserError, match="'<end>', but the model's vocabulary"):
        build_dataset(files[:1], tokenizer, 4, vocab_size=size)


def test_too_little_data(
    tmp_path: Path, tokenizer_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    (tmp_path / "a.txt").write_text("the cat")
    with caplog.at_level(logging.WARNING):
        dataset = build_dataset([tmp_path / "a.txt"], tokenizer, 64)
    tokens = tokenizer("the cat")["input_ids"] + [tokenizer.eos_token_id]
    assert f"{len(tokens)} tokens do not fill one sequence of 64, which is padded" in caplog.text
    batch = dataset.batch([0])
    assert batch.token_ids.tolist() == [tokens + [tokenizer.eos_token_id] * (64 - len(tokens))]
    assert batch.loss_mask.sum() == len(tokens)
    empty = write_jsonl(tmp_path / "a.jsonl", {"text": ""})
    with pytest.raises(
        UserError,
        match=r"a has no usable documents: all 1 .* the first is .*a\.jsonl:1 \(empty text\)",
    ):
        build_dataset([empty], tokenizer, 4)
    with pytest.raises(UserError, match="sequence length 1 is too short"):
        build_dataset([tmp_path / "a.txt"], tokenizer, 1)


def test_tokenizer_that_is_missing_or_broken(tmp_path: Path, tokenizer_dir: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no tokenizer; copy"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    shutil.copy(tokenizer_dir / "tokenizer_config.json", tmp_path)
    with pytest.raises(UserError, match=rf"^{tmp_path} has no tokenizer\.json; copy it there$"):
        load_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="has no eos_token"):
        next(tokenize([Sample("a")], tokenizer))


def test_imports_without_datasets(tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", {"text": "a"})
    file = write_parquet(tmp_path / "a.parquet", text=["a"])
    (tmp_path / "b.txt").write_text("b")
    code = (
        "import sys; sys.modules['datasets'] = sys.modules['pyarrow'] = None\nfrom mtpkit.data"
        " import build, draft_vocab, loader, prepare, prepared, prompts, regenerate\nfrom"
        " mtpkit.data.samples import read_samples\nfrom mtpkit.data.sources import"
        " find_files\nprint([sample.text for sample in"
        f" read_samples(find_files([{str(tmp_path / 'b.txt')!r},"
        f" {str(lines)!r}]))])\nlist(read_samples(find_files([{str(file)!r}])))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "['b', 'a']" in done.stdout
    assert "needs the package pyarrow" in done.stderr.splitlines()[-1]


class Terminal(io.StringIO):
    """A stream that a progress bar takes for a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("count", [1, 200, 600])
def test_progress_counts_what_is_tokenised(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", *[{"text": "the cat sat on the mat"}] * count)
    monkeypatch.setattr(sys, "stderr", Terminal())
    build_dataset([file], load_tokenizer(tokenizer_dir), 4)
    shown = re.findall(r"tokenised documents of a: (\d+) \[", sys.stderr.getvalue())  # type: ignore[attr-defined]
    assert list(map(int, dict.fromkeys(shown))) == [0, *range(256, count, 256), count]


def test_sources_are_named_apart() -> None:
    def names(*paths: str) -> list[str]:
        return tell_apart([(Path(path).stem, Path("/data") / path) for path in paths])

    assert names("a/x.jsonl", "b/x.jsonl", "a/y.txt") == ["a/x.jsonl", "b/x.jsonl", "y"]
    assert names("x.jsonl", "x.txt") == ["x.jsonl", "x.txt"]
    assert names("a/x.jsonl", "c/a/x.jsonl") == ["data/a/x.jsonl", "c/a/x.jsonl"]
    given = [("x", None), ("x", Path("/data/x")), ("x", Path("/data/x")), ("x", None)]
    assert tell_apart(given) == ["x", "data/x", "data/x", "x"], "a name that was given stays"
    assert tell_apart([("x", Path("/x")), ("x", Path("/data/x")), ("", None), ("", None)])[:2] == [
        "/x",
        "data/x",
    ]


def test_thousands_of_files_of_one_name_are_told_apart_at_once() -> None:
    paths = [Path(f"/data/part-{number}/train.jsonl") for number in range(20_000)]
    start = time.monotonic()
    names = tell_apart([("train", path) for path in paths])
    assert names == [f"part-{number}/train.jsonl" for number in range(20_000)]
    assert time.monotonic() - start < 20  # some tenths; comparing each with each takes minutes
