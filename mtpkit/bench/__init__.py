"""Measurements of the whole: how much faster a model decodes with its heads, and whether the tokens are the same."""

from mtpkit.bench.prompts import read_named_prompts, read_prompts
from mtpkit.bench.report import Report, Row
from mtpkit.bench.speedup import SpeedupConfig, measure_speedup

__all__ = ["Report", "Row", "SpeedupConfig", "measure_speedup", "read_named_prompts", "read_prompts"]
