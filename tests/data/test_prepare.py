"""Prepared data: the same sequences as packed on the fly, mapped from files, and refused where it
does not fit."""

import json
import logging
import os
import random
from functools import partial
from itertools import chain, islice

import pyarrow as pa
import pytest
import torch
from datasets import load_from_disk

from mtpkit.data.build import build_dataset
from mtpkit.data.documents import tokenize
from mtpkit.data.loader import PackedLoader
from mtpkit.data.options import DataOptions
from mtpkit.data.prepare import _processes, prepare
from mtpkit.data.prepared import read_manifest
from mtpkit.data.regenerate import Answer
from mtpkit.data.samples import read_samples
from mtpkit.data.sources import MANIFEST
from mtpkit.data.tokenizer import fingerprint, load_tokenizer
from mtpkit.errors import UserError
from mtpkit.files import check_destination

LENGTH = 24
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{"
    " m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{%"
    " endfor %}"
)
WORDS = ["the", "cat", "sat", "on", "the", "mat", "def", "add", "left", "right", "return"]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Every kind of source: chat, prompts and responses, text in Parquet, a folder of text
    files."""
    folder = tmp_path_factory.mktemp("sources")
    rng = random.Random(0)

    def words():
        return " ".join(rng.choices(WORDS, k=rng.randrange(1, 20)))

    def turns():
        return [
            {"role": role, "content": words()}
            for _ in range(rng.randrange(1, 3))
            for role in ("user", "assistant")
        ]

    rows = {
        "chat": [
            {"messages": [{"role": "user", "content": "the"}]},
            *({"messages": turns()} for _ in range(30)),
        ],
        "pairs": [
            {"prompt": "a", "completion": ""},
            *({"prompt": words(), "completion": words()} for _ in range(30)),
        ],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pa.parquet.write_table(
        pa.table({"text": [words() for _ in range(20)]}), folder / "rows.parquet"
    )
    (folder / "texts").mkdir()
    for number in range(12):
        (folder / "texts" / f"{number}.txt").write_text(words() * 3)
    return [
        folder / "chat.jsonl",
        f"answers={folder}/p*.jsonl",
        folder / "rows.parquet",
        folder / "texts",
    ]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, tokenizer, paths):
    directory = tmp_path_factory.mktemp("prepared")
    prepare(paths, tokenizer, LENGTH, directory, num_proc=1)
    return directory


def everything(dataset):
    return dataset.batch(range(len(dataset)))


def same(left, right):
    names = ("token_ids", "loss_mask", "documents", "positions")
    return all(torch.equal(getattr(left, name), getattr(right, name)) for name in names)


def test_the_same_as_packed_on_the_fly(prepared, tokenizer, paths) -> None:
    raw = build_dataset(paths, tokenizer, LENGTH)
    mapped = build_dataset([prepared], tokenizer, LENGTH)
    assert mapped.counts == raw.counts and mapped.fingerprint == raw.fingerprint
    assert mapped.sources == ["chat", "answers", "rows", "texts"]
    assert [counts.num_left_out for counts in mapped.counts] == [1, 1, 0, 0]
    assert same(everything(mapped), everything(raw))


def test_the_number_of_processes_changes_nothing(tmp_path, monkeypatch, tokenizer, paths) -> None:
    one = tmp_path / "one"
    two = tmp_path / "two"
    before = prepare([paths[0], paths[3]], tokenizer, LENGTH, one, num_proc=1)
    monkeypatch.setattr("mtpkit.data.documents.BATCH", 4)
    after = prepare([paths[0], paths[3]], tokenizer, LENGTH, two, num_proc=2)
    assert before == after == read_manifest(one) == read_manifest(two)
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in after.files)
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}


def test_there_are_no_more_processes_than_files() -> None:
    assert [_processes(8, files) for files in (0, 1, 3, 8, 20)] == [None, None, 3, 8, 8]


@pytest.mark.parametrize("before", [None, "true"])
def test_several_processes_leave_the_environment_as_it_was(
    tmp_path, monkeypatch, tokenizer, paths, before
) -> None:
    """The same object too: others hold it, and would not see what is set in another one."""
    environ = os.environ
    monkeypatch.setattr(os, "environ", environ)  # so that a failure here is none of later tests
    if before is None:
        monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    else:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
    values = dict(environ)
    prepare([paths[0]], tokenizer, LENGTH, tmp_path / "out", num_proc=2)
    assert os.environ is environ and dict(environ) == values


def test_what_is_left_out_is_listed(tmp_path, tokenizer, paths, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        prepare(paths, tokenizer, LENGTH, tmp_path)
    chat, pairs = (tmp_path / "left_out.txt").read_text().splitlines()
    assert chat.endswith("chat.jsonl:1 (no assistant message)") and pairs.endswith(
        "pairs.jsonl:1 (empty answer)"
    )
    (tmp_path / "rows.jsonl").write_text('{"text": "the cat sat on the mat"}\n{"foo": 1}\n' * 9)
    options = DataOptions(on_bad_row="skip", bad_rows_allowed=0.5)
    prepare([tmp_path / "rows.jsonl"], tokenizer, LENGTH, tmp_path / "rows", options=options)
    first = (tmp_path / "rows" / "left_out.txt").read_text().splitlines()[0]
    assert first.endswith("rows.jsonl:2 (no column 'text'; it has: foo)")
    assert (
        "1 of 31 documents" in caplog.text
        and chat in caplog.text
        and "left_out.txt lists all" in caplog.text
    )


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("own", [True, False])
def test_regenerated_answers_with_and_without_messages(tmp_path, tokenizer, order, own) -> None:
    mark = fingerprint(tokenizer) if own else "another"
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": " sat on"}]
    answers = [
        Answer(0, "p:1", "the", " mat", "stop", mark, [1, 2], [4, 0]),
        Answer(1, "p:2", "user: the cat\n", " sat on", "stop", mark, [5, 6, 7], [8, 0], turns),
    ]
    (tmp_path / "a.jsonl").write_text("".join(answer.to_json() for answer in answers[::order] * 4))
    documents = list(tokenize(read_samples([tmp_path / "a.jsonl"]), tokenizer))[:2][::order]
    learnt = [document.token_ids[document.loss_mask].tolist() for document in documents]
    context = [document.token_ids[~document.loss_mask].tolist() for document in documents]
    if own:
        assert learnt == [[4, 0], [8, 0]] and context == [[1, 2], [5, 6, 7]]
    else:
        assert [tokenizer.decode(ids) for ids in learnt] == [" mat<eos>", " sat on<eos>"]
    (counts,) = prepare(
        [tmp_path / "a.jsonl"], tokenizer, LENGTH, tmp_path / "prepared", num_proc=1
    ).sources
    assert (counts.num_documents, counts.num_left_out) == (8, 0)
    assert counts.num_target_tokens == 4 * sum(map(len, learnt))


def test_other_programs_read_it_too(prepared, tokenizer) -> None:
    rows = load_from_disk(str(prepared))
    batch = everything(build_dataset([prepared], tokenizer, LENGTH))
    for row, ids, mask, documents in zip(
        rows, batch.token_ids, batch.loss_mask, batch.documents, strict=True
    ):
        held = len(row["input_ids"])
        assert row["input_ids"] == ids[:held].tolist() and row["loss_mask"] == mask[:held].tolist()
        assert torch.bincount(documents[:held]).tolist() == row["document_lengths"]
        assert not mask[held:].any() and (ids[held:] == tokenizer.eos_token_id).all()


def test_tokens_stay_on_the_disk(tmp_path, tokenizer) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 40_000)
    prepare([tmp_path / "a.txt"], tokenizer, 128, tmp_path / "out")
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.arrow"))
    before = pa.total_allocated_bytes()
    dataset = build_dataset([tmp_path / "out"], tokenizer, 128)
    for first in range(0, 160, 8):
        assert dataset.batch(range(first, first + 8)).token_ids.shape == (8, 128)
    assert size > 1_000_000 and pa.total_allocated_bytes() - before < size / 20


def test_resuming_in_the_middle_of_an_epoch_on_another_number_of_ranks(prepared, tokenizer) -> None:
    def loaders(ranks):
        dataset = build_dataset([prepared], tokenizer, LENGTH)
        return [
            PackedLoader(dataset, 4, 1, seed=3, dp_rank=rank, dp_size=ranks)
            for rank in range(ranks)
        ]

    def steps(loaders, count):
        shares = [islice(loader, count) for loader in loaders]
        return [
            torch.cat([batch.token_ids for batch in chain(*step)])
            for step in zip(*shares, strict=True)
        ]

    (alone,) = loaders(1)
    epoch = len(alone.dataset)
    count = 2 * epoch // 4
    whole = steps([alone], count)
    for before, after in ((1, 2), (2, 4), (4, 1)):
        first = loaders(before)
        second = loaders(after)
        begun = steps(first, epoch // 4 // 2)
        assert 0 < first[0].consumed < epoch
        for loader in second:
            loader.load_state_dict(json.loads(json.dumps(first[-1].state_dict())))
        assert all(map(torch.equal, begun + steps(second, count - len(begun)), whole))


def test_it_lies_beside_raw_files(prepared, tokenizer, paths, tmp_path) -> None:
    (tmp_path / "more.txt").write_text("the cat " * 30)
    both = build_dataset([f"old={prepared}", tmp_path / "more.txt"], tokenizer, LENGTH)
    assert both.sources == ["old", "more"] and len(both.counts) == 5
    assert len(both.source_rows("old")) == len(build_dataset([prepared], tokenizer, LENGTH))
    assert (
        both.batch(both.source_rows("more"))
        .token_ids[0, :4]
        .equal(torch.tensor(tokenizer("the cat the cat")["input_ids"][:4]))
    )


def test_another_tokenizer_or_length_is_refused(prepared, tokenizer, tokenizer_dir) -> None:
    with pytest.raises(
        UserError,
        match=(
            r"for sequences of 24 tokens, not 32; set data\.sequence_length=24 in training,"
            r" --sequence-length 24"
        ),
    ):
        build_dataset([prepared], tokenizer, 32)
    other = load_tokenizer(tokenizer_dir)
    assert len(build_dataset([prepared], other, LENGTH)), (
        "another chat template is no other tokenizer"
    )
    other.add_tokens(["cat"])
    with pytest.raises(UserError, match=r"which is not that in .*; prepare it again with --model"):
        build_dataset([prepared], other, LENGTH)


def test_damaged_data_is_refused(tmp_path, tokenizer) -> None:
    (tmp_path / "a.txt").write_text("the cat " * 30)
    out = tmp_path / "out"
    prepare([tmp_path / "a.txt"], tokenizer, LENGTH, out)
    (data,) = out.glob("*.arrow")
    content = data.read_bytes()
    manifest = (out / "mtpkit_data.json").read_text()
    damages = [
        (data, content[:-8], "has .* bytes, not"),
        (data, bytes(len(content)), "cannot be read"),
        (out / "mtpkit_data.json", manifest[:-20], "mtpkit_data.json cannot be read as JSON"),
        (
            out / "mtpkit_data.json",
            manifest.replace('"format": 1', '"format": 9'),
            "has format 9, this mtpkit reads 1",
        ),
        (
            out / "mtpkit_data.json",
            manifest.replace('"num_sequences": ', '"num_sequences": 1'),
            "sequences, not",
        ),
    ]
    for file, damaged, message in damages:
        file.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
        with pytest.raises(UserError, match=f"{message}.*prepare the data again"):
            build_dataset([out], tokenizer, LENGTH)
        data.write_bytes(content)
        (out / "mtpkit_data.json").write_text(manifest)
    data.unlink()
    with pytest.raises(UserError, match="is missing; prepare the data again"):
        build_dataset([out], tokenizer, LENGTH)


def test_prepared_data_is_no_text(prepared, tokenizer, tmp_path) -> None:
    with pytest.raises(UserError, match="is prepared already; name the files it is from"):
        prepare([prepared], tokenizer, LENGTH, tmp_path)
    with pytest.raises(UserError, match=r"holds prepared data in .*: name that directory itself"):
        build_dataset([prepared.parent], tokenizer, LENGTH)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": 3}\n', "b.jsonl:2: column 'text' holds int"),
        ('{"text": ', "b.jsonl:1 cannot be read as JSON"),
        ('{"messages": []}\n', r"b has no usable documents: all 1 .* \(no assistant message\)"),
    ],
)
def test_mistakes_leave_no_work_behind(tmp_path, tokenizer, content, message) -> None:
    (tmp_path / "b.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        prepare([tmp_path / "b.jsonl"], tokenizer, LENGTH, tmp_path / "out")
    assert (
        not (tmp_path / "out" / ".work").exists()
        and not (tmp_path / "out" / "mtpkit_data.json").exists()
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": 3}\n', "b.jsonl:2: column 'text' holds int"),  # while reading
        ('{"messages": []}\n', "has no chat template"),  # while tokenising
    ],
)
def test_mistakes_that_another_process_meets(tmp_path, tokenizer_dir, content, message) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("the cat")
    (tmp_path / "in" / "b.jsonl").write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        prepare(
            [tmp_path / "in"], load_tokenizer(tokenizer_dir), LENGTH, tmp_path / "out", num_proc=2
        )
    assert "\n" not in str(caught.value)


def test_destinations(tmp_path, prepared) -> None:
    check = partial(check_destination, what="prepared data", marks=[MANIFEST])
    check(tmp_path / "new", force=False)
    check(tmp_path, force=False)
    check(prepared, force=True)
    (tmp_path / "file").write_text("a")
    for path, force, message in (
        (tmp_path / "file", True, "is a file"),
        (tmp_path, True, "files other than prepared data"),
        (prepared, False, "add --force"),
    ):
        with pytest.raises(UserError, match=message):
            check(path, force)
