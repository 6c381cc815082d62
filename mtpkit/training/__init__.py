"""Training of multi-token-prediction heads on a frozen base."""

from mtpkit.training.config import TrainConfig, load_config
from mtpkit.training.loop import train

__all__ = ["TrainConfig", "load_config", "train"]
