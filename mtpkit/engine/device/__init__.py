"""Running steps on a device: models and caches, CUDA graphs, checkpoints of state."""
