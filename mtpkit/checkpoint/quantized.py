"""Weights stored in fp8 with a scale per block of 128 x 128, read as bf16 or fp32.

`X` is e4m3, [..., out, in], and `X_scale_inv` fp32, [..., ceil(out / 128), ceil(in / 128)]: a
weight is its fp8 value times the scale of its block; blocks at the edges may be partial
(DeepSeek-AI 2024, arXiv:2412.19437, section 3.3).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from mtpkit.checkpoint.tensors import FLOATS, Shape, TensorInfo
from mtpkit.checkpoint.values import Values
from mtpkit.errors import shown

FP8 = torch.float8_e4m3fn
SCALE = "_scale_inv"
"""Suffix that the name of a scale adds to the name of its weight."""
CONFIG = "quantization_config"
FP8_METHOD = "fp8"
"""`quant_method` of fp8 in blocks."""


_INSTEAD = ("weight_packed", "qweight", "packed")
"""Name endings of tensors that are stored in place of a weight."""
_BESIDE = (
    *(
        "weight_scale_inv",
        "weight_scale",
        "weight_scale_2",
        "weight_global_scale",
        "weight_zero_point",
    ),
    *(
        "weight_shape",
        "weight_g_idx",
        "input_scale",
        "input_global_scale",
        "scale_inv",
        "scale",
    ),
    *("qzeros", "scales", "g_idx"),
)
"""Name endings of further tensors of a quantised weight."""


@dataclass(frozen=True)
class BlockFp8:
    """The size of the blocks that have one scale each."""

    rows: int = 128
    columns: int = 128

    def scale_shape(self, shape: Shape) -> Shape:
        """The shape of the scales of a weight."""
        *leading, out, width = shape
        return (*leading, -(-out // self.rows), -(-width // self.columns))


def read_block_fp8(file: Values) -> BlockFp8 | None:
    """The block size of a `config.json`; None if it has no `quantization_config`, or one with a
    problem.

    A quantisation other than block fp8 is recorded as a problem.
    """
    found = file.get(CONFIG)
    if found is None:
        return None
    block = found.get("weight_block_size") if isinstance(found, Mapping) else None
    known = (
        isinstance(found, Mapping)
        and found.get("quant_method") == FP8_METHOD
        and found.get("fmt", "e4m3") == "e4m3"
    )
    sizes = (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and 0 < size < 2**20 for size in block)
    )
    if not known or not sizes:
        file.problems.append(
            f"{CONFIG} {shown(found)} is not supported, only quant_method 'fp8' with fmt 'e4m3' and"
            " weight_block_size, 'modelopt', 'compressed-tensors', 'awq' and 'gptq'"
        )
        return None
    assert isinstance(block, list)
    return BlockFp8(*block)


def find_quantized(
    found: Mapping[str, TensorInfo], expected: Iterable[str]
) -> dict[str, frozenset[str]]:
    """The names among `expected` that are stored quantised, each with the tensors stored beside or
    in place of it.

    Example: an fp8 `X.weight` has `X.weight_scale_inv` beside it; `X.qweight` may be in place of
    `X.weight`.
    """
    quantized = {}
    for name in expected:
        start = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
        others = frozenset(start + end for end in (*_INSTEAD, *_BESIDE) if start + end in found)
        if name not in found:
            stored = any(start + end in others for end in _INSTEAD)
        else:
            # An integer tensor is no quantised weight by itself: something must lie beside it.
            dtype = found[name].dtype
            stored = dtype == FP8 or (dtype not in FLOATS and bool(others))
        if stored:
            quantized[name] = others
    return quantized
