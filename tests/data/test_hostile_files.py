"""Files that mtpkit writes and reads again, changed by somebody else: prepared data, draft
vocabularies, journals."""

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from mtpkit.data.build import build_dataset
from mtpkit.data.draft_vocab import build_draft_vocab, load_draft_vocab
from mtpkit.data.prepare import prepare
from mtpkit.data.prepared import read_manifest
from mtpkit.data.prompts import Prompt
from mtpkit.data.regenerate import Answer, Journal
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.engine.regenerate import regenerate
from mtpkit.errors import UserError
from tests.mutations import cases, changed, texts
from tests.shared import each, told_length

LENGTH = 16


def refuse(what: str, act, *more: str) -> None:
    with pytest.raises(UserError) as caught:
        act()
    message = " ".join(str(caught.value).split())
    assert told_length(message) < 400 and all(part in message for part in more), (what, message)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return load_tokenizer(tokenizer_dir)


@pytest.fixture
def prepared(tmp_path, tokenizer) -> Path:
    for name, text in (("a", "the cat sat on the mat " * 20), ("b", "def add(left, right) " * 20)):
        (tmp_path / f"{name}.txt").write_text(text)
    prepare(
        [tmp_path / "a.txt", tmp_path / "b.txt"], tokenizer, LENGTH, tmp_path / "out", num_proc=1
    )
    return tmp_path / "out"


HARMLESS = (
    *(
        "tokenizer_name",
        "source_files",
        "name",
        "num_documents",
        "num_left_out",
        "max_token",
        "fingerprint",
    ),
    *("num_long", "num_empty_answers", "left_out_by_reason", "options"),
)
"""Keys under which another value of the right type is as good, or cannot be told from the right
one."""


def test_manifests_of_prepared_data(prepared, tokenizer) -> None:
    path = prepared / "mtpkit_data.json"
    whole = path.read_text()
    assert len(cases(whole)) > 300
    for what, content in cases(whole):
        path.write_bytes(content)
        try:
            dataset = build_dataset([prepared], tokenizer, LENGTH)
        except UserError as error:
            assert told_length(error) < 400 and str(prepared) in str(error), (what, error)
        else:
            assert any(key in what for key in (*HARMLESS, "num_target_tokens")), what
            assert len(dataset.batch(range(len(dataset))).token_ids)
        try:
            build_dataset([prepared], tokenizer, None)  # whose length is that of the data
        except UserError as error:
            assert told_length(error) < 400, (what, error)


@each("tokenizer_says", [None, {}, "", "0" * 31, 5])
def test_a_manifest_ties_the_data_to_a_tokenizer(prepared, tokenizer, tokenizer_says) -> None:
    path = prepared / "mtpkit_data.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer": tokenizer_says}))
    refuse(
        "tokenizer",
        lambda: read_manifest(prepared),
        "mtpkit_data.json",
        "tokenizer is",
        "prepare the data again",
    )


@each(
    "files",
    [None, 5, {}, [], {"a.txt": 1}, {"../out/data-00000-of-00001.arrow": 1}, {"a.arrow": "1"}],
)
def test_a_manifest_names_data_files_beside_it(prepared, files) -> None:
    path = prepared / "mtpkit_data.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "files": files}))
    refuse("files", lambda: read_manifest(prepared), "files", "prepare the data again")


def rewrite(directory: Path, table: pa.Table) -> None:
    """Put other data into the only file of prepared data, and its size into the manifest."""
    (file,) = directory.glob("*.arrow")
    file.unlink()
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    path = directory / "mtpkit_data.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "files": {file.name: file.stat().st_size}}))


def load(directory: Path) -> pa.Table:
    (file,) = directory.glob("*.arrow")
    return pa.ipc.open_stream(file.read_bytes()).read_all()


def lists(values: list, kind: pa.DataType) -> pa.Array:
    return pa.array(values, pa.list_(kind))


@each("token", [-1, -(2**31), 300, 99_999, 2**31 - 1])
def test_tokens_that_the_model_does_not_have(prepared, tokenizer, token) -> None:
    table = load(prepared)
    ids = table["input_ids"].to_pylist()
    ids[3][2] = token
    rewrite(prepared, table.set_column(0, "input_ids", lists(ids, pa.int32())))
    dataset = build_dataset([prepared], tokenizer, LENGTH, vocab_size=300)
    assert dataset.batch([2]).token_ids.shape == (1, LENGTH)
    refuse(
        "token",
        lambda: dataset.batch([1, 3]),
        f"data: {prepared} a is damaged: sequence 3 has token {token}",
        "prepare the data again",
    )
    refuse("token", lambda: build_draft_vocab([prepared], tokenizer, 300, 10), f"token {token}")


