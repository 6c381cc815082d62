"""The description of a model: its sizes, its layers and its heads."""

from typing import Literal

from mtpkit.config.model import HEAD_RULES, HiddenState, ModelConfig, MtpConfig, config_of_file
from mtpkit.config.sections import SECTIONS, Section, known_letters, register_section

LARGEST_COUNT = 2**31 - 1
"""The largest value of a setting that counts something."""

MOST_DRAFTS = 1000
"""The most drafts per step, whatever the heads of the model."""

LossKind = Literal["kl", "tv", "ce"]
"""Loss of the heads: KL divergence or total variation distance to the base, or cross-entropy
against the tokens."""

Balance = Literal["memory", "time"]
"""Balance pipeline stages by memory (weights, gradients and moments) or by the time of a training
step (FLOPs)."""

__all__ = [
    "HEAD_RULES",
    "LARGEST_COUNT",
    "MOST_DRAFTS",
    "SECTIONS",
    "Balance",
    "HiddenState",
    "LossKind",
    "ModelConfig",
    "MtpConfig",
    "Section",
    "config_of_file",
    "known_letters",
    "register_section",
]
