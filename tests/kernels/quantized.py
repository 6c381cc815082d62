"""Quantised matrices with random codes and scales, for the tests of their kernels and for
`benchmarks.kernels`."""

import math

import torch

from mtpkit.kernels.linear.reference import FP8
from mtpkit.kernels.quantized import NOT_QUANTIZED, Inputs, Matrix, prepare
from mtpkit.kernels.quantized.reference import Codes

FORMATS: dict[str, tuple[Codes, tuple[int, int]]] = {
    "block": ("e4m3", (128, 128)),
    "row": ("e4m3", (1, 0)),
    "matrix": ("e4m3", (0, 0)),
    "int4": ("int4", (1, 128)),
    "int4, groups of 32": ("int4", (1, 32)),
    "int4, zero points": ("int4", (1, 64)),
    "nvfp4": ("e2m1", (1, 16)),
}
"""Codes, and rows and columns per scale; 0: all."""
RULES = {
    "none": NOT_QUANTIZED,
    "token": Inputs("token"),
    "group": Inputs("group", 128),
    "static": Inputs("static"),
}
_SHORT = 2**-12
"""Relative error of sums of fp8 products on the tensor cores of an H100, which keep 14 bits while
they add 32 to 128 of them."""
_SPREAD = {"e4m3": 100.0, "int4": 4.6, "e2m1": 2.9}
"""Standard deviation of the numbers that random codes stand for."""


def of_sums(device: str, codes: Codes, inputs: Inputs) -> float:
    """Relative error that the device adds to a product of a matrix with such codes."""
    short = device == "cuda" and codes == "e4m3" and inputs.rule != "none"
    return _SHORT if short else 0.0


def draw_matrix(name: str, *shape: int, device: str | torch.device = "cpu") -> Matrix:
    """A prepared matrix [N, K] or [E, N, K] whose elements have a variance of about 1 / K."""
    codes, (rows, columns) = FORMATS[name]
    *lead, outputs, width = shape
    rows = rows or outputs
    columns = columns or width
    if codes == "e4m3":
        values = torch.empty(shape, dtype=FP8, device=device)
        # In place and one expert at a time: there may be no room for all in fp32.
        for one in values if lead else [values]:
            wide = torch.randn(outputs, width, device=device).mul_(_SPREAD[codes])
            one.copy_(wide.clamp_(-448, 448))
    else:
        packed = (*lead, outputs, width // 2)
        values = torch.randint(256, packed, dtype=torch.uint8, device=device)

    groups = (*lead, math.ceil(outputs / rows), math.ceil(width / columns))
    scales = (0.5 + torch.rand(groups, device=device)) / _SPREAD[codes] / math.sqrt(width)
    row_scales = None
    zeros = None
    if codes == "e2m1":
        row_scales = 0.01 * (1 + torch.rand(*lead, 1, device=device)).expand(*lead, outputs)
        row_scales = row_scales.contiguous()
        scales = (scales / 0.01).to(FP8)
    elif codes == "int4":
        scales = scales.to(torch.bfloat16)
    if name == "int4, zero points":
        zeros = torch.randint(16, groups, dtype=torch.uint8, device=device)
    return prepare(Matrix(codes, values, scales, (rows, columns), row_scales, zeros))
