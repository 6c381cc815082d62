from mtpkit.kernels.attention import reference
from mtpkit.kernels.dispatch import pick

depth_attention = pick(reference.depth_attention, differentiable=True)
paged_attention = pick(reference.paged_attention)
prefill_attention = pick(reference.prefill_attention)
sequence_attention = pick(reference.sequence_attention, differentiable=True)
