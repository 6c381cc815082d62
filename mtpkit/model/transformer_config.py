"""megatron-core's config of a transformer, with the model's own config as a field."""

from dataclasses import dataclass, field

from megatron.core.transformer import TransformerConfig as MegatronTransformerConfig

from mtpkit.config import ModelConfig


@dataclass
class TransformerConfig(MegatronTransformerConfig):
    """Config that megatron-core passes to each module of a model made by `build_model`."""

    mtpkit: ModelConfig = field(kw_only=True)
    """Sizes and switches that megatron-core has no fields for."""
