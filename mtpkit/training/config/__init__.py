"""The settings of a training run, their descriptions, and YAML files with overrides."""
