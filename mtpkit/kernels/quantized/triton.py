"""The Triton twins of products with quantised matrices."""

from mtpkit.kernels.quantized.experts import quantized_experts
from mtpkit.kernels.quantized.linear import quantize_inputs, quantized_linear

__all__ = ["quantize_inputs", "quantized_experts", "quantized_linear"]
