from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.fp8_linear import reference
from mtpkit.kernels.fp8_linear.reference import FP8, FP8_MAX

quantize_rows = pick(reference.quantize_rows)
fp8_linear = pick(reference.fp8_linear)

__all__ = ["FP8", "FP8_MAX", "fp8_linear", "quantize_rows"]
