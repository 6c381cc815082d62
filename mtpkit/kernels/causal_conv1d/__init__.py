from mtpkit.kernels.causal_conv1d import reference
from mtpkit.kernels.causal_conv1d.reference import causal_conv1d as causal_conv1d
from mtpkit.kernels.dispatch import pick

causal_conv1d_update = pick(reference.causal_conv1d_update)
causal_conv1d_varlen = pick(reference.causal_conv1d_varlen)
