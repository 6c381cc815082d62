from mtpkit.kernels.activation import reference
from mtpkit.kernels.dispatch import pick

relu2 = pick(reference.relu2, differentiable=True)
swiglu = pick(reference.swiglu, differentiable=True)
