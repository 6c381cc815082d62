"""The Triton twins of attention."""

from mtpkit.kernels.attention.decode import paged_attention
from mtpkit.kernels.attention.flash import depth_attention, sequence_attention
from mtpkit.kernels.attention.prefill import prefill_attention

__all__ = ["depth_attention", "paged_attention", "prefill_attention", "sequence_attention"]
