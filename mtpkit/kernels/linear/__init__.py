from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.linear import reference

linear = pick(reference.linear)

__all__ = ["linear"]
