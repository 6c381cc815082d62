"""Megatron's distributed checkpoints (`torch_dist`), read one tensor at a time without a process
group.

Tensors have the names of `mtpkit.checkpoint.layouts.megatron`.
"""

import io
import math
import warnings
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

from mtpkit.checkpoint.kv_scales import is_kv_scale
from mtpkit.checkpoint.layouts.megatron import TRAINING_STATE, hybrid_names
from mtpkit.checkpoint.layouts.torch_dist_index import first_line, read_index
from mtpkit.checkpoint.layouts.torch_dist_map import MappedFiles
from mtpkit.checkpoint.tensors import TensorInfo
from mtpkit.errors import UserError, shown
from mtpkit.files import is_there, require_file

# torch warns when it runs without a process group, as this module does on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
# It also warns of the pickle protocol of files, but only plain values are read from them here.
warnings.filterwarnings("ignore", message="Detected pickle protocol")

Index = tuple[int, ...]
"""Place of a part in the first dimensions of a tensor; () for all of it."""
COMMON_STATE = "common_state/shard_0_1"
"""Key under which megatron-core keeps everything but tensors, as a list of one dictionary."""


class MegatronReader:
    """The model's tensors in a `torch_dist` directory, saved at any parallelism.

    Several threads may read from it. A pickled copy opens the files again in another process.

    Raises:
        UserError: the index, or a file that a read needs, is missing or damaged; or a tensor is
            stored under two names.
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
        """The tensors among `keys`, with their stored shapes and dtypes."""
        self._files = MappedFiles(directory)
        self._rows: dict[str, dict[int, list[ChunkStorageMetadata]]] = {}
        self._places: dict[str, tuple[str, Index]] = {}
        """The location of each tensor: a key on disk, and an index in the first dimensions of what
        is stored there."""
        shapes = {
            key: info.shape
            for key, info in self.on_disk.items()
            if not key.startswith(TRAINING_STATE)
        }
        for name, key, index in hybrid_names(shapes):
            # Megatron-LM has renamed tensors: a checkpoint with both names may hold two versions
            # of one.
            if name in self._places:
                raise UserError(
                    f"{directory}: {key} and {self._places[name][0]} are two names of one tensor;"
                    " leave one out"
                )
            self._places[name] = key, index
        self.tensors: dict[str, TensorInfo] = {
            name: self.on_disk[key]._replace(shape=self.on_disk[key].shape[len(index) :])
            for name, (key, index) in self._places.items()
        }
        self.kv_scales = {
            name: self.tensors.pop(name) for name in self._places if is_kv_scale(name)
        }
        """Scales of keys and values in a cache in fp8."""

    def __reduce__(self) -> tuple[type["MegatronReader"], tuple[Path]]:
        return MegatronReader, (self._directory,)

    def read(self, name: str) -> Tensor:
        key, index = self._places[name]
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata), key
        if index:
            entry = replace(entry, chunks=self._chunks_at(key, entry, index))
        mapped = self._read_mapped(key, entry, index)
        return self._read_by_torch(key, entry, index) if mapped is None else mapped

    def _chunks_at(
        self, key: str, entry: TensorStorageMetadata, index: Index
    ) -> list[ChunkStorageMetadata]:
        """The pieces of a part of a tensor. All pieces are grouped by row once, not searched for
        each part."""
        if key not in self._rows:
            rows: dict[int, list[ChunkStorageMetadata]] = {}
            for chunk in (chunk for chunk in entry.chunks if math.prod(chunk.sizes)):
                for row in range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]):
                    rows.setdefault(row, []).append(chunk)
            self._rows[key] = rows
        return [chunk for chunk in self._rows[key].get(index[0], []) if _holds(chunk, index)]

    def _read_mapped(self, key: str, entry: TensorStorageMetadata, index: Index) -> Tensor | None:
        """A tensor, or a part of it, from mapped files: a view if one piece holds it all. None:
        torch must read it."""
        assert self._metadata.storage_data is not None
        shape = entry.size[len(index) :]
        target = None
        for chunk in entry.chunks:
            place = self._metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            bytes_of_file = place.relative_path, place.offset, place.length
            piece = self._files.read(*bytes_of_file, chunk.sizes, entry.properties.dtype)
            if piece is None or place.transform_descriptors:
                return None
            piece = piece[
                tuple(at - start for at, start in zip(index, chunk.offsets, strict=False))
            ]
            if len(entry.chunks) == 1 and piece.shape == shape:
                return piece
            if target is None:
                # NaN shows holes beside overlapping pieces; codes of 4 bits have no NaN
                hole = math.nan if piece.dtype.is_floating_point else 0
                target = torch.full(shape, hole, dtype=piece.dtype)
            offsets = chunk.offsets[len(index) :]
            target[
                tuple(slice(at, at + size) for at, size in zip(offsets, piece.shape, strict=True))
            ] = piece
        return target

    def _read_by_torch(self, key: str, entry: TensorStorageMetadata, index: Index) -> Tensor:
        rest = entry.size[len(index) :]
        offsets = [*index, *(0 for _ in rest)]
        sizes = [*(1 for _ in index), *rest]
        target = torch.empty(sizes, dtype=entry.properties.dtype)
        target.fill_(math.nan if target.is_floating_point() else 0)  # as above
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(key, entry, [chunk])
        try:
            self._reader.read_data(LoadPlan(items), _Target(target)).wait()
        # torch reports damage as RuntimeError, EOFError, UnpicklingError, ...
        except Exception as error:
            assert self._metadata.storage_data is not None
            files = sorted(
                {self._metadata.storage_data[item.storage_index].relative_path for item in items}
            )
            where = ", ".join(str(self._directory / file) for file in files)
            raise UserError(
                f"{where} is missing, damaged or cut off ({first_line(error)})"
            ) from error
        return target.view(rest)

    def read_common_state(self) -> dict[str, object]:
        """The entries of the checkpoint besides tensors, such as Megatron-LM's `args`; empty if
        there are none.

        Raises:
            UserError: the common state cannot be read, or is not a dictionary with values of kinds
                that megatron-core saves.
        """
        from megatron.core.safe_globals import register_safe_globals

        register_safe_globals()
        # the file of older checkpoints
        path = self._directory / "common.pt"
        start = 0
        length = -1
        if not is_there(path):
            assert self._metadata.storage_data is not None
            place = self._metadata.storage_data.get(MetadataIndex(COMMON_STATE))
            if place is None:
                return {}
            path = self._directory / place.relative_path
            start = place.offset
            length = place.length
        try:
            with require_file(path).open("rb") as file:
                file.seek(start)
                state = torch.load(
                    io.BytesIO(file.read(length)), map_location="cpu", weights_only=True
                )
        # torch reports damage as RuntimeError, EOFError, UnpicklingError, ...
        except Exception as error:
            raise UserError(
                f"{path} is missing, damaged or cut off ({first_line(error)})"
            ) from error
        # common.pt has no list around it
        state = state[0] if isinstance(state, list) and state else state
        if not isinstance(state, dict):
            raise UserError(f"{path}: the common state is {shown(state)}, not a dictionary")
        return state


def _holds(chunk: ChunkStorageMetadata, index: Index) -> bool:
    """Whether a piece of a tensor holds some of the part at an index."""
    places = zip(index, chunk.offsets, chunk.sizes, strict=False)
    return all(start <= at < start + size for at, start, size in places)


class _Target(DefaultLoadPlanner):
    """Copies what the reader finds into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        view = self._target
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            view = view.narrow(dim, start, length)
        return view
