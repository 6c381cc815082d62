"""Sizes and switches of attention layers."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from mtpkit.config.checked import checked
from mtpkit.config.sections.base import Count, Number, Section


@checked("model config")
class AttentionConfig(Section):
    """Grouped-query attention."""

    letter = "*"
    title = "attention"
    windowed = True
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
    attention_output_gate: bool = False
    """Whether each head's output is multiplied by the sigmoid of a gate, one more output of the
    input projection (Qiu et al. 2025, arXiv:2505.06708; Qwen3-Next)."""

    add_qkv_bias: bool = False
    """Whether the input projection has a bias, which no other linear has (Qwen2, GLM-4-MoE,
    MiMo)."""

    yarn_factor: Annotated[Number, Field(ge=1e-3, le=1e6)] = 1.0
    """YaRN (arXiv:2309.00071): factor by which contexts become longer; 1: plain rotary
    embedding."""
    yarn_original_context: Annotated[int, Field(ge=1, le=2**30)] = 4096
    """YaRN: longest context before scaling."""
    yarn_beta_fast: Annotated[Number, Field(ge=0, le=1e6)] = 32
    """YaRN: frequencies that turn more often than this in the original context stay as they are."""
    yarn_beta_slow: Annotated[Number, Field(ge=0, le=1e6)] = 1
    """YaRN: frequencies that turn less often than this are divided by the factor."""
    yarn_attention_factor: Annotated[Number, Field(ge=1e-3, le=1e3)] = 1.0
    """Factor of rotated channels, of queries as of keys: usually 0.1 ln(yarn_factor) + 1."""

    @property
    def projected(self) -> int:
        """Width of the input projection: queries, gates, keys and values."""
        queries = self.num_attention_heads
        if self.attention_output_gate:
            queries *= 2
        return (queries + 2 * self.num_query_groups) * self.kv_channels

    def requirements(self, layers: int) -> Iterator[str]:
        yield from super().requirements(layers)

        # Channels are rotated in pairs.
        rotated = int(self.kv_channels * self.rotary_percent)
        if self.position_embedding_type == "rope" and rotated % 2:
            share = f"rotary_percent {self.rotary_percent} of kv_channels {self.kv_channels}"
            yield f"{share} rotates {rotated} channels, an odd number"

        if self.yarn_beta_slow >= self.yarn_beta_fast:
            yield (
                f"yarn_beta_slow {self.yarn_beta_slow} must be below yarn_beta_fast"
                f" {self.yarn_beta_fast}"
            )
