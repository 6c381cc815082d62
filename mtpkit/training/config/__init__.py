"""The settings of a training run: what they are, what describes them, and YAML files with overrides that hold them."""

from mtpkit.training.config.reading import load_config, save_config
from mtpkit.training.config.settings import (
    DataConfig,
    HeadAttention,
    HeadsConfig,
    LogConfig,
    LossConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)

__all__ = [
    "DataConfig",
    "HeadAttention",
    "HeadsConfig",
    "LogConfig",
    "LossConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainConfig",
    "load_config",
    "save_config",
]
