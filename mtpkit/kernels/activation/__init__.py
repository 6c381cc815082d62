from mtpkit.kernels.activation import reference
from mtpkit.kernels.dispatch import pick

relu2 = pick(reference.relu2, differentiable=True)
sigmoid_gate = pick(reference.sigmoid_gate, differentiable=True)
swiglu = pick(reference.swiglu, differentiable=True)
