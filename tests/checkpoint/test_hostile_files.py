"""Weights, indexes and links that are damaged, foreign or meant to harm: one line, nothing run,
nothing left."""

import io
import json
import math
import os
import pickle
import re
import shutil
import struct
from dataclasses import replace
from pathlib import Path, PosixPath

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from mtpkit.checkpoint import (
    load_checkpoint,
    load_config,
    load_model,
    save_checkpoint,
    save_hf_model,
    save_model,
)
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.directory import open_directory
from mtpkit.checkpoint.layouts.torch_dist import COMMON_STATE
from mtpkit.checkpoint.verify import compare_weights
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.errors import UserError
from mtpkit.files import check_writable
from mtpkit.model import build_model
from tests.checkpoint.builders import GOLDEN, write_megatron_copy
from tests.shared import each
from tests.toy_config import toy_config


def refused(action, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        action()
    text = str(caught.value)
    assert (
        "\n" not in text and len(text) < 700 and not [word for word in words if word not in text]
    ), text


INDEX = "model.safetensors.index.json"


@each("content", [None, [], ["a"], 3, "x", {"lm_head.weight": 3}, {"a": None}, {"a": ["b"]}, {}])
def test_weight_maps_of_every_type(hf_dir, tmp_path, content):
    (hf_dir / INDEX).write_text(json.dumps({"weight_map": content}))
    for action in (lambda: load_model(hf_dir), lambda: import_checkpoint(hf_dir, tmp_path / "out")):
        refused(action, str(hf_dir))
    (hf_dir / INDEX).write_text(json.dumps({"metadata": content}))
    refused(lambda: load_model(hf_dir), INDEX, "weight_map")


@pytest.mark.parametrize(
    "file", ["../w.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\0b", "C:\\w"]
)
def test_weight_maps_that_leave_the_directory(hf_dir, file):
    shutil.copyfile(hf_dir / "model.safetensors", hf_dir.parent / "w.safetensors")
    names = open_directory(hf_dir).weights().tensors
    (hf_dir / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
    refused(lambda: load_model(hf_dir), INDEX, "must name files of")


def test_files_that_are_none(hf_dir):
    names = open_directory(hf_dir).weights().tensors
    (hf_dir / "folder").mkdir()
    for file, says in (
        ("folder", "missing"),
        ("none.safetensors", "missing"),
        ("x" * 5000, "must name files of"),
    ):
        (hf_dir / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
        refused(lambda: load_model(hf_dir), says)


def safetensors_header(path: Path, change) -> None:
    """Write a file anew whose header, a dictionary, is what `change` makes of it; a text is taken
    as it is."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = change(json.loads(content[8 : 8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def with_entry(**changes):
    return lambda header: header | {"lm_head.weight": header["lm_head.weight"] | changes}


def twice(header: dict) -> bytes:
    entry = json.dumps({"lm_head.weight": header["lm_head.weight"] | {"shape": [32, 96]}}).encode()
    return json.dumps(header).encode()[:-1] + b"," + entry[1:]


@each(
    "change",
    [
        with_entry(shape=[2**62, 32]),
        with_entry(shape=[2**62, 4, 1]),
        with_entry(shape=[-96, 32]),
        with_entry(shape=[96.0, 32]),
        with_entry(shape="96x32"),
        with_entry(shape=None),
        with_entry(shape=[96, 31]),
        with_entry(dtype="F128"),
        lambda header: header | {"x" * 10**5: header.pop("lm_head.weight")},
        with_entry(dtype=None),
        with_entry(data_offsets=[0, 12288]),
        with_entry(data_offsets=[2**63, 2**63 + 12288]),
        with_entry(data_offsets=[12288, 0]),
        with_entry(data_offsets=[-1, 5]),
        lambda header: header | {"another": header["lm_head.weight"]},
        lambda header: header | {"another": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}},
        twice,
        lambda header: [],
        lambda header: {},
        lambda header: b"[" * 10**5,
        lambda header: b"\xff\xfe",
    ],
)
def test_headers_that_lie(hf_dir, tmp_path, change):
    directory = shutil.copytree(hf_dir, tmp_path / "model")
    safetensors_header(directory / "model.safetensors", change)
    for action in (
        lambda: load_model(directory),
        lambda: import_checkpoint(directory, tmp_path / "out"),
    ):
        refused(action, str(directory))
    assert not (tmp_path / "out").exists()


@each("length", [2**63, 2**64 - 1, 10**9, 0])
def test_lengths_of_headers_that_lie(hf_dir, length):
    content = (hf_dir / "model.safetensors").read_bytes()
    (hf_dir / "model.safetensors").write_bytes(struct.pack("<Q", length) + content[8:])
    refused(lambda: load_model(hf_dir), "model.safetensors", "damaged")


@pytest.fixture
def megatron(tmp_path) -> Path:
    return shutil.copytree(GOLDEN / "tp2/moe", tmp_path / "megatron")


def change_index(directory: Path, change) -> None:
    """Replace `.metadata` by what `change` makes of it."""
    place = directory / "checkpoint"
    index = change(FileSystemReader(place).read_metadata())
    (place / ".metadata").write_bytes(pickle.dumps(index))


def entry(changes):
    """Change the entry of the embedding: a dictionary of attributes."""

    def change(index: Metadata) -> Metadata:
        for name, value in changes.items():
            setattr(index.state_dict_metadata["embedding.word_embeddings.weight"], name, value)
        return index

    return change


def chunk(**changes):
    def change(index: Metadata) -> Metadata:
        chunks = index.state_dict_metadata["embedding.word_embeddings.weight"].chunks
        chunks[0] = replace(chunks[0], **changes)
        return index

    return change


def storage(**changes):
    def change(index: Metadata) -> Metadata:
        index.storage_data = {
            key: replace(place, **changes) for key, place in index.storage_data.items()
        }
        return index

    return change


def dropped(index: Metadata) -> Metadata:
    index.storage_data.pop(
        next(k for k in index.storage_data if k.fqn == "embedding.word_embeddings.weight")
    )
    return index


def endless(index: Metadata) -> Metadata:
    """As many experts as there are numbers, without a byte."""
    key = next(key for key in index.state_dict_metadata if ".experts.experts." in key)
    entry = index.state_dict_metadata[key]
    entry.size = torch.Size([2**62, 0, 3])
    entry.chunks = []
    return index


FOREIGN = [
    lambda index: None,
    lambda index: {"a": 1},
    lambda index: Metadata({}, storage_data=None),
    lambda index: Metadata([1], storage_data={}),
    lambda index: Metadata({"a": 3}, storage_data={}),
    lambda index: Metadata({3: next(iter(index.state_dict_metadata.values()))}, storage_data={}),
    lambda index: Metadata(index.state_dict_metadata, storage_data={MetadataIndex("a"): 3}),
    entry({"size": torch.Size([2**62, 64])}),
    entry({"size": torch.Size([-1, 64])}),
    entry({"size": torch.Size([512, 64])}),
    entry({"size": 5}),
    entry({"chunks": []}),
    entry({"chunks": None}),
    entry({"properties": None}),
    chunk(offsets=torch.Size([200, 0])),
    chunk(offsets=torch.Size([-1, 0])),
    chunk(sizes=torch.Size([2**40, 64])),
    chunk(sizes=torch.Size([64])),
    storage(relative_path="../secret"),
    storage(relative_path="/etc/passwd"),
    storage(relative_path=None),
    storage(relative_path="none.distcp"),
    storage(offset=-5),
    storage(offset=10**15),
    storage(length=10**15),
    storage(length=-1),
    storage(length="3"),
    dropped,
    endless,
]


@pytest.mark.parametrize("number", range(len(FOREIGN)))
def test_indexes_that_do_not_fit(megatron, tmp_path, number):
    change_index(megatron, FOREIGN[number])
    model = build_model(toy_config())
    for action in (
        lambda: load_model(megatron),
        lambda: export_checkpoint(megatron, tmp_path / "out"),
        lambda: compare_weights(megatron, megatron),
        lambda: load_checkpoint(megatron, {"model": model.sharded_state_dict()}),
        lambda: save_checkpoint(
            tmp_path / "run", 1, {"model": {}}, {}, model.mtpkit_config, base=megatron
        ),
    ):
        refused(action, str(megatron), ".metadata")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron"]


def test_pieces_that_overlap_leave_no_hole(tmp_path):
    """Two halves of which both say that they are rows 0 to 3: rows 4 to 7 are nowhere."""
    write_megatron_copy(GOLDEN / "tp2/moe", tmp_path / "megatron", lambda tensors: None)
    shutil.rmtree(tmp_path / "megatron")
    directory = shutil.copytree(GOLDEN / "tp2/moe", tmp_path / "megatron")

    def overlap(index: Metadata) -> Metadata:
        key = "embedding.word_embeddings.weight"
        chunks = index.state_dict_metadata[key].chunks
        assert len(chunks) == 2
        moved = replace(chunks[1], offsets=torch.Size([chunks[1].offsets[0] - 1, 0]))
        place = index.storage_data.pop(MetadataIndex(key, chunks[1].offsets))
        index.storage_data[MetadataIndex(key, moved.offsets)] = place
        chunks[1] = moved
        return index

    change_index(directory, overlap)
    refused(lambda: load_model(directory), "embedding.word_embeddings.weight")


@pytest.mark.parametrize("part", [".metadata", "__0_0.distcp", "__1_0.distcp"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_files_that_are_cut_off(megatron, tmp_path, part, share):
    path = megatron / "checkpoint" / part
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    for action in (
        lambda: load_model(megatron),
        lambda: export_checkpoint(megatron, tmp_path / "out"),
    ):
        refused(action, part)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", ["__0_0.distcp", "__1_0.distcp"])
def test_files_of_other_bytes(megatron, tmp_path, part):
    path = megatron / "checkpoint" / part
    path.write_bytes(b"x" * path.stat().st_size)
    for action in (
        lambda: load_model(megatron),
        lambda: export_checkpoint(megatron, tmp_path / "out"),
    ):
        refused(action, part)


OLD_MEGATRON = b"megatron.core.dist_checkpointing.strategies.torch\n"
OTHER_WRITERS = {
    b"pathlib\nPosixPath": b"pathlib._local\nPosixPath",
    b"torch.distributed.checkpoint.metadata\nMetadata": OLD_MEGATRON + b"MCoreMetadata",
    b"torch.distributed.checkpoint.planner\nSavePlan": OLD_MEGATRON + b"MCoreSavePlan",
}
"""Class in an index -> what Python 3.13 calls it, or megatron-core up to 0.15."""


@pytest.mark.parametrize("own", [None, *OTHER_WRITERS])
def test_indexes_of_other_versions(hf_dir, tmp_path, own):
    """They may hold all ranks' plans: megatron-core puts them there, and only newer versions of
    torch drop them."""
    import_checkpoint(hf_dir, tmp_path / "megatron")
    path = tmp_path / "megatron" / "release" / ".metadata"
    index = FileSystemReader(path.parent).read_metadata()
    plan = create_default_local_save_plan({"w": torch.ones(2), "o": io.BytesIO(b"o")}, True)
    index.all_local_plans = [plan, replace(plan, storage_data=_StoragePrefix("__1_"))]
    index.storage_meta = replace(index.storage_meta, checkpoint_id=PosixPath("/of/the/writer"))
    # names as plain text
    content = re.sub(rb"cpathlib(\._local)?\n", b"cpathlib\n", pickle.dumps(index, protocol=2))
    if own is not None:
        assert b"c" + own + b"\n" in content
        content = content.replace(b"c" + own + b"\n", b"c" + OTHER_WRITERS[own] + b"\n")
    path.write_bytes(content)
    load_model(tmp_path / "megatron")
    assert compare_weights(hf_dir, tmp_path / "megatron").identical


class Harm:
    """An object whose unpickling leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_an_index_runs_nothing(megatron, tmp_path):
    (megatron / "checkpoint" / ".metadata").write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    model = build_model(toy_config())
    for action in (
        lambda: load_model(megatron),
        lambda: load_checkpoint(megatron, {"model": model.sharded_state_dict()}),
        lambda: save_checkpoint(
            tmp_path / "run", 1, {"model": {}}, {}, model.mtpkit_config, base=megatron
        ),
    ):
        refused(action, ".metadata", "mkdir")
    assert not (tmp_path / "harm").exists()


def put_common_state(directory: Path, value: object) -> None:
    """Put another common state at the end of a file of a checkpoint."""
    index = FileSystemReader(directory).read_metadata()
    at = MetadataIndex(COMMON_STATE)
    path = directory / index.storage_data[at].relative_path
    buffer = io.BytesIO()
    torch.save(value, buffer)
    index.storage_data[at] = replace(
        index.storage_data[at], offset=path.stat().st_size, length=len(buffer.getvalue())
    )
    path.write_bytes(path.read_bytes() + buffer.getvalue())
    (directory / ".metadata").write_bytes(pickle.dumps(index))


def test_a_common_state_runs_nothing(tmp_path):
    model = build_model(toy_config())
    save_checkpoint(
        tmp_path / "run",
        3,
        {"model": model.sharded_state_dict()},
        {"iteration": 3},
        model.mtpkit_config,
    )
    assert (
        load_checkpoint(tmp_path / "run", {"model": model.sharded_state_dict()})["iteration"] == 3
    )
    put_common_state(tmp_path / "run" / "iter_0000003", [Harm(tmp_path / "harm")])
    refused(
        lambda: load_checkpoint(tmp_path / "run", {"model": model.sharded_state_dict()}),
        "iter_0000003",
    )
    (tmp_path / "run" / "mtpkit.json").unlink()
    refused(lambda: load_config(tmp_path / "run"), ".distcp")
    torch.save(Harm(tmp_path / "harm"), tmp_path / "run" / "iter_0000003" / "common.pt")
    refused(
        lambda: load_config(tmp_path / "run"),
        "common.pt",
        "something else than tensors and plain values",
    )
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("value", [[], 3, [3], None, "x", [[]]])
def test_common_states_of_every_type(tmp_path, value):
    model = build_model(toy_config())
    save_model(model, tmp_path / "run")
    (tmp_path / "run" / "mtpkit.json").unlink()
    put_common_state(tmp_path / "run" / "release", value)
    refused(lambda: load_config(tmp_path / "run"), "the common state is", ".distcp")
    torch.save(value, tmp_path / "run" / "release" / "common.pt")
    refused(lambda: load_config(tmp_path / "run"), "the common state is", "common.pt")


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_the_description_of_a_checkpoint_to_resume(tmp_path, content):
    model = build_model(toy_config())
    save_model(model, tmp_path / "run")
    (tmp_path / "run" / "release" / "metadata.json").write_text(content)
    refused(
        lambda: load_checkpoint(tmp_path / "run", {"model": model.sharded_state_dict()}), "release"
    )


@pytest.fixture(params=["loop", "loop/inside", "nowhere"])
def link(request, tmp_path) -> Path:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("gone")
    return tmp_path / request.param


def test_links_to_nowhere(hf_dir, link):
    model = load_model(hf_dir)
    for action in (
        lambda: import_checkpoint(hf_dir, link),
        lambda: import_checkpoint(hf_dir, link, force=True),
        lambda: export_checkpoint(GOLDEN / "tp1/moe", link),
        lambda: save_hf_model(model, link),
        lambda: save_model(model, link),
        lambda: check_writable(link),
        lambda: check_writable(link, file=True),
    ):
        refused(action, "is a symbolic link that leads nowhere")
    for action in (
        lambda: load_model(link),
        lambda: import_checkpoint(link, hf_dir.parent / "out"),
    ):
        refused(action, str(link), "no such model directory")
    assert sorted(path.name for path in hf_dir.parent.iterdir()) == ["hf", "loop", "nowhere"]


def test_a_link_to_a_directory_is_written_through(hf_dir, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    import_checkpoint(hf_dir, tmp_path / "link")
    import_checkpoint(hf_dir, tmp_path / "link", force=True)
    assert compare_weights(hf_dir, tmp_path / "real").identical and (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "link", "real"]


def test_a_hole_would_show():
    """The assumption of the test of overlapping pieces."""
    assert math.isnan(torch.empty(2, 2)[0, 0])


@each(
    ("file", "key", "value"),
    [
        ("tokenizer_config.json", "model_max_length", "long"),
        ("tokenizer_config.json", "model_max_length", [1]),
        ("tokenizer_config.json", "tokenizer_class", 3),
        ("tokenizer.json", "version", "x" * 10**5),
        ("tokenizer.json", "model", None),
        ("tokenizer.json", "added_tokens", {}),
    ],
)
def test_tokenizers_that_cannot_be_read(tokenizer_dir, tmp_path, file, key, value):
    shutil.copytree(tokenizer_dir, tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    refused(lambda: load_tokenizer(tmp_path / "tokenizer"), str(tmp_path / "tokenizer"))
