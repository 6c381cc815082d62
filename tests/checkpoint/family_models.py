"""Tiny random directories of every family with heads, as published, by the name of the family."""

from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tests.checkpoint import builders, qwen_models
from tests.checkpoint.block_models import (
    add_glm_heads,
    add_mimo_heads,
    write_deepseek,
    write_glm,
    write_mimo,
)

EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=8,
)


class Make(Protocol):
    """Writes the base, with `changes` of its config."""

    def __call__(self, directory: Path, **changes: Any) -> object: ...


class Add(Protocol):
    """Adds the heads that the family publishes, one physical layer."""

    def __call__(self, directory: Path) -> object: ...


FAMILIES: dict[str, tuple[Make, Add]] = {
    "deepseek_v3": (write_deepseek, partial(add_glm_heads, writer=write_deepseek)),
    "glm4_moe": (write_glm, add_glm_heads),
    "mimo": (write_mimo, add_mimo_heads),
    "nemotron_h": (builders.write_base, builders.add_heads),
    "qwen3_next": (
        partial(qwen_models.write, "qwen3_next", **EXPERTS),
        partial(qwen_models.add_heads, "qwen3_next"),
    ),
    "qwen3_5": (partial(qwen_models.write, "qwen3_5"), partial(qwen_models.add_heads, "qwen3_5")),
    "qwen3_5_moe": (
        partial(qwen_models.write, "qwen3_5_moe", **EXPERTS),
        partial(qwen_models.add_heads, "qwen3_5_moe"),
    ),
}


def write_family(name: str, directory: Path, **changes: Any) -> Path:
    """A directory with heads."""
    write, add = FAMILIES[name]
    write(directory, **changes)
    add(directory)
    return directory
