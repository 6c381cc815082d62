"""Weights stored in fp8 with a scale per block of 128 x 128, read as bf16 or fp32.

`X` is e4m3, [..., out, in], and `X_scale_inv` fp32, [..., ceil(out / 128), ceil(in / 128)]: a weight is its fp8 value
times the scale of its block; blocks at the edges may be partial (DeepSeek-AI 2024, arXiv:2412.19437, section 3.3).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpkit.checkpoint.tensors import FLOATS, Shape, TensorInfo, Tensors
from mtpkit.checkpoint.values import Values
from mtpkit.errors import UserError, listed, shown

FP8 = torch.float8_e4m3fn
SCALE = "_scale_inv"
"""What the name of a scale has after that of its weight."""
CONFIG = "quantization_config"

_ROWS = 16
"""Rows of blocks that are widened at once."""


_INSTEAD = ("weight_packed", "qweight", "packed")
"""What the names of tensors end with that stand in place of a weight."""
_BESIDE = (
    *("weight_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale", "weight_zero_point"),
    *("weight_shape", "weight_g_idx", "input_scale", "input_global_scale", "k_scale", "v_scale", "scale_inv", "scale"),
    *("qzeros", "scales", "g_idx"),
)
"""What the names of further tensors of a quantised weight end with."""


@dataclass(frozen=True)
class BlockFp8:
    """The size of blocks that share a scale."""

    rows: int = 128
    columns: int = 128

    def scale_shape(self, shape: Shape) -> Shape:
        """The shape of the scales of a weight."""
        *leading, out, width = shape
        return (*leading, -(-out // self.rows), -(-width // self.columns))

    def dequantize(self, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., out, in] fp8 and the scales of its blocks to `dtype`, multiplied in fp32 and rounded once."""
        if weight.dim() > 2:
            return torch.stack([self.dequantize(w, s, dtype) for w, s in zip(weight, scale, strict=True)])
        result = torch.empty(weight.shape, dtype=dtype)
        step = self.rows * _ROWS
        for at in range(0, len(weight), step):
            part = weight[at : at + step].float()
            scales = scale[at // self.rows : at // self.rows + _ROWS].float()
            by_row = scales.repeat_interleave(self.rows, 0)[: len(part)]
            result[at : at + step] = part.mul_(by_row.repeat_interleave(self.columns, 1)[:, : part.shape[1]])
        return result


def read_block_fp8(file: Values) -> BlockFp8 | None:
    """The block size of a `config.json`; None where it has no `quantization_config`, or one with a problem.

    A quantisation other than block fp8 is recorded as a problem.
    """
    found = file.get(CONFIG)
    if found is None:
        return None
    block = found.get("weight_block_size") if isinstance(found, Mapping) else None
    known = isinstance(found, Mapping) and found.get("quant_method") == "fp8" and found.get("fmt", "e4m3") == "e4m3"
    sizes = (
        isinstance(block, list) and len(block) == 2 and all(type(size) is int and 0 < size < 2**20 for size in block)
    )
    if not known or not sizes:
        file.problems.append(
            f"{CONFIG} {shown(found)} is not supported, only quant_method 'fp8' with fmt 'e4m3' and weight_block_size"
        )
        return None
    assert isinstance(block, list)
    return BlockFp8(*block)


class Dequantized:
    """A source whose fp8 weights are read as `dtype`; their scales do not show.

    Raises:
        UserError: names every weight without its scale, and every scale of another shape or dtype.
    """

    def __init__(self, source: Tensors, block: BlockFp8, where: object, dtype: torch.dtype = torch.bfloat16) -> None:
        self._source, self._block, self._dtype = source, block, dtype
        quantized = {name for name, info in source.tensors.items() if info.dtype == FP8 and len(info.shape) > 1}
        if problems := list(self._misfits(quantized)):
            raise UserError(f"{where}: {listed(problems, width=240, separator='; ')}")
        scales = {name + SCALE for name in quantized}
        self.tensors = {
            name: TensorInfo(info.shape, dtype) if name in quantized else info
            for name, info in source.tensors.items()
            if name not in scales
        }
        self._quantized = quantized

    def _misfits(self, quantized: set[str]) -> Iterator[str]:
        found = self._source.tensors
        if missing := sorted(name + SCALE for name in quantized if name + SCALE not in found):
            yield f"{len(missing)} missing, without which fp8 weights cannot be read: {listed(missing)}"
        for name in sorted(quantized):
            scale, shape = found.get(name + SCALE), self._block.scale_shape(found[name].shape)
            if scale is not None and scale != (shape, torch.float32):
                have = f"{list(scale.shape)} {scale.dtype}".replace("torch.", "")
                yield f"{name}{SCALE} {have} instead of {list(shape)} float32"

    def read(self, name: str) -> Tensor:
        weight = self._source.read(name)
        if name not in self._quantized:
            return weight
        return self._block.dequantize(weight, self._source.read(name + SCALE), self._dtype)


def find_quantized(found: Mapping[str, TensorInfo], expected: Iterable[str]) -> dict[str, frozenset[str]]:
    """The names among `expected` that are stored quantised, each with the further tensors that this takes.

    Example: `X.weight` of dtype fp8 has `X.weight_scale_inv`; in place of `X.weight` may be `X.qweight`.
    """
    quantized = {}
    for name in expected:
        start = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
        others = frozenset(start + end for end in (*_INSTEAD, *_BESIDE) if start + end in found)
        if name not in found:
            stored = any(start + end in others for end in _INSTEAD)
        else:
            dtype = found[name].dtype
            stored = dtype == FP8 or (dtype not in FLOATS and bool(others))
        if stored:
            quantized[name] = others
    return quantized
