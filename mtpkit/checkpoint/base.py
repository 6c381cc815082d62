"""The frozen base in the checkpoints of a run.

The base's tensors are copied once from its model directory, in their dtypes there and one at a time, into files of
their own beside those that the ranks save: `base_0.distcp`, ... Later checkpoints of the run hold hard links to these
files: every checkpoint is complete, and the base is on the disk once. The base need not be in memory.
"""

import dataclasses
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from mtpkit.checkpoint.directory import open_weights
from mtpkit.checkpoint.layouts.megatron import split_slice
from mtpkit.checkpoint.layouts.torch_dist import COMMON_STATE, write_megatron
from mtpkit.checkpoint.layouts.torch_dist_index import INDEX, read_index
from mtpkit.checkpoint.tensors import TensorSource

PREFIX = "base_"
"""Prefix of the files that hold the base alone."""


def add_base(directory: Path, source: Path, previous: Path | None = None) -> None:
    """Add the tensors of the base that a `torch_dist` checkpoint lacks, in the dtypes in which the base is stored.

    Args:
        directory: the checkpoint, which all ranks have saved.
        source: model directory of the base, in either layout; its heads are not taken.
        previous: an earlier checkpoint of the same run; its files of the base, if it has any, are linked.

    Raises:
        UserError: the base cannot be read.
    """
    own = read_index(directory)
    base = _link(directory, previous) or _stream(directory, source, own)
    own.state_dict_metadata |= base.state_dict_metadata
    own.storage_data = {**own.storage_data, **base.storage_data}
    with (directory / INDEX).open("wb") as file:
        pickle.dump(own, file)


class _Lacking:
    """The tensors of a base that a checkpoint does not have, heads left out."""

    def __init__(self, base: TensorSource, have: set[str]) -> None:
        self._base = base
        self.tensors = {
            name: info
            for name, info in base.tensors.items()
            if split_slice(name)[0] not in have and not name.startswith("mtp.")
        }

    def read(self, name: str) -> Tensor:
        return self._base.read(name)

    def require_finite(self) -> None:
        self._base.require_finite()


def _stream(directory: Path, source: Path, own: Metadata) -> Metadata:
    """Write the base's files; the metadata of what is in them."""
    lacking = _Lacking(open_weights(source), set(own.state_dict_metadata))
    if not lacking.tensors:
        return Metadata({}, storage_data={})
    staging = directory / ".base"
    staging.mkdir()
    write_megatron(staging, lacking, {})
    names = {path.name: f"{PREFIX}{number}.distcp" for number, path in enumerate(sorted(staging.glob("*.distcp")))}
    written = read_index(staging)
    for old, new in names.items():
        (staging / old).rename(directory / new)
    shutil.rmtree(staging)
    storage = {
        index: dataclasses.replace(place, relative_path=names[place.relative_path])
        for index, place in written.storage_data.items()
        if index.fqn != COMMON_STATE
    }
    return _part(written, storage)


def _link(directory: Path, previous: Path | None) -> Metadata | None:
    """Take over the base's files of an earlier checkpoint; None if it has none."""
    files = sorted(previous.glob(f"{PREFIX}*.distcp")) if previous is not None else []
    if not files:
        return None
    assert previous is not None
    for file in files:
        try:
            os.link(file, directory / file.name)
        except OSError:  # a file system without hard links
            shutil.copyfile(file, directory / file.name)
    before = read_index(previous)
    places = before.storage_data.items()
    return _part(before, {index: place for index, place in places if place.relative_path.startswith(PREFIX)})


def _part(metadata: Metadata, storage: Mapping[MetadataIndex, object]) -> Metadata:
    """The part of an index that describes what is stored in these places."""
    names = {index.fqn for index in storage}
    entries = {name: entry for name, entry in metadata.state_dict_metadata.items() if name in names}
    return Metadata(entries, storage_data=storage)
