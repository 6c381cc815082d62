"""Model families: how each one's `config.json` and weight names map to mtpkit's config and to Megatron's names."""

from typing import Any, Protocol

from mtpkit.checkpoint.families import nemotron_h
from mtpkit.checkpoint.families.table import Table
from mtpkit.config import ModelConfig
from mtpkit.errors import UserError


class Family(Protocol):
    """What the module of a family offers."""

    def config_from_hf(self, hf: dict[str, Any]) -> ModelConfig: ...

    def config_to_hf(self, config: ModelConfig, original: dict[str, Any] | None = None) -> dict[str, Any]: ...

    def canonical_hf_name(self, name: str) -> str: ...

    def table(self, config: ModelConfig) -> Table: ...


FAMILIES: dict[str, Family] = {"nemotron_h": nemotron_h}
"""By `model_type` of the Hugging Face config."""


def get_family(model_type: str | None) -> Family:
    """The family of a `model_type`.

    Raises:
        UserError: there is none; names those that exist.
    """
    if model_type not in FAMILIES:
        raise UserError(f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """`ModelConfig` of a Hugging Face `config.json`.

    Raises:
        UserError: unknown family, missing keys, or settings that cannot be represented.
    """
    return get_family(hf.get("model_type")).config_from_hf(hf)
