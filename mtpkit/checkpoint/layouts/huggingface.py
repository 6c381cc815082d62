"""Hugging Face checkpoints: safetensors shards read and written one tensor at a time."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from mtpkit.checkpoint.tensors import TensorInfo, TensorSource, is_file_name
from mtpkit.errors import UserError, listed, shown
from mtpkit.files import copy_file, is_there, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes that are read and written; integers and quantised weights are not among them."""

COMPANION_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
OWN_FILES = {"config.json", "mtpkit.json", "metadata.json", "latest_checkpointed_iteration.txt", "best.json", INDEX}


class HFReader:
    """A directory of safetensors, mapped into memory, under canonical names.

    Several threads may read from it; a copy that is pickled opens the files again in another process.

    Args:
        canonical: the name of a tensor, from its name on disk.

    Raises:
        UserError: a shard is missing, damaged or cut off, does not hold what the index says, or holds what is no float.
    """

    def __init__(self, directory: Path, canonical: Callable[[str], str] = str) -> None:
        self._arguments = directory, canonical
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, tuple[Any, str]] = {}
        odd: list[str] = []
        for path, promised in _shards(directory).items():
            try:
                shard = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is damaged or cut off ({error}); download it again") from error
            names = set(shard.keys())
            if promised is not None and names != promised:
                apart = listed(sorted(names ^ promised))
                raise UserError(f"{path} and {INDEX} disagree about: {apart}; download both again")
            for name in sorted(names):
                if canonical(name) in self.tensors:
                    raise UserError(f"{path}: {name} is stored twice, under two prefixes or in two shards")
                header = shard.get_slice(name)
                if header.get_dtype() not in DTYPES:
                    odd.append(f"{name} has dtype {header.get_dtype()}")
                    continue
                self.tensors[canonical(name)] = TensorInfo(tuple(header.get_shape()), DTYPES[header.get_dtype()])
                self._places[canonical(name)] = (shard, name)
        if odd:
            raise UserError(f"{directory}: {listed(odd)}; convert the weights to bf16 or fp32 first")

    def __reduce__(self) -> tuple[type["HFReader"], tuple[Path, Callable[[str], str]]]:
        return HFReader, self._arguments

    def read(self, name: str) -> Tensor:
        shard, stored = self._places[name]
        return shard.get_tensor(stored)


def _shards(directory: Path) -> dict[Path, set[str] | None]:
    """Shard files, each with the names that the index promises in it (None without an index)."""
    index = directory / INDEX
    if is_there(index):
        shards: dict[Path, set[str] | None] = {}
        for name, file in _weight_map(index).items():
            shards.setdefault(directory / file, set()).add(name)  # type: ignore[union-attr]
    else:
        shards = {directory / SINGLE: None}
    missing = [path.name for path in shards if not os.path.isfile(path)]
    if missing or not shards:
        raise UserError(f"{directory}: missing {listed(missing) or 'weights'}; download the checkpoint again")
    return shards


def _weight_map(index: Path) -> dict[str, str]:
    """Read an index: tensor -> name of a file in the index's directory."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise UserError(f"{index}: weight_map {shown(places)} is not an object of file names; download it again")
    odd = [f"{name}: {shown(file)}" for name, file in places.items() if not is_file_name(file)]
    if odd:
        raise UserError(f"{index}: weight_map must name files of {index.parent}, not {listed(odd)}; download it again")
    return places


def write_hf(
    directory: Path, config: Mapping[str, object], source: TensorSource, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write `config.json` and safetensors shards into an existing directory, holding one tensor at a time.

    Raises:
        UserError: weights are not finite; what was written is to be thrown away.
    """
    shards = _plan_shards(source.tensors, max_shard_bytes)
    total = sum(info.nbytes for info in source.tensors.values())
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    files = [SINGLE] if len(shards) == 1 else files
    with tqdm(total=total, unit="B", unit_scale=True, desc="writing safetensors", disable=None) as bar:
        for file, names in zip(files, shards, strict=True):
            _write_shard(directory / file, names, source, bar)
    source.require_finite()
    if len(shards) > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _plan_shards(tensors: Mapping[str, TensorInfo], max_bytes: int) -> list[list[str]]:
    """Names shard by shard, in source order; widest dtype first within a shard, which keeps every tensor aligned."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, info in tensors.items():
        if shards[-1] and size + info.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += info.nbytes
    return [sorted(names, key=lambda name: -tensors[name].dtype.itemsize) for names in shards]


def _write_shard(path: Path, names: list[str], source: TensorSource, bar: tqdm) -> None:
    """One safetensors file: 8 bytes of header length, a JSON header, the tensors' bytes without gaps."""
    dtype_names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        info = source.tensors[name]
        begin, end = end, end + info.nbytes
        header[name] = {"dtype": dtype_names[info.dtype], "shape": list(info.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            data = source.read(name).contiguous().reshape(-1).view(torch.uint8)
            assert data.numel() == source.tensors[name].nbytes, name
            file.write(memoryview(data.numpy()))
            bar.update(data.numel())


def copy_companions(source: Path, destination: Path) -> None:
    """Copy the files beside the weights: tokenizer, generation settings, chat template, remote code."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in COMPANION_SUFFIXES and path.name not in OWN_FILES:
            copy_file(path, destination / path.name)
