"""The toy hybrid model that the tests vary."""

from mtpkit.config import ModelConfig

DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6
)
"""Sizes of gated delta nets, which `toy_config` gives to models with such layers."""


def toy_config(**changes) -> ModelConfig:
    """Mamba2, attention and MLP layers of width 32 with three repeated heads; MoE sizes are there,
    without a layer."""
    letters = changes.get("pattern", "") + changes.get("mtp_pattern", "")
    changes = DELTA | changes if "G" in letters else changes
    return ModelConfig.of(
        family="nemotron_h",
        vocab_size=40,
        hidden_size=32,
        pattern="M*-",
        mtp_pattern="*-",
        mtp_num_depths=3,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        ffn_hidden_size=48,
        mamba_num_heads=4,
        mamba_head_dim=8,
        mamba_state_dim=8,
        mamba_num_groups=2,
        init_std=0.2,
    ).replace(**changes)
