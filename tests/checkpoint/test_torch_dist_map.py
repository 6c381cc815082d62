"""Tensors are mapped where their bytes are what torch would read, and otherwise left to torch."""

import io
import random
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mtpkit.checkpoint.directory import find_torch_dist, open_directory
from mtpkit.checkpoint.layouts.torch_dist import MegatronReader
from mtpkit.checkpoint.layouts.torch_dist_map import MappedFiles
from mtpkit.checkpoint.tensors import bits_equal
from mtpkit.errors import UserError
from tests.checkpoint.builders import GOLDEN, write_megatron_copy

TENSOR = torch.arange(1, 13, dtype=torch.bfloat16).view(4, 3)


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def mapped(
    directory: Path, content: bytes, before: int = 0, like: torch.Tensor = TENSOR
) -> torch.Tensor | None:
    path = directory / str(len([*directory.iterdir()]))
    path.write_bytes(b"x" * before + content + b"behind")
    return MappedFiles(directory).read(path.name, before, len(content), like.shape, like.dtype)


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
CODES = (torch.uint8, torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", [*FLOATS, *CODES])
def test_every_bit_at_any_place(tmp_path, dtype):
    for shape in ((4, 3), (1, 1, 5), (), (2, 1, 4)):
        tensor = (10 * torch.randn(shape)).abs().to(dtype)
        for before in range(9):
            found = mapped(tmp_path, saved(tensor), before, tensor)
            assert (
                found is not None
                and bits_equal(found, tensor)
                and found.data_ptr() % dtype.itemsize == 0
            )


@pytest.mark.parametrize("case", ["tp1/moe", "tp2/moe", "tp2/mamba_attention_mlp"])
def test_golden_checkpoints_need_no_other_reader(case, monkeypatch):
    """Of one rank or two: tensors in several pieces, stacked experts."""
    reader = MegatronReader(find_torch_dist(GOLDEN / case))
    with monkeypatch.context() as patch:
        patch.setattr(MappedFiles, "read", lambda *_: None)
        want = {name: reader.read(name) for name in reader.tensors}
    monkeypatch.setattr(MegatronReader, "_read_by_torch", None)
    assert len(want) > 20 and all(
        bits_equal(reader.read(name), value) for name, value in want.items()
    )


def test_several_experts_in_one_piece(tmp_path, monkeypatch):
    key = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight"
    experts = torch.randn(4, 3, 5)
    dcp.state_dict_saver.save({key: experts}, checkpoint_id=tmp_path, no_dist=True)
    monkeypatch.setattr(MegatronReader, "_read_by_torch", None)
    reader = MegatronReader(tmp_path)
    assert list(reader.tensors) == [f"{key}[{row}]" for row in range(4)]
    assert all(bits_equal(reader.read(f"{key}[{row}]"), experts[row]) for row in range(4))


def repacked(content: bytes, change, deflated: str = "nothing") -> bytes:
    """The same records in an archive of Python's, changed by `change(dict)`, some of them
    compressed."""
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        records = {name: file.read(name) for name in file.namelist()}
    change(records)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, value in records.items():
            file.writestr(
                name, value, zipfile.ZIP_DEFLATED if deflated in name else zipfile.ZIP_STORED
            )
    return buffer.getvalue()


def test_other_contents_are_left_to_torch(tmp_path):
    plain = saved(TENSOR)
    assert mapped(tmp_path, repacked(plain, lambda records: None)) is not None
    with zipfile.ZipFile(io.BytesIO(plain)) as file:
        prefix = file.namelist()[0].partition("/")[0]
    contents = {
        "transposed": saved(TENSOR.t().contiguous().t()),
        "part of a storage": saved(torch.zeros(5, 3, dtype=TENSOR.dtype)[1:]),
        "first part of a storage": saved(torch.zeros(5, 3, dtype=TENSOR.dtype)[:4]),
        "expanded": saved(TENSOR[:1].expand(4, 3)),
        "other dtype": saved(TENSOR.half()),
        "other shape": saved(TENSOR.view(3, 4)),
        "list": saved([TENSOR]),
        "two tensors": saved([TENSOR, TENSOR.clone()]),
        "empty": b"",
        "noise": b"PK" * 300,
        "deflated": repacked(plain, lambda records: None, deflated=""),
        "deflated values": repacked(plain, lambda records: None, deflated="data/0"),
        "big endian": repacked(
            plain, lambda records: records.update({f"{prefix}/byteorder": b"big"})
        ),
        "short": repacked(plain, lambda records: records.update({f"{prefix}/data/0": bytes(22)})),
        "long": repacked(plain, lambda records: records.update({f"{prefix}/data/0": bytes(26)})),
        "further record": repacked(
            plain, lambda records: records.update({f"{prefix}/data/1": bytes(24)})
        ),
        "code": repacked(
            plain,
            lambda records: records.update({f"{prefix}/data.pkl": b"cos\nsystem\n(S'ls'\ntR."}),
        ),
    }
    assert [
        name for name, content in contents.items() if mapped(tmp_path, content) is not None
    ] == []
    assert mapped(tmp_path, saved(torch.empty(0)), like=torch.empty(0)) is None


def test_damaged_archives_are_refused_or_read_as_torch_reads_them(tmp_path):
    content = saved(TENSOR)
    values = content.index(TENSOR.view(torch.uint8).numpy().tobytes())
    files = MappedFiles(tmp_path)
    generator = random.Random(0)
    refused = 0
    for at in range(len(content)):
        if values <= at < values + TENSOR.nbytes:
            continue
        damaged = bytearray(content)
        damaged[at] ^= 1 << generator.randrange(8)
        (tmp_path / str(at)).write_bytes(damaged)
        found = files.read(str(at), 0, len(content), TENSOR.shape, TENSOR.dtype)
        refused += found is None
        if found is not None and not bits_equal(found, TENSOR):
            assert bits_equal(found, torch.load(io.BytesIO(damaged), weights_only=True))
    assert refused > 200
    for end in range(0, len(content), 7):
        assert mapped(tmp_path, content[:end]) is None


@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_row_without_a_piece_is_not_finite(tmp_path, monkeypatch, is_mapped):
    """Pieces that overlap may fill a tensor by their count, and leave a hole."""
    write_megatron_copy(GOLDEN / "tp1/moe", tmp_path / "megatron", lambda tensors: None)
    reader = MegatronReader(tmp_path / "megatron")
    name = next(key for key in reader.on_disk if ".experts.experts." in key)
    chunks = reader._metadata.state_dict_metadata[name].chunks
    chunks[1] = chunks[0]
    if not is_mapped:
        monkeypatch.setattr(MappedFiles, "read", lambda *_: None)
    monkeypatch.setattr("mtpkit.checkpoint.directory.MegatronReader", lambda _: reader)
    source = open_directory(tmp_path / "megatron").weights()
    first = source.read(f"{name}[0]")
    second = source.read(f"{name}[1]")
    assert first.isfinite().all() and second.isnan().all()
    with pytest.raises(UserError, match=r"\[1\]"):
        source.require_finite()
