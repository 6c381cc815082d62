from mtpkit.kernels.attention import reference
from mtpkit.kernels.attention.reference import depth_attention, sequence_attention
from mtpkit.kernels.dispatch import pick

paged_attention = pick(reference.paged_attention)
prefill_attention = pick(reference.prefill_attention)

__all__ = ["depth_attention", "paged_attention", "prefill_attention", "sequence_attention"]
