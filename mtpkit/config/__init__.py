"""The description of a model: its sizes, its layers and its heads."""

from mtpkit.config.model import ModelConfig, MtpConfig, config_of_file
from mtpkit.config.sections import SECTIONS, Section, known_letters, register_section

LARGEST_COUNT = 2**31 - 1
"""The largest value of a setting that counts something."""

MOST_DRAFTS = 1000
"""The most drafts of a step, whatever the heads."""

__all__ = [
    "LARGEST_COUNT",
    "MOST_DRAFTS",
    "SECTIONS",
    "ModelConfig",
    "MtpConfig",
    "Section",
    "config_of_file",
    "known_letters",
    "register_section",
]
