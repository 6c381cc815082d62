"""Model families: how each one's `config.json` and weight names map to mtpkit's config and to Megatron's names."""

from pathlib import Path
from typing import Any, Protocol

from mtpkit.checkpoint.families import nemotron_h
from mtpkit.checkpoint.families.table import Table
from mtpkit.config import ModelConfig
from mtpkit.errors import UserError, listed, shown


class Family(Protocol):
    """What the module of a family offers."""

    def config_from_hf(self, hf: dict[str, Any], where: Path | str) -> ModelConfig: ...

    def config_to_hf(self, config: ModelConfig, original: dict[str, Any] | None = None) -> dict[str, Any]: ...

    def canonical_hf_name(self, name: str) -> str: ...

    def table(self, config: ModelConfig) -> Table: ...


FAMILIES: dict[str, Family] = {"nemotron_h": nemotron_h}
"""By `model_type` of the Hugging Face config."""


def get_family(name: Any, where: Path | str = "model config", key: str = "family") -> Family:
    """The family of that name, the `model_type` of a Hugging Face config.

    Args:
        where: file that names it, for messages.
        key: where in that file.

    Raises:
        UserError: there is none; names those that exist.
    """
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(f"{where}: {key} {shown(name)} is not supported; supported: {listed(sorted(FAMILIES))}")
    return FAMILIES[name]


def config_from_hf(hf: dict[str, Any], where: Path | str) -> ModelConfig:
    """`ModelConfig` of a Hugging Face `config.json`, the file `where`.

    Raises:
        UserError: unknown family, missing keys, or settings that cannot be represented.
    """
    return get_family(hf.get("model_type"), where, "model_type").config_from_hf(hf, where)
