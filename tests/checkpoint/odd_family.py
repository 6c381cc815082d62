"""A family with what published ones have besides plain tensors: packed experts, copies, tensors of
another model."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtpkit.checkpoint.families import FAMILIES, Family
from mtpkit.checkpoint.families.nemotron_h import NEMOTRON_H
from mtpkit.checkpoint.families.table import Entry, Ways, expert_ways
from mtpkit.config import ModelConfig
from tests.checkpoint.builders import add_heads, edit_config, write_base

EXPERTS = "mlp.experts.experts.linear_fc{}.weight"
COPIES = {"mtp.embed.weight": "backbone.embeddings.weight", "mtp.head.weight": "lm_head.weight"}


def moe(config: ModelConfig) -> Iterator[Entry | Ways]:
    plain = [entry for entry in NEMOTRON_H.layers["moe"](config) if isinstance(entry, Entry)]
    for number, name in ((1, "up_proj"), (2, "down_proj")):
        singles = [entry for entry in plain if entry.megatron[0].startswith(EXPERTS.format(number))]
        yield expert_ways(
            config.moe.num_experts, f"mixer.experts.{name}", EXPERTS.format(number), singles
        )
    yield from (entry for entry in plain if ".experts.experts." not in entry.megatron[0])


ODD = replace(
    NEMOTRON_H,
    model_type="odd",
    architecture="OddForCausalLM",
    layers={**NEMOTRON_H.layers, "moe": moe},
    copies=lambda config: COPIES if config.mtp.num_layers else {},
    carried=("visual.", "audio."),
)

CARRIED = {
    "visual.patches.weight": torch.randn(7, 5, generator=torch.Generator().manual_seed(1)),
    "visual.steps": torch.arange(9),
    "visual.bad": torch.tensor([float("nan"), float("inf")]),
    "audio.mask": torch.tensor([True, False, True]),
    "audio.small": torch.ones(3, 2).to(torch.float8_e4m3fn),
}


@contextlib.contextmanager
def known(family: Family = ODD) -> Iterator[None]:
    """The family is there inside."""
    FAMILIES[family.model_type] = family
    try:
        yield
    finally:
        del FAMILIES[family.model_type]


def pack(tensors: dict[str, Tensor], prefix: str) -> None:
    """Pack the experts of one layer."""
    for name in ("up_proj", "down_proj"):
        singles = [tensors.pop(f"{prefix}mixer.experts.{e}.{name}.weight") for e in range(4)]
        tensors[f"{prefix}mixer.experts.{name}"] = torch.stack(singles)


def write_odd(
    directory: Path, packed: tuple[str, ...] = (), copies: bool = True
) -> dict[str, Tensor]:
    """Write a checkpoint of the family, `*E` with a head `*E`; return its tensors."""
    write_base(directory, "*E")
    add_heads(directory)
    edit_config(directory, model_type="odd", architectures=["OddForCausalLM"])
    tensors = load_file(directory / "model.safetensors") | CARRIED
    for prefix in packed:
        pack(tensors, prefix)
    if copies:
        tensors |= {copy: tensors[name].clone() for copy, name in COPIES.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return tensors


def read_config(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())
