"""Training of multi-token-prediction heads on a frozen base."""

import mtpkit.platform  # noqa: F401  (quiets megatron-core, so it comes first)
from mtpkit.training.acceptance import served_acceptance
from mtpkit.training.cache_write import write_cache
from mtpkit.training.config import TrainConfig, load_config
from mtpkit.training.loop import train

__all__ = ["TrainConfig", "load_config", "served_acceptance", "train", "write_cache"]
