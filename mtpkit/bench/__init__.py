"""Measurements of the whole: how much faster a model decodes with its heads, and whether the tokens are the same."""

from mtpkit.bench.prompts import read_named_prompts, read_prompts
from mtpkit.bench.speedup import SpeedupConfig, measure_speedup
from mtpkit.bench.speedup_report import SpeedupReport, SpeedupRow

__all__ = ["SpeedupConfig", "SpeedupReport", "SpeedupRow", "measure_speedup", "read_named_prompts", "read_prompts"]
