"""Megatron's distributed checkpoints (`torch_dist`), read one tensor at a time without a process group.

Tensors have the names of `mtpkit.checkpoint.layouts.megatron`.
"""

import io
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mtpkit.checkpoint.layouts.megatron import TRAINING_STATE, hybrid_name, is_stacked, split_slice
from mtpkit.checkpoint.layouts.torch_dist_index import first_line, read_index
from mtpkit.checkpoint.layouts.torch_dist_map import MappedFiles
from mtpkit.checkpoint.tensors import FLOATS, TensorInfo
from mtpkit.errors import UserError, shown
from mtpkit.files import is_there, require_file

# torch warns when it runs without a process group, as this module does on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
# It also warns of the pickle protocol of files, from which only plain values are taken here.
warnings.filterwarnings("ignore", message="Detected pickle protocol")

COMMON_STATE = "common_state/shard_0_1"
"""Key under which megatron-core keeps everything but tensors, as a list of one dictionary."""


class MegatronReader:
    """The model's tensors in a `torch_dist` directory, saved at any parallelism.

    Several threads may read from it; a copy that is pickled opens the files again in another process.

    Raises:
        UserError: the index, or a file that a read needs, is missing or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._reader = dcp.FileSystemReader(directory)
        self._metadata = read_index(directory)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self.keys = self._metadata.state_dict_metadata.keys()
        """Names of tensors and objects as stored, training state included."""
        self.on_disk = {
            key: TensorInfo(tuple(entry.size), entry.properties.dtype)
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        """The tensors among them."""
        self._files = MappedFiles(directory)
        self._rows: dict[str, dict[int, list[ChunkStorageMetadata]]] = {}
        self._stored = {hybrid_name(key): key for key in self.on_disk if not key.startswith(TRAINING_STATE)}
        self.tensors: dict[str, TensorInfo] = dict(self._list())

    def __reduce__(self) -> tuple[type["MegatronReader"], tuple[Path]]:
        return MegatronReader, (self._directory,)

    def _list(self) -> Iterator[tuple[str, TensorInfo]]:
        for name, key in self._stored.items():
            info = self.on_disk[key]
            if is_stacked(key):
                yield from ((f"{name}[{e}]", TensorInfo(info.shape[1:], info.dtype)) for e in range(info.shape[0]))
            else:
                yield name, info

    def read(self, name: str) -> Tensor:
        whole, row = split_slice(name)
        key = self._stored[whole]
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata), key
        if row is not None:
            entry = replace(entry, chunks=self._chunks_by_row(key, entry).get(row, []))
        mapped = self._read_mapped(key, entry, row)
        return self._read_by_torch(key, entry, row) if mapped is None else mapped

    def _chunks_by_row(self, key: str, entry: TensorStorageMetadata) -> dict[int, list[ChunkStorageMetadata]]:
        """The pieces of each expert's slice, so that not all are searched for each."""
        if key not in self._rows:
            rows: dict[int, list[ChunkStorageMetadata]] = {}
            for chunk in (chunk for chunk in entry.chunks if math.prod(chunk.sizes)):
                for row in range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]):
                    rows.setdefault(row, []).append(chunk)
            self._rows[key] = rows
        return self._rows[key]

    def _read_mapped(self, key: str, entry: TensorStorageMetadata, row: int | None) -> Tensor | None:
        """A tensor or a row of it from mapped files: a view, if one piece holds it. None: torch must read it."""
        assert self._metadata.storage_data is not None
        shape, target = entry.size[row is not None :], None
        for chunk in entry.chunks:
            place = self._metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            bytes_of_file = place.relative_path, place.offset, place.length
            piece = self._files.read(*bytes_of_file, chunk.sizes, entry.properties.dtype)
            if piece is None or place.transform_descriptors:
                return None
            offsets = chunk.offsets[row is not None :]
            piece = piece if row is None else piece[row - chunk.offsets[0]]
            if len(entry.chunks) == 1 and piece.shape == shape:
                return piece
            if target is None:
                target = torch.full(shape, math.nan, dtype=piece.dtype)  # shows where pieces that overlap leave a hole
            target[tuple(slice(at, at + size) for at, size in zip(offsets, piece.shape, strict=True))] = piece
        return target

    def _read_by_torch(self, key: str, entry: TensorStorageMetadata, row: int | None) -> Tensor:
        offsets, sizes = [0] * len(entry.size), list(entry.size)
        if row is not None:
            offsets[0], sizes[0] = row, 1
        target = torch.empty(sizes, dtype=entry.properties.dtype)
        if target.dtype in FLOATS:
            target.fill_(math.nan)  # as above
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(key, entry, [chunk])
        try:
            self._reader.read_data(LoadPlan(items), _Target(target)).wait()
        except Exception as error:  # torch reports damage as RuntimeError, EOFError, UnpicklingError, ...
            assert self._metadata.storage_data is not None
            files = sorted({self._metadata.storage_data[item.storage_index].relative_path for item in items})
            where = ", ".join(str(self._directory / file) for file in files)
            raise UserError(f"{where} is missing, damaged or cut off ({first_line(error)})") from error
        return target if row is None else target[0]

    def read_common_state(self) -> dict[str, object]:
        """The entries of the checkpoint besides tensors, such as Megatron-LM's `args`; empty if there are none.

        Raises:
            UserError: it cannot be read, or is not a dictionary of what megatron-core saves there.
        """
        from megatron.core.safe_globals import register_safe_globals

        register_safe_globals()
        path, start, length = self._directory / "common.pt", 0, -1  # the file of older checkpoints
        if not is_there(path):
            assert self._metadata.storage_data is not None
            place = self._metadata.storage_data.get(MetadataIndex(COMMON_STATE))
            if place is None:
                return {}
            path, start, length = self._directory / place.relative_path, place.offset, place.length
        try:
            with require_file(path).open("rb") as file:
                file.seek(start)
                state = torch.load(io.BytesIO(file.read(length)), map_location="cpu", weights_only=True)
        except Exception as error:  # torch reports damage as RuntimeError, EOFError, UnpicklingError, ...
            raise UserError(f"{path} is missing, damaged or cut off ({first_line(error)})") from error
        state = state[0] if isinstance(state, list) and state else state  # common.pt has no list around it
        if not isinstance(state, dict):
            raise UserError(f"{path}: the common state is {shown(state)}, not a dictionary")
        return state


class _Target(DefaultLoadPlanner):
    """Copies what the reader finds into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        view = self._target
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view
