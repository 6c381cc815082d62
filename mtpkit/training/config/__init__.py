"""The settings of a training run, their descriptions, and YAML files with overrides."""

from mtpkit.training.config.reading import load_config
from mtpkit.training.config.settings import (
    DataConfig,
    HeadAttention,
    HeadsConfig,
    LossConfig,
    MixKind,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)

__all__ = [
    "DataConfig",
    "HeadAttention",
    "HeadsConfig",
    "LossConfig",
    "MixKind",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainConfig",
    "load_config",
]
