"""Data, prompts, and what is made of them: files that hold text or tokens."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.integration.hostile import damage
from tests.integration.hostile.cases import Expect, Kind, Mutation
from tests.integration.hostile.damage import Rules
from tests.integration.hostile.kinds_model import MAKES, NULLABLE, commands, json_file
from tests.integration.hostile.world import REGENERATE, TEXT

MODEL = ("hf8", "prompts1.txt", "prompts1.jsonl")


def data_commands(file: str, more: str = "") -> dict[str, str]:
    """Commands that read data."""
    return {
        "inspect": f"data inspect --model hf8 --data {file} --sequence-length 32",
        "prepare": f"data prepare --model hf8 --data {file} --sequence-length 32 --output out",
        "draft-vocab": f"data draft-vocab --model hf8 --data {file} --size 40 --output out.json",
        "train": (
            f"train model=hf8 output=out data.train=[{file}] data.sequence_length=32"
            " data.global_batch_size=1 heads.num_depths=2 steps=1 optimizer.warmup_steps=1"
        ),
        "acceptance": (
            f"acceptance --model hf8 --data {file} --sequence-length 32 --num-sequences 1"
        ),
        "regenerate": (
            f"data regenerate --model hf8 --data {file} --limit 2 --max-tokens 2 --output"
            f" out.jsonl{more}"
        ),
    }


def texts(world: Path) -> Iterator[Mutation]:
    """A text file: any UTF-8 is a text, but there must be enough of it."""
    file = "data3/text.txt"
    contents = {
        "only spaces": " \n\t\n",
        "one letter": "x",
        "zero bytes in it": TEXT + "\0\0" + TEXT,
        "other ends of lines": TEXT.replace("\n", "\r"),
        "a line of 1 MB": "x" * 10**6,
        "no characters": "\u200b\ufeff",
    }
    expected: dict[str, Expect] = {"other ends of lines": "accepted", "a line of 1 MB": "accepted"}
    expected["zero bytes in it"] = "refused"
    for name, text in contents.items():
        expect = expected.get(name, "either")
        yield Mutation(name, damage.replace(file, lambda text=text: text.encode()), expect)
    yield Mutation(
        "a mark of UTF-8", damage.replace(file, lambda: b"\xef\xbb\xbf" + TEXT.encode()), "accepted"
    )
    yield from damage.encodings(file, TEXT)
    yield from (m for m in damage.binaries(file) if m.name in ("empty", "random"))
    yield from data_places(file)


def rows(
    file: str, rules: Rules, all_rules: Rules, row: int = 1
) -> Callable[[Path], Iterator[Mutation]]:
    """JSON lines: damages of one row, of all rows alike, and of the whole.

    Args:
        all_rules: for damages of all rows, after which nothing may be left to learn.
    """

    def mutations(world: Path) -> Iterator[Mutation]:
        lines = (world / file).read_text().splitlines()
        values = json.loads(lines[row])

        def among(text: str) -> str:
            return "".join(line + "\n" for line in [*lines[:row], text, *lines[row + 1 :]])

        def everywhere(text: str) -> str:
            return (text + "\n") * len(lines)

        yield from damage.json_tree(file, values, rules, "a row: ", among)
        yield from damage.json_tree(file, values, all_rules, "all rows: ", everywhere)
        other: dict[str, tuple[str, Expect]] = {
            "a blank row": ("", "accepted"),
            "a row of spaces": ("  \t", "accepted"),
            "a list": ("[1]", "refused"),
            "a number": ("3", "refused"),
            "a text": ('"x"', "refused"),
            "null": ("null", "refused"),
            "no JSON": ("nothing of this kind", "refused"),
            "two objects": (lines[row] + lines[row], "refused"),
            "half a row": (lines[row][: len(lines[row]) // 2], "refused"),
            "deep": ("[" * damage.DEPTH, "refused"),
            "deep objects": (damage.VALUES["deep objects"], "refused"),
            "a row more": (lines[row] + "\n" + lines[row], "accepted"),
        }
        for name, (text, expect) in other.items():
            yield Mutation(
                f"a row: {name}",
                damage.replace(file, lambda text=text: among(text).encode()),
                expect,
            )
        for name in ("a blank row", "a list", "null", "deep", "no JSON"):
            text = other[name][0]
            yield Mutation(
                f"all rows: {name}",
                damage.replace(file, lambda text=text: everywhere(text).encode()),
            )
        yield Mutation(
            "one object for all",
            damage.replace(file, lambda: b'{"a": ' + everywhere(lines[row]).encode()),
        )
        yield Mutation(
            "other ends of lines",
            damage.replace(file, lambda: everywhere(lines[row]).replace("\n", "\r\n").encode()),
            "accepted",
        )
        whole = everywhere(lines[row])
        yield Mutation(
            "a mark of UTF-8",
            damage.replace(file, lambda: b"\xef\xbb\xbf" + whole.encode()),
            "accepted",
        )
        yield from damage.encodings(file, whole)
        yield from damage.binaries(file)
        yield from data_places(file)

    return mutations


def data_places(file: str) -> Iterator[Mutation]:
    """A directory with files is data, too, whatever it is called; not a file of prompts."""
    for mutation in damage.places(file):
        folder = mutation.name == "a directory with files" and file.startswith("data3")
        yield replace(mutation, expect="either") if folder else mutation


TEXT_ROWS = Rules(
    unknown="accepted",
    doubled="either",
    accepted={"text": {"null", "empty text", "long text"}},
    either={"id": {"*"}, "text": {"unknown"}},
)
ALL_TEXT_ROWS = replace(TEXT_ROWS, accepted={"text": {"long text"}})
CHAT_ROWS = Rules(
    unknown="either",
    doubled="either",
    accepted={"messages": {"null", "[]"}},
    either={
        "id": {"*"},
        "messages.*.content": {"*"},
        "messages.*.role": {"long text", "empty text"},
        "messages.*": {"unknown"},
        "messages": {"removed"},
    },
)
ALL_CHAT_ROWS = replace(CHAT_ROWS, accepted={})
ANSWER_ROWS = Rules(
    unknown="accepted",
    doubled="either",
    accepted={
        "tokenizer": {*NULLABLE, "empty text", "long text"},
        "finish_reason": {*NULLABLE, "empty text", "long text"},
    },
    either={
        "index": {"*"},
        "prompt": {"*"},
        "completion": {"*"},
        "finish_reason": {"*"},
        "tokenizer": {"surrogate"},
        "*_token_ids": {"null", "removed", "[]"},
    },
)
PROMPT_ROWS = Rules(
    unknown="accepted", doubled="either", either={"prompt": {"long text"}, "*": {"unknown"}}
)


def parquet(world: Path) -> Iterator[Mutation]:
    """Columns of other types, broken footers and pages."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = "data3/rows.parquet"
    broken = pa.StringArray.from_buffers(
        2, pa.py_buffer(b"\0\0\0\0\4\0\0\0\6\0\0\0"), pa.py_buffer(b"a\xff\xfeb\xe9c")
    )
    columns: dict[str, tuple[Any, Expect]] = {
        "whole numbers": (pa.array([1, 2]), "refused"),
        "fractions": (pa.array([1.5, 2.5]), "refused"),
        "truth": (pa.array([True, False]), "refused"),
        "bytes": (pa.array([b"the cat", b"\xff\xfe"]), "refused"),
        "lists": (pa.array([["the"], ["cat"]]), "refused"),
        "objects": (pa.array([{"a": 1}, {"a": 2}]), "refused"),
        "nothing": (pa.nulls(2), "refused"),
        "only null": (pa.array([None, None], pa.string()), "refused"),
        "times": (pa.array([1, 2], pa.timestamp("ns")), "refused"),
        "texts that are not UTF-8": (broken, "refused"),
        "large texts": (pa.array([TEXT, TEXT], pa.large_string()), "accepted"),
        "a dictionary": (pa.array([TEXT, TEXT]).dictionary_encode(), "accepted"),
        "a null": (pa.array([TEXT, None]), "accepted"),
        "no rows": (pa.array([], pa.string()), "refused"),
    }

    def write(
        names: Sequence[str], arrays: Sequence[Any], **options: Any
    ) -> Callable[[Path], object]:
        return lambda root: pq.write_table(
            pa.Table.from_arrays(list(arrays), names=list(names)), root / file, **options
        )

    for name, (array, expect) in columns.items():
        yield Mutation(f"a column of {name}", write(["text"], [array]), expect, ("text",))
    fine = pa.array([TEXT, TEXT])
    yield Mutation("another name", write(["words"], [fine]))
    yield Mutation("two columns of a name", write(["text", "text"], [fine, fine]), "either")
    yield Mutation("no columns", write([], []))
    yield Mutation("a column without a name", write(["", "text"], [fine, fine]), "either")
    yield Mutation("compressed otherwise", write(["text"], [fine], compression="zstd"), "accepted")
    content = (world / file).read_bytes()
    size = len(content)
    footer = int.from_bytes(content[-8:-4], "little")
    begin = size - 8 - footer
    yield from damage.cuts(
        file,
        [0, 3, 4, begin // 2, begin, begin + footer // 2, size - 8, size - 5, size - 4, size - 1],
        10,
    )
    for number in (0, 1, footer - 1, footer + 1, 2**31 - 1, 2**32 - 1):
        changed = content[:-8] + number.to_bytes(4, "little") + content[-4:]
        yield Mutation(
            f"footer of {number} bytes", damage.replace(file, lambda changed=changed: changed)
        )
    yield from damage.flips(file, range(begin, size - 8, 7), 40)
    yield from damage.flips(file, range(4, begin, 11), 15)
    yield from damage.encodings(file, "the cat " * 40)
    yield from damage.binaries(file)
    yield from data_places(file)


def csv(world: Path) -> Iterator[Mutation]:
    file = "data3/rows.csv"
    text = (world / file).read_text()
    contents: dict[str, tuple[str, Expect]] = {
        "no such column": (text.replace("id,text", "id,words"), "refused"),
        "only a header": ("id,text\n", "refused"),
        "a field more": (text + "3,a,b\n", "refused"),
        "a field less": (text + "3\n", "either"),
        "an open quote": (text + '3,"the cat\n', "either"),
        "quotes inside": (text + '3,"the "cat" sat"\n', "either"),
        "a zero byte": (text + "3,the\0cat\n", "either"),
        "a field of 1 MB": (text + "3," + "x" * 10**6 + "\n", "accepted"),
        "semicolons": (text.replace(",", ";"), "refused"),
        "two columns of a name": (text.replace("id,text", "text,text"), "either"),
        "numbers for texts": ("id,text\n1,2\n3,4\n", "either"),
        "blank rows": (text.replace("\n0,", "\n\n\n0,"), "either"),
        "other ends of lines": (text.replace("\n", "\r\n"), "accepted"),
        "only blank lines": ("\n\n\n", "refused"),
        "a mark of UTF-8": ("\ufeff" + text, "accepted"),
    }
    for name, (other, expect) in contents.items():
        yield Mutation(
            name, damage.replace(file, lambda other=other: other.encode()), expect, ("text",)
        )
    yield from damage.encodings(file, text)
    yield from damage.binaries(file)
    yield from data_places(file)


def unknown_kind(world: Path) -> Iterator[Mutation]:
    """Files that are no data, named as data."""
    import zipfile

    def packed(root: Path) -> None:
        with zipfile.ZipFile(root / "data3/rows.zip", "w") as archive:
            archive.write(root / "data3/text.txt", "text.txt")

    yield Mutation("a zip", packed)
    yield from damage.binaries("data3/rows.zip")


def prompt_texts(world: Path) -> Iterator[Mutation]:
    file = "prompts1.txt"
    text = (world / file).read_text()
    for name, other in {"only blank lines": "\n\n \n", "only spaces": "   "}.items():
        yield Mutation(name, damage.replace(file, lambda other=other: other.encode()))
    yield Mutation("a prompt too long", damage.replace(file, lambda: b"the cat\n" + b"y" * 10**6))
    yield Mutation("zero bytes", damage.replace(file, lambda: b"the\0cat\n"), "accepted")
    yield Mutation(
        "a mark of UTF-8", damage.replace(file, lambda: b"\xef\xbb\xbfthe cat\n"), "accepted"
    )
    yield from damage.encodings(file, text)
    yield from (m for m in damage.binaries(file) if m.name in ("empty", "random"))
    yield from damage.places(file)


def stdin(world: Path) -> Iterator[Mutation]:
    """The prompt from elsewhere: bytes that may be anything."""
    text = (world / "stdin").read_text()
    yield from damage.encodings("stdin", text)
    yield from (m for m in damage.binaries("stdin") if m.name in ("empty", "random"))
    yield Mutation("too long", damage.replace("stdin", lambda: b"y" * 10**6), names=("prompt",))


def templates(world: Path) -> Iterator[Mutation]:
    """Programs of somebody else's, in a sandbox."""
    file = "template1.jinja"
    names = "template", "chat"
    refused = {
        "no end": "{% for m in messages %}{{ m.content }}",
        "no such tag": "{% nothing %}",
        "an open brace": "{{ messages[0].content",
        "deep": "{% if true %}" * 5000,
        "an error": "{{ raise_exception('no') }}",
        "a division by zero": "{{ 1 / 0 }}",
        "undefined": "{{ nothing.at.all }}",
        "no such filter": "{{ messages | nothing }}",
        "a forbidden attribute": "{{ ().__class__.__bases__[0].__subclasses__() }}",
        "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "a range without end": "{% for i in range(10**9) %}x{% endfor %}",
        "a file that is included": "{% include '/etc/passwd' %}",
    }
    for name, text in refused.items():
        yield Mutation(
            name, damage.replace(file, lambda text=text: text.encode()), "refused", names
        )
    for name, text in {
        "only text": "nothing of the messages",
        "zeros": "\0" * 4096,
        "only spaces": "  \n",
    }.items():
        yield Mutation(name, damage.replace(file, lambda text=text: text.encode()), "either", names)
    yield from damage.encodings(file, (world / file).read_text())
    yield from (m for m in damage.binaries(file) if m.name in ("empty", "random"))
    yield from damage.places(file)


def draft_vocab(world: Path) -> Iterator[Mutation]:
    rules = Rules(unknown="either", either={"coverage*": {"*"}, "files*": {"*"}})
    yield from json_file("vocab2.json", rules)(world)


def journal(world: Path) -> Iterator[Mutation]:
    """Journal of an earlier `data regenerate`: settings, then answers."""
    file = "answers1.jsonl.partial"
    settings, first, last = (world / file).read_text().splitlines()
    answer_rules = Rules(unknown="either", doubled="either", either={"*": {"*"}, "index": ()})
    index_rules = Rules()
    yield from damage.json_tree(
        file,
        json.loads(settings),
        Rules(unknown="either", doubled="either"),
        "settings: ",
        lambda t: f"{t}\n{first}\n{last}\n",
    )
    for mutation in damage.json_tree(
        file, json.loads(first), answer_rules, "an answer: ", lambda t: f"{settings}\n{t}\n{last}\n"
    ):
        if not mutation.name.startswith("an answer: index"):
            yield mutation
    index = {"index": json.loads(first)["index"]}
    rest = {key: value for key, value in json.loads(first).items() if key != "index"}

    def with_rest(text: str) -> str:
        answer = f"{text[:-1] or '{'}{', ' if len(text) > 2 else ''}{json.dumps(rest)[1:]}"
        return f"{settings}\n{answer}\n{last}\n"

    for mutation in damage.json_tree(file, index, index_rules, "an answer: ", with_rest):
        if "unknown" not in mutation.name:
            yield mutation
    for name, text in {
        "7": f"{settings}\n{first}\n" + last.replace('"index": 1', '"index": 7') + "\n",
        "twice": f"{settings}\n{first}\n{first}\n",
    }.items():
        expect: Expect = "either" if name == "twice" else "refused"
        yield Mutation(
            f"an index of {name}", damage.replace(file, lambda text=text: text.encode()), expect
        )
    half = f"{settings}\n{first}\n{last[: len(last) // 2]}"
    yield Mutation("cut in the last line", damage.replace(file, lambda: half.encode()), "accepted")
    broken = f"{settings}\n{first[:20]}\n{last}\n"
    yield Mutation("a broken line", damage.replace(file, lambda: broken.encode()))
    for name, text in {
        "a list": "[1]",
        "deep": damage.VALUES["deep"],
        "a blank line": "",
        "null": "null",
    }.items():
        between = f"{settings}\n{text}\n{last}\n"
        yield Mutation(
            f"{name} between", damage.replace(file, lambda between=between: between.encode())
        )
    for mutation in damage.encodings(file, f"{settings}\n{first}\n{last}\n"):
        # behind the last whole line
        torn = mutation.name in ("a cut off character", "an encoded surrogate")
        yield replace(mutation, expect="either") if torn else mutation
    yield from damage.binaries(file, strict=False)
    yield from damage.places(file, "accepted")


def prepared_manifest(world: Path) -> Iterator[Mutation]:
    words = {"empty text", "long text"}
    rules = Rules(
        accepted={"tokenizer_name": words, "sources.*.name": words, "sources.*.fingerprint": words},
        either={
            "source_files*": {"*"},
            "sources.*.name": {"surrogate", "empty text"},
            "sources.*.fingerprint": {"surrogate"},
            "tokenizer_name": {"surrogate"},
            "sources.*.num_*": {"10^30"},
            # What came later, and only reports.
            "sources.*.num_long*": {"*"},
            "sources.*.num_empty_answers*": {"*"},
            "sources.*.left_out_by_reason*": {"*"},
            "options*": {"*"},
        },
    )
    yield from json_file("prep6/mtpkit_data.json", rules, "either")(world)


def by_library(file: str) -> Callable[[Path], Iterator[Mutation]]:
    """A JSON file that only a library reads."""
    return json_file(file, Rules(strict=False), "either")


def arrow(world: Path) -> Iterator[Mutation]:
    """The sequences themselves: cut, with other tokens or columns in them, and with a manifest that
    agrees."""
    import pyarrow as pa

    folder = "prep6"
    name = "data-00000-of-00001.arrow"
    file = f"{folder}/{name}"
    content = (world / file).read_bytes()
    table = pa.ipc.open_stream(pa.BufferReader(content)).read_all()
    manifest = json.loads((world / folder / "mtpkit_data.json").read_text())

    def agreeing(write: Callable[[Path], object]) -> Callable[[Path], object]:
        """Also say the new size in the manifest."""

        def apply(root: Path) -> None:
            write(root / file)
            size = (root / file).stat().st_size
            (root / folder / "mtpkit_data.json").write_text(
                json.dumps(manifest | {"files": {name: size}})
            )

        return apply

    def as_table(other: Any) -> Callable[[Path], object]:
        def write(path: Path) -> None:
            with (
                pa.OSFile(str(path), "wb") as sink,
                pa.ipc.new_stream(sink, other.schema) as writer,
            ):
                writer.write_table(other)

        return agreeing(write)

    ends = damage.spread(range(len(content)), 12)
    yield from damage.cuts(file, ends[:-1], 6)
    for end in ends[:-1]:
        yield Mutation(
            f"cut at {end}, with its size",
            agreeing(lambda path, end=end: path.write_bytes(content[:end])),
        )
    length = manifest["sequence_length"]
    columns = {column: table[column].to_pylist() for column in table.column_names}

    def changed(column: str, change: Callable[[list], Any], kind: Any = None) -> Any:
        values = [change(list(value)) for value in columns[column]]
        array = pa.array(values, kind or table.schema.field(column).type)
        return table.set_column(table.column_names.index(column), column, array)

    others = {
        "a negative token": changed("input_ids", lambda ids: [-1, *ids[1:]]),
        "a token beyond the vocabulary": changed("input_ids", lambda ids: [99_999, *ids[1:]]),
        "a token of 2^31 - 1": changed("input_ids", lambda ids: [2**31 - 1, *ids[1:]]),
        "a null token": changed("input_ids", lambda ids: [None, *ids[1:]]),
        "a null row": changed("input_ids", lambda ids: None),
        "an empty row": changed("input_ids", lambda ids: []),
        "a row too long": changed("input_ids", lambda ids: ids * 4),
        "a row shorter than its mask": changed("input_ids", lambda ids: ids[:3]),
        "tokens of 64 bits": changed("input_ids", lambda ids: ids, pa.list_(pa.int64())),
        "fractions for tokens": changed("input_ids", lambda ids: ids, pa.list_(pa.float64())),
        "texts for tokens": table.set_column(0, "input_ids", pa.array(["x"] * len(table))),
        "a null in the mask": changed("loss_mask", lambda mask: [None, *mask[1:]]),
        "numbers for the mask": table.set_column(
            1, "loss_mask", pa.array([[1] * length] * len(table), pa.list_(pa.int8()))
        ),
        "a longer mask": changed("loss_mask", lambda mask: mask * 2),
        "documents that are too long": changed("document_lengths", lambda lengths: [320]),
        "documents that are too short": changed("document_lengths", lambda lengths: [1]),
        "negative documents": changed("document_lengths", lambda lengths: [-5, *lengths]),
        "a null for documents": changed("document_lengths", lambda lengths: [None]),
        "no documents": changed("document_lengths", lambda lengths: []),
        "no column of tokens": table.drop_columns(["input_ids"]),
        "no column of documents": table.drop_columns(["document_lengths"]),
        "no rows": table.slice(0, 0),
        "a row less": table.slice(1),
        "a row more": pa.concat_tables([table, table.slice(0, 1)]),
        "other columns": pa.table({"a": list(range(len(table)))}),
    }
    accepted_too = {"tokens of 64 bits", "a row more"}
    for label, other in others.items():
        expect: Expect = "either" if label in accepted_too else "refused"
        yield Mutation(label, as_table(other), expect, (folder, "gives token"))
    inside = range(8, len(content) - 8, 5)
    yield from damage.flips(file, inside, 60)
    yield from damage.binaries(file)
    yield from damage.places(file)


PREPARED = {
    name: text
    for name, text in data_commands("prep6").items()
    if name not in ("prepare", "regenerate")
}
CHAT = data_commands("data3/chat.jsonl")
VOCAB_COMMANDS = {
    "generate": f"{commands('hf8')['generate']} --draft-vocab vocab2.json",
    "evaluate": f"{commands('hf8')['evaluate']} --draft-vocab vocab2.json",
    "regenerate": (
        "data regenerate --model hf8 --data data3/text.txt --prompt-length 8 --limit 1 --max-tokens"
        " 2 --output out.jsonl --draft-vocab vocab2.json"
    ),
}


def prompt_commands(file: str) -> dict[str, str]:
    return {
        "generate": f"generate --model hf8 --prompts {file} --max-tokens 2",
        "evaluate": (
            f"speedup --model hf8 --prompts {file} --max-tokens 2 --k 0 1 --batch-size 1 --repeats"
            " 1 --output out"
        ),
        "decode": (
            f"bench decode --model hf8 --prompts {file} --max-tokens 8 --k 0 --batch-size 1"
            " --repeats 1"
        ),
    }


def _data(
    name: str,
    file: str,
    mutations: Callable[[Path], Iterator[Mutation]],
    more: str = "",
    **options: Any,
) -> Kind:
    return Kind(
        name, file, ("hf8", "data3"), data_commands(file, more), mutations, MAKES, **options
    )


KINDS = (
    _data("text data", "data3/text.txt", texts, " --prompt-length 8"),
    _data(
        "jsonl data",
        "data3/rows.jsonl",
        rows("data3/rows.jsonl", TEXT_ROWS, ALL_TEXT_ROWS),
        " --prompt-length 8",
    ),
    _data("json data", "data3/rows.json", by_library("data3/rows.json"), " --prompt-length 8"),
    _data("chat data", "data3/chat.jsonl", rows("data3/chat.jsonl", CHAT_ROWS, ALL_CHAT_ROWS)),
    _data(
        "regenerated data",
        "data3/answers.jsonl",
        rows("data3/answers.jsonl", ANSWER_ROWS, ANSWER_ROWS),
        ignores=("regenerate",),
    ),
    _data("parquet data", "data3/rows.parquet", parquet, " --prompt-length 8"),
    _data("csv data", "data3/rows.csv", csv, " --prompt-length 8"),
    Kind(
        "data of no known kind",
        "data3/rows.zip",
        ("hf8", "data3"),
        data_commands("data3/rows.zip", " --prompt-length 8"),
        unknown_kind,
        MAKES,
        control=False,
    ),
    Kind(
        "prompts as text",
        "prompts1.txt",
        ("hf8", "prompts1.txt"),
        prompt_commands("prompts1.txt"),
        prompt_texts,
        MAKES,
    ),
    Kind(
        "prompts as jsonl",
        "prompts1.jsonl",
        ("hf8", "prompts1.jsonl"),
        prompt_commands("prompts1.jsonl"),
        rows("prompts1.jsonl", PROMPT_ROWS, PROMPT_ROWS, 0),
        MAKES,
    ),
    Kind(
        "prompts of token ids",
        "prompts1.jsonl",
        ("hf8", "prompts1.jsonl"),
        prompt_commands("prompts1.jsonl"),
        rows("prompts1.jsonl", PROMPT_ROWS, PROMPT_ROWS, 1),
        MAKES,
    ),
    Kind(
        "stdin",
        "stdin",
        ("hf8", "stdin"),
        {"generate": "generate --model hf8 --max-tokens 2"},
        stdin,
        MAKES,
    ),
    Kind(
        "chat template",
        "template1.jinja",
        ("hf8", "data3", "template1.jinja"),
        {
            name: f"{CHAT[name]} --chat-template template1.jinja"
            for name in ("prepare", "regenerate")
        },
        templates,
        MAKES,
        names=("template", "chat"),
    ),
    Kind(
        "draft vocabulary",
        "vocab2.json",
        (*MODEL, "data3", "vocab2.json"),
        VOCAB_COMMANDS,
        draft_vocab,
        MAKES,
    ),
    Kind(
        "journal",
        "answers1.jsonl.partial",
        ("hf8", "data3", "answers1.jsonl.partial"),
        {"regenerate": REGENERATE},
        journal,
        (*MAKES, "answers1.jsonl", "answers1.jsonl.partial"),
        relocated=True,
    ),
    Kind(
        "manifest of prepared data",
        "prep6/mtpkit_data.json",
        ("hf8", "prep6"),
        PREPARED,
        prepared_manifest,
        MAKES,
    ),
    Kind(
        "dataset_info.json",
        "prep6/dataset_info.json",
        ("hf8", "prep6"),
        PREPARED,
        by_library("prep6/dataset_info.json"),
        MAKES,
    ),
    Kind(
        "state.json",
        "prep6/state.json",
        ("hf8", "prep6"),
        PREPARED,
        by_library("prep6/state.json"),
        MAKES,
    ),
    Kind(
        "prepared sequences",
        "prep6/data-00000-of-00001.arrow",
        ("hf8", "prep6"),
        PREPARED,
        arrow,
        MAKES,
        ("inspect", "draft-vocab"),  # these read no model, and no documents
    ),
)
