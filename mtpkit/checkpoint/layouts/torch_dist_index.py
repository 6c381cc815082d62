"""The index of a `torch_dist` checkpoint (`.metadata`), read without running what is pickled in it,
and checked."""

import math
import os
import pickle
from collections.abc import Iterator
from pathlib import Path, PosixPath

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from mtpkit.checkpoint.layouts.megatron import TRAINING_STATE, is_of_all_layers, is_stacked
from mtpkit.checkpoint.tensors import is_file_name
from mtpkit.config.sections import MOST_EXPERTS
from mtpkit.errors import UserError, listed, shown
from mtpkit.files import require_file

INDEX = ".metadata"

_TORCH = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_NAMES = {
    f"{_TORCH}.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_TORCH}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    f"{_TORCH}.planner": {
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
        "BytesIOWriteData",
    },
    "torch": {
        "Size",
        *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    },
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}
"""Module -> the names that an index may use from it: classes that only hold values."""
_OTHER_NAMES: dict[tuple[str, str], type] = {
    ("pathlib._local", "PosixPath"): PosixPath,
    (_MEGATRON, "MCoreMetadata"): Metadata,
    (_MEGATRON, "MCoreSavePlan"): SavePlan,
}
"""Further names: those of Python 3.13, and those of megatron-core up to 0.15, whose classes had one
more field."""


class _Unpickler(pickle.Unpickler):
    """Unpickles only the classes that an index consists of."""

    def find_class(self, module: str, name: str) -> object:
        if other := _OTHER_NAMES.get((module, name)):
            return other
        if name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(
                f"it names {shown(f'{module}.{name}')}, which no index of a checkpoint does"
            )
        return super().find_class(module, name)


def read_index(directory: Path) -> Metadata:
    """Read the index of a checkpoint: its tensors, and their places in its files.

    Raises:
        UserError: the index is missing, damaged or foreign, or does not fit the files.
    """
    path = directory / INDEX
    try:
        with require_file(path).open("rb") as file:
            index = _Unpickler(file).load()
    except Exception as error:  # unpickling damaged bytes can raise anything
        raise UserError(f"{path} is missing or damaged ({first_line(error)})") from error
    try:
        odd = list(_misfits(directory, index))
    except Exception as error:  # the values of a damaged index can be anything
        raise UserError(f"{path} is damaged ({first_line(error)})") from error
    if odd:
        raise UserError(f"{path} does not fit its files: {listed(odd)}; copy the checkpoint again")
    return index


def first_line(error: BaseException) -> str:
    """The first line of an exception's message."""
    # torch advises running its code
    if isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error):
        return "it holds something else than tensors and plain values"
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _misfits(directory: Path, index: object) -> Iterator[str]:
    """Yield one clause for each file that is missing or too short, and for each incomplete
    tensor."""
    if not isinstance(index, Metadata):
        yield "it is no index of a checkpoint"
        return
    storage: dict[MetadataIndex, _StorageInfo] = index.storage_data
    sizes: dict[str, int] = {}
    short = set()
    for place in storage.values():
        name = place.relative_path
        if not is_file_name(name):
            yield f"{shown(name)} is not a file of the directory"
            return
        if name not in sizes:
            sizes[name] = (
                os.path.getsize(directory / name) if os.path.isfile(directory / name) else -1
            )
        if not 0 <= place.offset <= place.offset + place.length <= sizes[name]:
            short.add(name)
    yield from (f"{name} is missing, damaged or cut off" for name in sorted(short))
    for key, entry in index.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            continue
        if not isinstance(key, str) or not isinstance(entry, TensorStorageMetadata):
            yield f"{shown(key)} is no tensor"
        elif not key.startswith(TRAINING_STATE) and not _is_whole(key, entry, storage):
            yield f"{key} {list(entry.size)} is not all there"


def _is_whole(
    key: str, entry: TensorStorageMetadata, storage: dict[MetadataIndex, _StorageInfo]
) -> bool:
    """Whether the pieces of a tensor lie within it, fill it, and have all their bytes in a file."""
    size = tuple(entry.size)
    stacked = is_of_all_layers(key) + is_stacked(key)
    # An absurd number of slices would be turned into as many names before anything is read.
    if stacked and not (len(size) > stacked and math.prod(size[:stacked]) <= MOST_EXPERTS):
        return False
    filled = 0
    for chunk in entry.chunks:
        offsets = tuple(chunk.offsets)
        sizes = tuple(chunk.sizes)
        if len(offsets) != len(size) or len(sizes) != len(size):
            return False
        if not all(
            0 <= start <= start + count <= end
            for start, count, end in zip(offsets, sizes, size, strict=True)
        ):
            return False
        place = storage.get(MetadataIndex(key, chunk.offsets))
        nbytes = math.prod(sizes) * entry.properties.dtype.itemsize
        if place is None or (not place.transform_descriptors and place.length < nbytes):
            return False
        # Overlaps can hide a hole from this sum; readers fill holes with NaN, which is refused.
        filled += math.prod(sizes)
    return filled == math.prod(size)
