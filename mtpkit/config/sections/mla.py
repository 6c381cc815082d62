"""Sizes and switches of multi-head latent attention."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from mtpkit.config.checked import checked
from mtpkit.config.sections.base import Number, Section, Width

_Scale = Annotated[Number, Field(ge=0, le=1e6)]


@checked("model config")
class MlaConfig(Section):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), under the names and with the
    defaults of Megatron's `MLATransformerConfig`.

    As in Megatron, the number of heads, the rotary base, and the switch for norms of the low-rank
    projections are fields of `AttentionConfig`: `num_attention_heads`, `rotary_base`,
    `qk_layernorm`.
    """

    letter = "+"
    also = ("*",)
    title = "multi-head latent attention"
    apart = ("*",)
    positive = (
        "kv_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
        "original_max_position_embeddings",
    )

    q_lora_rank: Width = 0
    """Rank of the query projection; 0: one full matrix."""
    q_proj_layernorm: bool = False
    """Without a low rank for queries, whether the query projection normalises its input once more.
    Megatron's does with `qk_layernorm`; Hugging Face's models do not."""
    kv_lora_rank: Width = 512
    """Rank of keys and values: width of the latent that decoding keeps per token."""
    qk_head_dim: Width = 128
    """Channels of a head's queries and keys without position."""
    qk_pos_emb_head_dim: Width = 64
    """Channels of a head's queries, and of the key that all heads share, with rotary position."""
    v_head_dim: Width = 128
    rope_type: Literal["rope", "yarn"] = "yarn"
    rotary_scaling_factor: Annotated[Number, Field(ge=1e-3, le=1e6)] = 40
    """YaRN (arXiv:2309.00071): factor by which contexts become longer. It scales the scores with
    `rope` too."""
    original_max_position_embeddings: Annotated[int, Field(ge=1, le=2**30)] = 4096
    """YaRN: longest context before scaling."""
    beta_fast: _Scale = 32
    """YaRN: frequencies that turn more often than this in the original context stay as they are."""
    beta_slow: _Scale = 1
    """YaRN: frequencies that turn less often than this are divided by the scaling factor."""
    mscale: _Scale = 1.0
    mscale_all_dim: _Scale = 0.0
    """With m(x) = 0.1 x ln(factor) + 1, scores are multiplied by m(mscale_all_dim)^2, and rotated
    channels by m(mscale) / m(mscale_all_dim)."""

    @property
    def qk_width(self) -> int:
        """Channels of a head's queries and keys."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def row(self) -> int:
        """Number of values that decoding keeps per token: the latent and the rotary key."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim

    def requirements(self, layers: int) -> Iterator[str]:
        yield from super().requirements(layers)
        if self.qk_pos_emb_head_dim % 2:
            yield (
                f"qk_pos_emb_head_dim {self.qk_pos_emb_head_dim} is odd, but rotary positions turn"
                " pairs of channels"
            )
        if self.q_proj_layernorm and self.q_lora_rank:
            yield f"q_proj_layernorm true is for q_lora_rank 0, not {self.q_lora_rank}"
        if self.beta_slow >= self.beta_fast:
            yield f"beta_slow {self.beta_slow} must be below beta_fast {self.beta_fast}"
