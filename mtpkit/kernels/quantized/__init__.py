"""Products with matrices that stay quantised; see `reference` for the contracts."""

from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.quantized import reference
from mtpkit.kernels.quantized.reference import (
    MOST_WIDENED,
    NOT_QUANTIZED,
    Inputs,
    Matrix,
    prepare,
    restore,
)

quantize_inputs = pick(reference.quantize_inputs)
quantized_linear = pick(reference.quantized_linear)
quantized_experts = pick(reference.quantized_experts)

__all__ = [
    "MOST_WIDENED",
    "NOT_QUANTIZED",
    "Inputs",
    "Matrix",
    "prepare",
    "quantize_inputs",
    "quantized_experts",
    "quantized_linear",
    "restore",
]
