"""AWQ and GPTQ, whose parts have columns before rows in files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.directory import open_directory
from mtpkit.checkpoint.matrices import StoredMatrices
from mtpkit.checkpoint.tensors import bits_equal
from mtpkit.checkpoint.verify import compare_weights
from mtpkit.errors import UserError
from mtpkit.model.formats import Awq, Gptq
from tests.checkpoint.builders import add_heads, edit, edit_config, write_base
from tests.shared import each

GROUP = 16
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ: which of eight neighbours is at each place of a word."""
SETTINGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
    "gptq_v2": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "checkpoint_format": "gptq_v2",
    },
}


def packed(codes: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Codes of eight neighbours along a dimension in words of 32 bits, one after another."""
    words = 0
    for place, neighbour in enumerate(order):
        at = torch.arange(neighbour, codes.shape[dim], 8)
        words = words + (codes.index_select(dim, at).long() << 4 * place)
    assert isinstance(words, Tensor)
    return (words - (words >> 31) * 2**32).to(torch.int32)


def quantized(weight: Tensor, method: str) -> tuple[dict[str, Tensor], Tensor]:
    """Random parts as files hold them, and the matrix that they mean."""
    outputs, width = weight.shape
    generator = torch.Generator().manual_seed(outputs * width)
    codes = torch.randint(16, (width, outputs), generator=generator)
    zeros = torch.randint(15, (width // GROUP, outputs), generator=generator)
    scales = torch.rand(width // GROUP, outputs, generator=generator).add(0.1).half()
    offset = 1 if method == "gptq" else 0
    order = ORDER if method == "awq" else tuple(range(8))
    parts = {
        "qweight": packed(codes, 1, order) if method == "awq" else packed(codes, 0),
        "qzeros": packed(zeros, 1, order),
        "scales": scales,
    }
    if method != "awq":
        parts["g_idx"] = (torch.arange(width) // GROUP).int()
    by_column = [
        (codes[column] - zeros[column // GROUP] - offset) * scales[column // GROUP].float()
        for column in range(width)
    ]
    return parts, torch.stack(by_column, 1)


def write(directory: Path, method: str) -> dict[str, Tensor]:
    """A checkpoint in the layout of a method; returns its matrices."""
    write_base(directory, "*-", dtype=torch.bfloat16)
    add_heads(directory, "*-")
    meant = {}

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "proj.weight" in name and "eh_" not in name]:
            parts, meant[name] = quantized(tensors.pop(name), method)
            start = name.removesuffix("weight")
            tensors.update({start + part: tensor for part, tensor in parts.items()})

    edit(directory, change)
    edit_config(directory, quantization_config=SETTINGS[method])
    return meant


@each("method", SETTINGS)
def test_meaning_and_round_trip(method: str, tmp_path: Path) -> None:
    meant = write(tmp_path / "hf", method)
    opened = open_directory(tmp_path / "hf")
    stored = StoredMatrices(opened.reader, opened.matrices, torch.float32)
    assert len(meant) > 8
    for name, matrix in meant.items():
        assert torch.equal(stored.read(name), matrix), name
    kind = Awq(columns=GROUP)
    if method != "awq":
        kind = Gptq(columns=GROUP, zero_offset=1 if method == "gptq" else 0)
    assert {*opened.weights().formats.values()} == {kind}
    source = opened.weights()
    for name in source.formats:
        wide = source.quantized(name).widen(torch.bfloat16)
        assert torch.equal(wide, source.read(name)), name

    import_checkpoint(tmp_path / "hf", tmp_path / "megatron")
    assert open_directory(tmp_path / "megatron").weights().formats == source.formats
    assert compare_weights(tmp_path / "hf", tmp_path / "megatron").identical
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    before = load_file(tmp_path / "hf" / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert bits_equal(after[name], tensor), name
    # An export adds modules of heads that are not quantised to their list.
    back = open_directory(tmp_path / "back").settings["quantization_config"]
    assert SETTINGS[method].items() <= back.items()
    assert open_directory(tmp_path / "back").weights().formats == source.formats


Q = "backbone.layers.0.mixer.q_proj."


@each(
    ("settings", "change", "told"),
    [
        ({}, lambda t: t[f"{Q}g_idx"].copy_(t[f"{Q}g_idx"].flip(0)), "q_proj.*ordered|orders"),
        ({}, lambda t: t.pop(f"{Q}g_idx"), "1 missing.*g_idx"),
        ({}, lambda t: t.pop(f"{Q}scales"), "1 missing.*q_proj.scales"),
        ({}, lambda t: t[f"{Q}scales"].fill_(-1), "scales is negative"),
        ({}, lambda t: t.update({f"{Q}scales": torch.ones(3, 32)}), r"q_proj.scales \[3, 32\]"),
        ({"bits": 8}, lambda t: None, "gptq with bits 8 is not supported"),
        ({"group_size": 8}, lambda t: None, "scales"),
        ({"quant_method": "awq"}, lambda t: None, "stored as gptq, but awq has no gptq"),
    ],
)
def test_what_does_not_fit_is_named(
    settings: dict[str, Any], change: Any, told: str, tmp_path: Path
) -> None:
    write(tmp_path / "hf", "gptq")
    edit(tmp_path / "hf", change)
    edit_config(tmp_path / "hf", quantization_config=SETTINGS["gptq"] | settings)
    with pytest.raises(UserError, match=told):
        import_checkpoint(tmp_path / "hf", tmp_path / "megatron")
