"""Sizes and switches of attention layers."""

from typing import Annotated, Literal

from pydantic import Field

from mtpkit.config.checked import checked
from mtpkit.config.sections.base import Count, Number, Section


@checked("model config")
class AttentionConfig(Section):
    """Grouped-query attention."""

    letter, title, in_every_file = "*", "attention", True
    positive = ("num_attention_heads", "num_query_groups", "kv_channels")
    multiples = (("num_attention_heads", "num_query_groups"),)

    num_attention_heads: Count = 1
    num_query_groups: Count = 1
    kv_channels: Count = 64
    """Width of one attention head."""
    position_embedding_type: Literal["none", "rope"] = "none"
    rotary_base: Annotated[Number, Field(ge=1, le=1e15)] = 10000.0
    rotary_percent: Annotated[Number, Field(ge=1e-6, le=1)] = 1.0
    qk_layernorm: bool = False
