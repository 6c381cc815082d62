"""Limits and choices that settings of several packages share."""

from typing import Literal

LARGEST_COUNT = 2**31 - 1
"""The largest value of a setting that counts something."""

MOST_DRAFTS = 1000
"""The most drafts per step, whatever the heads of the model."""

MAX_SHARD_BYTES = 5 * 10**9
"""The largest safetensors file that is written, unless another size is asked for."""

LossKind = Literal["kl", "tv", "ce"]
"""Loss of the heads: KL divergence or total variation distance to the base, or cross-entropy
against the tokens."""

HiddenState = Literal["after_final_norm", "before_final_norm"]
"""Hidden state that the next depth reads from a base or a depth: after or before the final norm."""

Balance = Literal["memory", "time"]
"""Balance pipeline stages by memory (weights, gradients and moments) or by the time of a training
step (FLOPs)."""
