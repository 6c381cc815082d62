"""Megatron's distributed checkpoints (`torch_dist`), written by several threads without a process
group."""

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mtpkit.checkpoint.layouts.huggingface import progress
from mtpkit.checkpoint.layouts.megatron import extra_states, split_slice
from mtpkit.checkpoint.layouts.parallel import THREADS, Budget, write_all
from mtpkit.checkpoint.layouts.torch_dist import COMMON_STATE
from mtpkit.checkpoint.layouts.torch_dist_index import INDEX
from mtpkit.checkpoint.tensors import TensorInfo, TensorSource

CHECKPOINT_VERSION = {"checkpoint_version": 3.0}
"""An entry that Megatron-LM looks for in a checkpoint; without it, Megatron-LM would reorder the
rows of QKV."""

FILE_BYTES = 2**30
"""Minimum bytes of tensors in a file, unless it is the only file."""
_ALIGNED = 64
"""Alignment in bytes of tensors in their archives, and of archives in files, so that values can be
mapped."""


class _File(NamedTuple):
    """A file to be written."""

    name: str
    tensors: Sequence[str]
    objects: Sequence[tuple[str, object]]


def write_megatron(
    directory: Path, source: TensorSource, common_state: Mapping[str, object]
) -> None:
    """Write a `torch_dist` checkpoint as megatron-core would at tensor parallelism 1.

    Several files are written at once; few tensors are in memory at a time, see
    `mtpkit.checkpoint.layouts.parallel`.

    Args:
        directory: an existing, empty directory.
        source: tensors under Megatron's names.

    Raises:
        UserError: weights are not finite; the written files must be discarded.
    """
    counts: dict[str, int] = {}
    for key, row in map(split_slice, source.tensors):
        # Slices of a stacked tensor are written one by one; the index needs the size of the whole.
        counts[key] = max(counts.get(key, 0), 1 + (row or 0))
    objects: list[tuple[str, object]] = [(COMMON_STATE, [dict(common_state)])]
    objects += [(name, [_empty_extra_state(name)]) for name in extra_states(counts)]
    files = _plan_files(source.tensors, objects)
    storage: dict[MetadataIndex, _StorageInfo] = {}
    with progress(
        "writing torch_dist", sum(info.nbytes for info in source.tensors.values())
    ) as bar:

        def write(file: _File, budget: Budget) -> dict[MetadataIndex, _StorageInfo]:
            with (directory / file.name).open("wb") as stream:
                return _write_file(file, stream, source, budget, bar.update)

        for places in write_all(write, files):
            storage |= places
    source.require_finite()
    entries: dict[str, BytesStorageMetadata | TensorStorageMetadata] = {
        name: BytesStorageMetadata() for name, _ in objects
    }
    for name, info in source.tensors.items():
        key = split_slice(name)[0]
        entry = entries.setdefault(key, _entry(info, counts[key] if key != name else None))
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks.append(_chunk(name, info))
    index = Metadata(entries, storage_data=storage, storage_meta=StorageMeta())
    (directory / INDEX).write_bytes(pickle.dumps(index))
    metadata = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(metadata))


def _plan_files(
    tensors: Mapping[str, TensorInfo], objects: Sequence[tuple[str, object]]
) -> list[_File]:
    """Tensors in order, divided into files of about the same size; all objects are in the first
    file."""
    total = sum(info.nbytes for info in tensors.values())
    count = max(1, min(THREADS, total // FILE_BYTES))
    parts: list[list[str]] = [[] for _ in range(count)]
    done = 0
    for name, info in tensors.items():
        parts[min(count - 1, done * count // max(1, total))].append(name)
        done += info.nbytes
    return [_File(f"__0_{at}.distcp", part, () if at else objects) for at, part in enumerate(parts)]


def _write_file(
    file: _File,
    stream: IO[bytes],
    source: TensorSource,
    budget: Budget,
    advance: Callable[[int], object],
) -> dict[MetadataIndex, _StorageInfo]:
    """Write the tensors and objects of a file; return their places in it."""
    places: dict[MetadataIndex, _StorageInfo] = {}

    def save(index: MetadataIndex, value: object) -> None:
        # torch aligns values within an archive, so an aligned archive has aligned values.
        stream.write(bytes(-stream.tell() % _ALIGNED))
        start = stream.tell()
        torch.save(value, stream)
        places[index] = _StorageInfo(file.name, start, stream.tell() - start)

    for name, value in file.objects:
        save(MetadataIndex(name), value)
    for name in file.tensors:
        info = source.tensors[name]
        with budget.hold(info.nbytes):
            save(_index(name, info), _own_memory(source.read(name), split_slice(name)[1]))
        advance(info.nbytes)
    return places


def _own_memory(tensor: Tensor, row: int | None) -> Tensor:
    """A contiguous tensor in its own storage, so that `torch.save` writes nothing else. Slices
    become [1, ...]."""
    tensor = tensor.contiguous()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()
    return tensor if row is None else tensor.unsqueeze(0)


def _index(name: str, info: TensorInfo) -> MetadataIndex:
    key, row = split_slice(name)
    return MetadataIndex(key, _chunk(name, info).offsets, row)


def _chunk(name: str, info: TensorInfo) -> ChunkStorageMetadata:
    """The place of a tensor in the stored tensor: all of it, or one slice of a stacked tensor."""
    row = split_slice(name)[1]
    sizes = info.shape
    offsets = (0,) * len(info.shape)
    if row is not None:
        sizes = (1, *sizes)
        offsets = (row, *offsets)
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _entry(info: TensorInfo, stacked: int | None) -> TensorStorageMetadata:
    size = info.shape if stacked is None else (stacked, *info.shape)
    return TensorStorageMetadata(TensorProperties(dtype=info.dtype), torch.Size(size), [])


def _empty_extra_state(name: str) -> Tensor | None:
    """The extra state that a module without fp8 saves; megatron-core's own output layer saves
    None."""
    return None if name.startswith("output_layer.") else torch.empty(0, dtype=torch.uint8)
