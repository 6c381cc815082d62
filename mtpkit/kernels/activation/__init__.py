from mtpkit.kernels.activation import reference
from mtpkit.kernels.dispatch import pick

relu2 = pick(reference.relu2)
swiglu = pick(reference.swiglu)

__all__ = ["relu2", "swiglu"]