def test_recorded_tokens_are_refused_when_the_data_is_opened(prepared, tokenizer) -> None:
    largest = max(source.max_token or 0 for source in read_manifest(prepared).sources)
    assert largest == max(map(max, load(prepared)["input_ids"].to_pylist()))
    assert len(build_dataset([prepared], tokenizer, LENGTH, vocab_size=largest + 1))
    refuse(
        "opened",
        lambda: build_dataset([prepared], tokenizer, LENGTH, vocab_size=largest),
        f"has token {largest}, ",
    )
    path = prepared / "mtpkit_data.json"
    path.write_text(path.read_text().replace(f'"max_token": {largest}', f'"max_token": {10**30}'))
    refuse(
        "damaged",
        lambda: read_manifest(prepared),
        "max_token is 1000",
        "must be at least 0 and below 2147483648",
    )


def test_data_of_other_columns_or_lengths(prepared, tokenizer) -> None:
    table = load(prepared)
    ids, mask, lengths = (column.to_pylist() for column in table.columns)
    cases = {
        "int64 ids": table.set_column(0, "input_ids", lists(ids, pa.int64())),
        "float ids": table.set_column(
            0, "input_ids", lists([[float(i) for i in row] for row in ids], pa.float64())
        ),
        "text ids": table.set_column(
            0, "input_ids", lists([[str(i) for i in row] for row in ids], pa.string())
        ),
        "numbers": table.set_column(0, "input_ids", pa.array(range(len(ids)))),
        "null rows": table.set_column(0, "input_ids", lists([None, *ids[1:]], pa.int32())),
        "null tokens": table.set_column(
            0, "input_ids", lists([[None, *ids[0][1:]], *ids[1:]], pa.int32())
        ),
        "null mask": table.set_column(
            1, "loss_mask", lists([[None, *mask[0][1:]], *mask[1:]], pa.bool_())
        ),
        "integer mask": table.set_column(
            1, "loss_mask", lists([[int(m) for m in row] for row in mask], pa.int32())
        ),
        "no mask": table.drop_columns(["loss_mask"]),
        "no lengths": table.drop_columns(["document_lengths"]),
        "one more": table.append_column("more", lists(ids, pa.int32())),
        "fewer rows": table.slice(1),
        "fewer tokens": table.set_column(0, "input_ids", lists([ids[0][1:], *ids[1:]], pa.int32())),
    }
    for what, other in cases.items():
        rewrite(prepared, other)
        refuse(
            what,
            lambda: build_dataset([prepared], tokenizer, LENGTH),
            str(prepared),
            "prepare the data again",
        )
    later = {
        "short mask": table.set_column(1, "loss_mask", lists([mask[0][1:], *mask[1:]], pa.bool_())),
        "short documents": table.set_column(
            2, "document_lengths", lists([[1], *lengths[1:]], pa.int32())
        ),
        "no documents": table.set_column(
            2, "document_lengths", lists([[], *lengths[1:]], pa.int32())
        ),
        "less than nothing": table.set_column(
            2, "document_lengths", lists([[sum(lengths[0]) + 1, -1], *lengths[1:]], pa.int32())
        ),
        "longer than a sequence": table.set_column(
            0, "input_ids", lists([[5] * 40, *ids[1:-1], ids[-1][:-24]], pa.int32())
        ),
    }
    for what, other in later.items():
        rewrite(prepared, other)
        try:
            dataset = build_dataset([prepared], tokenizer, LENGTH)
        except UserError:
            continue
        refuse(what, lambda: dataset.batch([0]), "sequence 0 has", "prepare the data again")  # noqa: B023


def test_data_files_with_other_bytes(prepared, tokenizer) -> None:
    (file,) = prepared.glob("*.arrow")
    content = file.read_bytes()
    rng = random.Random(0)
    for _ in range(150):
        other = bytearray(content)
        for _ in range(rng.choice((1, 4, 40))):
            other[rng.randrange(len(other))] = rng.randrange(256)
        # Beside the file and not in it: what is mapped into this process must stay.
        file.unlink()
        file.write_bytes(other)
        try:
            dataset = build_dataset([prepared], tokenizer, LENGTH, vocab_size=300)
            dataset.batch(range(len(dataset)))
        except UserError as error:
            assert "prepare the data again" in str(error) and told_length(error) < 400


def test_draft_vocabularies(tmp_path) -> None:
    path = tmp_path / "vocab.json"
    whole = json.dumps({"token_ids": [1, 5, 7], "vocab_size": 300, "coverage": 0.5, "files": ["a"]})
    for what, content in cases(whole):
        path.write_bytes(content)
        for size in (300, None):
            try:
                ids = load_draft_vocab(path, size)
            except UserError as error:
                assert told_length(error) < 400 and str(path) in str(error), (what, error)
            else:
                told = json.loads(content)
                assert ids and all(
                    type(token) is int and 0 <= token < told["vocab_size"] for token in ids
                ), what


