from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.linear import reference
from mtpkit.kernels.linear.reference import FP8 as FP8
from mtpkit.kernels.linear.reference import FP8_MAX as FP8_MAX

linear = pick(reference.linear)
quantize_rows = pick(reference.quantize_rows)
