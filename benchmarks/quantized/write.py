"""Writes quantised copies of a checkpoint, each in a published layout."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.quantized.calibrate import input_scales
from mtpkit.checkpoint.directory import HFDirectory
from mtpkit.checkpoint.ignored import linears, module_of
from mtpkit.checkpoint.matrices import part_name
from mtpkit.checkpoint.quantized import CONFIG
from mtpkit.checkpoint.tensors import Shape
from mtpkit.errors import UserError, listed
from mtpkit.files import write_file
from mtpkit.kernels.quantized import Inputs
from mtpkit.model.formats import Format, Fp8, Int4, Nvfp4
from mtpkit.model.formats.base import INPUT_SCALE
from mtpkit.model.formats.fp8 import BLOCK

_GROUPS = (128, 64, 32, 16)
"""Columns that share a scale in int4: the first of these that divides all widths is taken."""


@dataclass(frozen=True)
class Copy:
    """A way to quantise a base: the format of its linears, and the settings that say so."""

    format: Format
    settings: Mapping[str, object]
    ignored: str
    """Key of `settings` under which the modules that stay in bf16 are listed."""


def _compressed(form: str, weights: Mapping[str, object], inputs: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": group},
    }


def copies(group: int) -> dict[str, Copy]:
    """The copies by name.

    Args:
        group: columns that share a scale in int4.
    """
    in_blocks = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    by_row = _compressed(
        "float-quantized",
        dict(num_bits=8, type="float", strategy="channel", symmetric=True),
        dict(num_bits=8, type="float", strategy="token", symmetric=True, dynamic=True),
    )
    in_groups = _compressed(
        "pack-quantized",
        dict(num_bits=4, type="int", strategy="group", group_size=group, symmetric=True),
        None,
    )
    four_bits = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
    whole = Fp8(inputs=Inputs("static"), rows=None, columns=None, scale="weight_scale")
    row = Fp8(inputs=Inputs("token"), rows=1, columns=None, scale="weight_scale")
    return {
        "fp8 blocks": Copy(Fp8(), in_blocks, "modules_to_not_convert"),
        "fp8 rows": Copy(row, by_row, "ignore"),
        "fp8 tensor": Copy(whole, {"quant_method": "modelopt", "quant_algo": "FP8"}, "ignore"),
        "int4": Copy(Int4(columns=group), in_groups, "ignore"),
        "nvfp4": Copy(Nvfp4(), four_bits, "ignore"),
    }


def linears_of(source: HFDirectory) -> dict[str, Shape]:
    """The weights of a base that published checkpoints quantise, with their shapes: of linears and
    experts, but not of embedding, lm_head, routers, convolutions and heads.

    Raises:
        UserError: some hold all experts in one tensor, which no copy here does.
    """
    heads = source.table.mtp_names(source.stored)
    shapes = {name: info.shape for name, info in source.reader.tensors.items() if name not in heads}
    modules = {*linears(shapes, source.family.serving)}
    found = {name: shape for name, shape in shapes.items() if module_of(name) in modules}
    stacks = [name for name, shape in found.items() if len(shape) != 2]
    if stacks:
        raise UserError(f"{source.path}: {listed(stacks)} hold all experts in one tensor")
    return found


def group_of(source: HFDirectory) -> int:
    """Columns that share a scale in int4: the most, up to 128, that divide all widths.

    Raises:
        UserError: there are none.
    """
    widths = {width for _, width in linears_of(source).values()}
    for size in _GROUPS:
        if not any(width % size for width in widths):
            return size
    raise UserError(f"{source.path}: some widths are no multiples of {_GROUPS[-1]}: {widths}")


def write_copy(source: HFDirectory, copy: Copy, destination: Path, texts: Tensor) -> int:
    """Write a copy of a base whose linears are quantised, and return their number.

    Args:
        texts: tokens [texts, length] for scales of inputs, where a copy has them.
    """
    destination.mkdir(parents=True)
    chosen = linears_of(source)
    static = copy.format.inputs.rule == "static"
    scales = input_scales(source, chosen, texts) if static else {}
    tensors: dict[str, Tensor] = {}
    for name in source.reader.tensors:
        tensor = source.reader.read(name)
        if name not in chosen:
            tensors[name] = tensor
            continue
        for part, value in _parts(copy.format, tensor):
            tensors[part_name(name, part)] = value
        if name in scales:
            tensors[part_name(name, INPUT_SCALE)] = scales[name]
    save_file(tensors, destination / "model.safetensors", {"format": "pt"})

    infos = source.reader.tensors.items()
    plain = {module_of(name) for name, info in infos if len(info.shape) == 2 and name not in chosen}
    settings = {**copy.settings, copy.ignored: sorted(plain)}
    config = {**source.settings, CONFIG: settings}
    write_file(destination / "config.json", json.dumps(config, indent=2) + "\n")
    for file in source.path.glob("tokenizer*"):
        shutil.copy2(file, destination)
    return len(chosen)


def _parts(kind: Format, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a file holds for a matrix [N, K], by the names of parts."""
    declared = kind.parts()
    for name, part in kind.quantize(weight).items():
        single = declared[name].rows is None and declared[name].columns is None
        yield name, part.reshape(()) if single else part.contiguous()
    if isinstance(kind, Int4):
        yield "weight_shape", torch.tensor(weight.shape)
