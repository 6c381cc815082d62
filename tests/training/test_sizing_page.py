"""The tables of docs/sizing.md are what mtpkit counts for published models."""

from pathlib import Path

import pytest

from mtpkit.bench.sizes import NEMOTRON_3_NANO, NEMOTRON_H_8B
from mtpkit.checkpoint.families import get_family
from mtpkit.model.flops import head_parameters
from mtpkit.model.kinds import KINDS
from mtpkit.training.config.reading import load_config
from mtpkit.training.header import held_bytes
from tests.checkpoint import test_published as published

PAGE = Path(__file__).parents[2] / "docs" / "sizing.md"

MODELS = {
    "Qwen3.5-4B": published.QWEN_4B,
    "MiMo-7B": published.MIMO_7B,
    "Nemotron-H-8B": NEMOTRON_H_8B,
    "Nemotron 3 Nano 30B-A3B": NEMOTRON_3_NANO,
    "Qwen3.5-35B-A3B": published.QWEN_35B,
    "Qwen3-Next-80B-A3B": published.NEXT_80B,
    "GLM-4.5-Air": published.AIR,
    "Nemotron 3 Super": published.SUPER,
    "DeepSeek-V3": published.DEEPSEEK,
}
SPLITS = [
    ([], 1),
    (["cache=CACHE"], 1),
    (["parallel.expert=8"], 8),
    (["parallel.tensor=8"], 8),
    (["parallel.tensor=8", "parallel.expert=8"], 8),
]
SETTINGS = ["model=BASE", "output=RUN", "data.train=[x]", "dtype=bfloat16", "heads.num_depths=3"]


def config_of(name):
    model = MODELS[name]
    if isinstance(model, dict):
        model = get_family(model["model_type"]).config_from_hf(model)
    return model


def weights_of(model):
    """Weights of the base, with embedding and lm_head."""
    total = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    for letter in model.pattern:
        counts = KINDS[letter].matrices(model)
        total += counts.always + counts.expert * counts.experts.count
        total += KINDS[letter].vectors(model)
    return total


def training_row(name):
    model = config_of(name)
    has_experts = "E" in model.letters
    held = []
    for overrides, ranks in SPLITS:
        settings = load_config(None, [*SETTINGS, *overrides])
        splits_experts = any("expert" in override for override in overrides)
        applies = has_experts or not splits_experts
        gib = max(held_bytes(settings, model, ranks)) / 2**30
        held.append(f"{gib:,.1f}" if applies else "-")
    base = f"{weights_of(model) / 1e9:,.1f}"
    return [name, base, f"{head_parameters(model) / 1e6:,.0f}", *held]


def decoding_row(name):
    model = config_of(name)
    memory = [KINDS[letter].memory(model) for letter in model.letters]
    state = 4 * sum(layer.state for layer in memory)
    kv = 2 * sum(layer.kv for layer in memory)
    weights = 2 * (weights_of(model) + head_parameters(model))
    return [name, f"{weights / 1e9:,.1f}", f"{state / 1e6:,.1f}", f"{kv / 1e3:,.1f}"]


@pytest.mark.parametrize(
    ("heading", "row"), [("Training", training_row), ("Decoding", decoding_row)]
)
def test_the_table_is_what_is_counted(heading, row):
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert lines[2:] == [f"| {' | '.join(row(name))} |" for name in MODELS]
