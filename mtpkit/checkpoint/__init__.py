"""Checkpoints: two layouts, one config, one way to load."""

import mtpkit.platform  # noqa: F401  (keeps megatron-core eager without a GPU, so it comes first)
from mtpkit.checkpoint.convert import save_hf_model
from mtpkit.checkpoint.directory import (
    ModelDirectory,
    latest_iteration,
    load_config,
    open_directory,
)
from mtpkit.checkpoint.load import load_model, load_model_weights
from mtpkit.checkpoint.run import load_checkpoint, save_checkpoint, save_model

__all__ = [
    "ModelDirectory",
    "latest_iteration",
    "load_checkpoint",
    "load_config",
    "load_model",
    "load_model_weights",
    "open_directory",
    "save_checkpoint",
    "save_hf_model",
    "save_model",
]
