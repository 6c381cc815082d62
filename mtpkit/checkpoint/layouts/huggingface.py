"""Hugging Face checkpoints: safetensors shards read and written one tensor at a time."""

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from mtpkit.checkpoint.kv_scales import is_kv_scale
from mtpkit.checkpoint.layouts.mapped import Mappings
from mtpkit.checkpoint.layouts.parallel import Budget, write_all
from mtpkit.checkpoint.tensors import TensorInfo, Tensors, TensorSource, is_file_name
from mtpkit.config import MAX_SHARD_BYTES
from mtpkit.errors import UserError, listed, shown
from mtpkit.files import copy_file, is_there, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes that are read and written."""

COMPANION_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
OWN_FILES = {
    "config.json",
    "mtpkit.json",
    "mtpkit_original.json",
    "metadata.json",
    "latest_checkpointed_iteration.txt",
    "best.json",
    INDEX,
}


class HFReader:
    """A directory of safetensors, mapped into memory, under canonical names.

    Several threads may read from it. A pickled copy opens the files again in another process.

    Args:
        canonical: maps the name of a tensor on disk to its canonical name.
        carried: prefixes of names on disk; these tensors are in `carried` and not in `tensors`.
        single: name of the only file if there is no index.

    Raises:
        UserError: shards are missing, damaged or cut off, do not hold what the index says, or hold
            a tensor twice or in a format for which torch has no dtype. The message lists all
            problems.
    """

    def __init__(
        self,
        directory: Path,
        canonical: Callable[[str], str] = str,
        carried: tuple[str, ...] = (),
        single: str = SINGLE,
    ) -> None:
        self._arguments = directory, canonical, carried, single
        self._maps = Mappings(directory)
        self.tensors: dict[str, TensorInfo] = {}
        self.kv_scales: dict[str, TensorInfo] = {}
        """Scales of keys and values in a cache in fp8."""
        self._carried: dict[str, TensorInfo] = {}
        self.places: dict[str, Place] = {}
        """File and first byte of each tensor, by its name in `tensors`, `kv_scales` or
        `carried`."""
        problems: list[str] = []
        disagreeing: dict[str, set[str]] = {}
        twice: list[str] = []
        for path, promised in _shards(directory, single, problems).items():
            header = _read_header(path, problems)
            if header is None:
                continue
            # A loader that trusts the index would miss tensors, or take those of an older download.
            if promised is not None and header.keys() != promised:
                disagreeing[path.name] = header.keys() ^ promised
            for stored, place in sorted(header.items()):
                self._add(path, stored, place, problems, twice)
        if disagreeing:
            names = listed(sorted(set().union(*disagreeing.values())), width=120)
            problems.append(f"{listed(disagreeing, width=60)} and {INDEX} disagree about {names}")
        if twice:
            problems.append(
                f"stored twice, under two prefixes or in two shards: {listed(twice, width=120)}"
            )
        if problems:
            raise UserError(
                f"{directory}: {listed(problems, width=300, separator='; ')}; download the files"
                " again"
            )

    def _add(
        self, path: Path, stored: str, place: "_Entry", problems: list[str], twice: list[str]
    ) -> None:
        _, canonical, carried, _ = self._arguments
        apart = stored.startswith(carried)
        name = stored if apart else canonical(stored)
        if place.dtype not in DTYPES:
            problems.append(f"{stored} has dtype {place.dtype}, which torch lacks")
        elif name in self.places:
            twice.append(stored)
        else:
            kind = self.kv_scales if is_kv_scale(name) else self.tensors
            if apart:
                kind = self._carried
            kind[name] = TensorInfo(place.shape, DTYPES[place.dtype])
            self.places[name] = Place(path.name, stored, place.start)

    @property
    def carried(self) -> "CarriedTensors":
        """The tensors outside the text model."""
        return CarriedTensors(self, self._carried)

    @property
    def directory(self) -> Path:
        """The directory of the files."""
        return self._arguments[0]

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of a tensor of any kind."""
        return self.tensors.get(name) or self.kv_scales.get(name) or self._carried[name]

    def __reduce__(
        self,
    ) -> tuple[type["HFReader"], tuple[Path, Callable[[str], str], tuple[str, ...], str]]:
        return HFReader, self._arguments

    def read(self, name: str) -> Tensor:
        info = self.info(name)
        place = self.places[name]
        return self._maps.tensor(place.file, place.start, info.shape, info.dtype)

    def give_back(self) -> None:
        """Release the memory of tensors that were read. They stay valid and are read again when
        they are used."""
        self._maps.give_back()


class Place(NamedTuple):
    """The location of a tensor."""

    file: str
    stored: str
    """Its name on disk."""
    start: int
    """First byte of its values in the file."""


class CarriedTensors:
    """Some tensors of a reader, under their names on disk and with values of any kind."""

    def __init__(self, reader: HFReader, tensors: dict[str, TensorInfo]) -> None:
        self._reader = reader
        self.tensors = tensors

    def read(self, name: str) -> Tensor:
        return self._reader.read(name)

    def require_finite(self) -> None:
        """Do nothing: tensors outside the text model may hold any values."""


