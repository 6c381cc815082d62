"""Sizes and switches of each layer kind, one file per kind, and the table from pattern letters to
them."""

from mtpkit.config.sections.attention import AttentionConfig
from mtpkit.config.sections.base import (
    SECTIONS,
    HeadPattern,
    Number,
    Part,
    Pattern,
    Section,
    known_letters,
    register_section,
    sections_of,
    up_to,
)
from mtpkit.config.sections.gated_delta_net import GatedDeltaNetConfig
from mtpkit.config.sections.mamba2 import Mamba2Config
from mtpkit.config.sections.mla import MlaConfig
from mtpkit.config.sections.mlp import MlpConfig
from mtpkit.config.sections.moe import MOST_EXPERTS, MoeConfig, Routing, ScoreFunction

__all__ = [
    "MOST_EXPERTS",
    "SECTIONS",
    "AttentionConfig",
    "GatedDeltaNetConfig",
    "HeadPattern",
    "Mamba2Config",
    "MlaConfig",
    "MlpConfig",
    "MoeConfig",
    "Number",
    "Part",
    "Pattern",
    "Routing",
    "ScoreFunction",
    "Section",
    "known_letters",
    "register_section",
    "sections_of",
    "up_to",
]

# In the order in which config files list their keys.
for _section in (
    AttentionConfig,
    MlpConfig,
    Mamba2Config,
    MoeConfig,
    MlaConfig,
    GatedDeltaNetConfig,
):
    register_section(_section)
