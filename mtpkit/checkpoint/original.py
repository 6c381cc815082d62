"""Data that a Megatron directory keeps from its Hugging Face original, besides weights and config.

`carried.safetensors` holds the tensors outside the text model, under their names on disk.
`mtpkit_original.json` records how the other tensors were stored where there is a choice. It also
holds the original of each tensor that changes by rounding on its way to Megatron's layout and back,
such as a norm that is stored there minus 1, and unusual shapes of the scales of quantised matrices.
Each file exists only if there is something to keep.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from mtpkit.checkpoint.families.table import Stored, Table
from mtpkit.checkpoint.layouts.huggingface import CarriedTensors, HFReader, write_shard
from mtpkit.checkpoint.tensors import FLOATS
from mtpkit.errors import UserError, shown
from mtpkit.files import is_there, read_json, staged_file

CARRIED = "carried.safetensors"
ORIGINAL = "mtpkit_original.json"

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}


def keep_original(
    reader: HFReader,
    table: Table,
    stored: Stored,
    scale_shapes: Mapping[str, str],
    directory: Path,
) -> None:
    """Write the two files about a Hugging Face checkpoint into a Megatron directory that has
    neither.

    Args:
        stored: how the checkpoint stores its tensors.
        scale_shapes: see `mtpkit.checkpoint.parts.scale_shapes_of`.
    """
    rounded = table.rounded_in(reader)

    # Most checkpoints have one way to store everything: then there is no file to carry along.
    if stored.ways or stored.lacking or rounded or scale_shapes:
        values: dict[str, object] = {
            "ways": dict(stored.ways),
            "lacking": list(stored.lacking),
            "rounded": {name: _as_json(tensor) for name, tensor in rounded.items()},
        }
        if scale_shapes:
            values["scale_shapes"] = dict(scale_shapes)
        (directory / ORIGINAL).write_text(json.dumps(values, indent=2) + "\n")

    carried = reader.carried
    if not carried.tensors:
        return
    total = sum(info.nbytes for info in carried.tensors.values())
    bar = tqdm(total=total, unit="B", unit_scale=True, desc=f"writing {CARRIED}", disable=None)
    with bar, staged_file(directory / CARRIED) as staging:
        write_shard(staging, list(carried.tensors), carried, bar)


def link_original(source: Path, directory: Path) -> None:
    """Add the two files of one Megatron directory to another, as hard links if the file system
    supports them."""
    for name in (ORIGINAL, CARRIED):
        if not (source / name).exists() or (directory / name).exists():
            continue
        with staged_file(directory / name) as staging:
            # Carried tensors, such as those of a vision tower, can be gigabytes.
            try:
                os.link(source / name, staging)
            except OSError:
                shutil.copyfile(source / name, staging)


def _as_json(tensor: Tensor) -> dict[str, object]:
    """The dtype and values of a flat tensor. Decimal numbers hold the values exactly."""
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "values": tensor.double().tolist()}


def read_stored(places: Iterable[Path]) -> Stored:
    """Read how the original stored its tensors; the family's default if there is no record. See
    `Table.check`.

    Args:
        places: directories to look in, nearest first.

    Raises:
        UserError: the record is damaged.
    """
    path = next((place / ORIGINAL for place in places if is_there(place / ORIGINAL)), None)
    if path is None:
        return Stored()

    values = read_json(path)
    ways = values.get("ways", {})
    lacking = values.get("lacking", [])
    rounded = values.get("rounded", {})
    shapes = values.get("scale_shapes", {})
    valid = isinstance(lacking, list) and all(
        isinstance(found, dict) for found in (ways, rounded, shapes)
    )
    if not valid or not all(
        isinstance(text, str) for text in (*ways.values(), *lacking, *shapes.values())
    ):
        raise UserError(f"{path} holds {shown(values)}; import the checkpoint again")

    tensors = {name: _from_json(value, path) for name, value in rounded.items()}
    return Stored(ways, tuple(lacking), tensors, shapes)


def _from_json(found: object, where: Path) -> Tensor:
    """The flat tensor that `_as_json` wrote."""
    keys = found if isinstance(found, dict) else {}
    values = keys.get("values")
    dtype = keys.get("dtype")
    # `double().tolist()` writes floats only; an int or a bool was put there by somebody else.
    numbers = isinstance(values, list) and all(type(value) is float for value in values)
    if not numbers or dtype not in _DTYPES:
        raise UserError(
            f"{where}: rounded {shown(found)} is no tensor; import the checkpoint again"
        )
    return torch.tensor(values, dtype=torch.float64).to(_DTYPES[dtype])


def open_carried(places: Iterable[Path]) -> CarriedTensors | None:
    """The tensors of the original outside the text model, if there are any. Raises as `HFReader`
    does."""
    place = next((place for place in places if is_there(place / CARRIED)), None)
    if place is None:
        return None
    # Every name begins with the empty prefix: all tensors of this file are carried ones.
    return HFReader(place, carried=("",), single=CARRIED).carried


def carried_names(directory: Path) -> list[str]:
    """Names of the tensors that a Megatron directory carries."""
    carried = open_carried([directory])
    return list(carried.tensors) if carried else []
