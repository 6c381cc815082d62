"""The description of a model: its sizes, its layers and its heads.

Importing the package imports only `words`; the classes are made on first use, since making them
takes a quarter of a command's `--help`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mtpkit.config.words import (
    LARGEST_COUNT,
    MAX_SHARD_BYTES,
    MOST_DRAFTS,
    Balance,
    HiddenState,
    LossKind,
)

if TYPE_CHECKING:
    from mtpkit.config.model import HEAD_RULES, ModelConfig, MtpConfig, config_of_file
    from mtpkit.config.sections import SECTIONS, Section, known_letters, register_section

__all__ = [
    "HEAD_RULES",
    "LARGEST_COUNT",
    "MAX_SHARD_BYTES",
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

_MODULES = dict.fromkeys(
    ("HEAD_RULES", "ModelConfig", "MtpConfig", "config_of_file"), "model"
) | dict.fromkeys(("SECTIONS", "Section", "known_letters", "register_section"), "sections")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
