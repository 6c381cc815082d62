from mtpkit.kernels.attention.reference import depth_attention, paged_attention, sequence_attention

__all__ = ["depth_attention", "paged_attention", "sequence_attention"]
