"""megatron-core's config of a transformer, with the model's own config as a field."""

from dataclasses import dataclass, field

from megatron.core.transformer import TransformerConfig as MegatronTransformerConfig

from mtpkit.config import ModelConfig


@dataclass
class TransformerConfig(MegatronTransformerConfig):
    """What megatron-core hands to each module of a model that `build_model` makes."""

    mtpkit: ModelConfig = field(kw_only=True)
    """Sizes and switches that megatron-core has no fields for."""
