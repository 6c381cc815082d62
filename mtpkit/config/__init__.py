"""What a model is: its sizes, its layers and its heads."""

from mtpkit.config.model import (
    CACHING_KINDS,
    LARGEST_COUNT,
    LAYER_KINDS,
    LAYER_SIZES,
    MOST_DRAFTS,
    RANGES,
    ModelConfig,
    caching_length,
    config_of_file,
)

__all__ = [
    "CACHING_KINDS",
    "LARGEST_COUNT",
    "LAYER_KINDS",
    "LAYER_SIZES",
    "MOST_DRAFTS",
    "RANGES",
    "ModelConfig",
    "caching_length",
    "config_of_file",
]