SETTINGS = {"model": "m", "prompts": "2 of digest d", "seed": 1}
PROMPTS = [Prompt("p.jsonl:1", "a", [1]), Prompt("p.jsonl:2", "b", [2])]
ANSWER = Answer(
    0, "p.jsonl:1", "a", "c", "stop", "mark", [1], [3, 0], [{"role": "user", "content": "a"}]
)


@dataclass(frozen=True)
class Params:
    seed: int | None = None


class Engine:
    """Answers at once."""

    def stats(self):
        return SimpleNamespace(generated_tokens=0)

    def add_request(self, prompt_token_ids, params, request_id):
        self.request_id = request_id

    def step(self, finished_only):
        completion = SimpleNamespace(text="d", token_ids=[4, 0], finish_reason="stop")
        return [SimpleNamespace(request_id=self.request_id, finished=True, outputs=[completion])]


def resume(output: Path) -> None:
    with Journal(output, SETTINGS) as journal:
        regenerate(Engine(), PROMPTS, Params(), journal, "mark", seed=7, in_flight=1)


def test_journals_go_on_or_are_refused_and_kept(tmp_path) -> None:
    output = tmp_path / "out.jsonl"
    journal = tmp_path / "out.jsonl.partial"
    first = json.dumps(SETTINGS)
    answer = ANSWER.to_json().rstrip()
    lines = [(what, json.dumps(value)) for what, value in changed(json.loads(answer))]
    contents = [(what, f"{first}\n{line}\n{answer}\n".encode()) for what, line in lines]
    contents += [
        (what, json.dumps(value).encode() + f"\n{answer}\n".encode())
        for what, value in changed(SETTINGS)
    ]
    contents += [
        (what, first.encode() + b"\n" + text + b"\n" + answer.encode() + b"\n")
        for what, text in texts(answer)
    ]
    contents += [(what, text + b"\n" + answer.encode() + b"\n") for what, text in texts(first)]
    contents += [
        ("twice", f"{first}\n{answer}\n{answer}\n".encode()),
        ("foreign", b"my notes"),
        ("foreign", b"my notes\n"),
    ]
    contents += [
        ("settings of others", b'{"a": 1}\n'),
        ("UTF-16", f"{first}\n".encode("utf-16")),
        ("negative", first.encode()),
    ]
    kept = 0
    for what, content in contents:
        journal.write_bytes(content)
        output.unlink(missing_ok=True)
        try:
            resume(output)
        except UserError as error:
            kept += 1
            assert told_length(error) < 400 and str(journal) in str(error), (what, error)
            assert journal.read_bytes() == content and not output.exists(), what
        else:
            rows = [json.loads(line) for line in output.read_text().splitlines()]
            assert [row["index"] for row in rows] == [0, 1], what
        assert {path.name for path in tmp_path.iterdir()} <= {"out.jsonl", "out.jsonl.partial"}
        journal.unlink(missing_ok=True)
    assert kept > 200


def test_a_journal_torn_in_any_place_goes_on(tmp_path) -> None:
    output = tmp_path / "out.jsonl"
    journal = tmp_path / "out.jsonl.partial"
    whole = f"{json.dumps(SETTINGS)}\n{ANSWER.to_json()}".encode()
    for end in range(len(whole) + 1):
        journal.write_bytes(whole[:end])
        resume(output)
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        assert [row["completion"] for row in rows] == ["c" if end == len(whole) else "d", "d"]
        output.unlink()


def test_answers_to_prompts_that_are_not_there(tmp_path) -> None:
    journal = tmp_path / "out.jsonl.partial"
    other = ANSWER.to_json().replace('"index": 0', '"index": 7')
    journal.write_text(f"{json.dumps(SETTINGS)}\n{other}")
    refuse("index", lambda: resume(tmp_path / "out.jsonl"), "answers prompt 8, but there are 2")


@pytest.mark.parametrize("kind", ["folder", "loop", "fifo"])
def test_a_journal_that_is_no_regular_file(tmp_path, kind) -> None:
    journal = tmp_path / "out.jsonl.partial"
    {
        "folder": journal.mkdir,
        "loop": lambda: os.symlink(journal.name, journal),
        "fifo": lambda: os.mkfifo(journal),
    }[kind]()
    refuse(kind, lambda: resume(tmp_path / "out.jsonl"), "out.jsonl.partial is not a regular file")
