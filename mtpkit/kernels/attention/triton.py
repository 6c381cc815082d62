"""The Triton twins."""

from mtpkit.kernels.attention.decode import paged_attention
from mtpkit.kernels.attention.prefill import prefill_attention

__all__ = ["paged_attention", "prefill_attention"]