class _Entry(NamedTuple):
    """An entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    start: int


def _read_header(path: Path, problems: list[str]) -> dict[str, _Entry] | None:
    """Name -> entry of a safetensors file; None if it is damaged, which is added to the
    problems."""
    try:
        # checks the header, and that the file has all its bytes
        with safe_open(path, framework="pt") as shard:
            names = set(shard.keys())
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        return {
            name: _Entry(
                header[name]["dtype"],
                tuple(header[name]["shape"]),
                8 + length + header[name]["data_offsets"][0],
            )
            for name in names
        }
    except (SafetensorError, OSError, ValueError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        problems.append(f"{path.name} is damaged or cut off ({reason})")
        return None


def _shards(directory: Path, single: str, problems: list[str]) -> dict[Path, set[str] | None]:
    """Shard files, each with the names that the index promises in it (None without an index)."""
    index = directory / INDEX
    if single == SINGLE and is_there(index):
        shards: dict[Path, set[str] | None] = {}
        for name, file in _weight_map(index).items():
            shards.setdefault(directory / file, set()).add(name)  # type: ignore[union-attr]
    else:
        shards = {directory / single: None}
    missing = [path for path in shards if not os.path.isfile(path)]
    if missing or not shards:
        problems.append(f"missing {listed([path.name for path in missing]) or 'weights'}")
    return {path: names for path, names in shards.items() if path not in missing}


def _weight_map(index: Path) -> dict[str, str]:
    """Read an index: tensor -> name of a file in the index's directory."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise UserError(
            f"{index}: weight_map {shown(places)} is not an object of file names; download it again"
        )
    odd = [f"{name}: {shown(file)}" for name, file in places.items() if not is_file_name(file)]
    if odd:
        raise UserError(
            f"{index}: weight_map must name files of {index.parent}, not {listed(odd)}; download it"
            " again"
        )
    return places


def stored_names(directory: Path) -> set[str]:
    """Names on disk of all tensors of a directory; empty if they cannot be read: opening the
    weights reports why."""
    with contextlib.suppress(UserError):
        found = [
            _read_header(path, []) if names is None else names
            for path, names in _shards(directory, SINGLE, []).items()
        ]
        return {name for names in found for name in names or ()}
    return set()


def read_total_metadata(directory: Path) -> dict[str, object]:
    """The `metadata` of a directory's index; empty without an index."""
    found = read_json(directory / INDEX).get("metadata") if is_there(directory / INDEX) else None
    return found if isinstance(found, dict) else {}


def progress(what: str, nbytes: int) -> tqdm:
    """A progress bar that counts bytes and shows bytes per second."""
    return tqdm(total=nbytes, unit="B", unit_scale=True, desc=what, disable=None)


def write_hf(
    directory: Path,
    config: Mapping[str, object],
    source: TensorSource,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `config.json` and safetensors shards, several at once, into an existing directory.

    Few tensors are in memory at a time, see `mtpkit.checkpoint.layouts.parallel`.

    Raises:
        UserError: weights are not finite; the written files must be discarded.
    """
    # Planned before writing, since each file's name has the number of files in it.
    shards = _plan_shards(source.tensors, max_shard_bytes)
    # The index counts the bytes of all tensors, as transformers does.
    total = sum(info.nbytes for info in source.tensors.values())
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    files = [SINGLE] if len(shards) == 1 else files
    with progress("writing safetensors", total) as bar:

        def write(job: tuple[str, list[str]], budget: Budget) -> None:
            write_shard(directory / job[0], job[1], source, bar, budget)

        write_all(write, list(zip(files, shards, strict=True)))
    source.require_finite()
    if len(shards) > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _plan_shards(tensors: Mapping[str, TensorInfo], max_bytes: int) -> list[list[str]]:
    """Names shard by shard, in source order; widest dtype first within a shard, which keeps every
    tensor aligned."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, info in tensors.items():
        if shards[-1] and size + info.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += info.nbytes
    return [sorted(names, key=lambda name: -tensors[name].dtype.itemsize) for names in shards]


def write_shard(
    path: Path, names: list[str], source: Tensors, bar: tqdm, budget: Budget | None = None
) -> None:
    """Write one safetensors file: 8 bytes of header length, a JSON header, the tensors' bytes
    without gaps."""
    budget = budget or Budget()
    dtype_names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        info = source.tensors[name]
        begin = end
        end = end + info.nbytes
        header[name] = {
            "dtype": dtype_names[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    # Values begin at a multiple of 8, so that every dtype can be mapped without a copy.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            nbytes = source.tensors[name].nbytes
            with budget.hold(nbytes):
                _write_tensor(file, source.read(name), nbytes)
            bar.update(nbytes)


def _write_tensor(file: IO[bytes], tensor: Tensor, nbytes: int) -> None:
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    assert data.numel() == nbytes
    file.write(memoryview(data.numpy()))


def copy_companions(source: Path, destination: Path) -> None:
    """Copy the files beside the weights: tokenizer, generation settings, chat template, remote
    code."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in COMPANION_SUFFIXES and path.name not in OWN_FILES:
            copy_file(path, destination / path.name)
