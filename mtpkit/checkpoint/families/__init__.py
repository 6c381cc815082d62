"""Model families: map their `config.json` to mtpkit's config, and their weight names to Megatron's
names."""

from mtpkit.checkpoint.families.deepseek_v3 import DEEPSEEK_V3
from mtpkit.checkpoint.families.family import Family
from mtpkit.checkpoint.families.glm4_moe import GLM4_MOE
from mtpkit.checkpoint.families.mimo import MIMO
from mtpkit.checkpoint.families.nemotron_h import NEMOTRON_H
from mtpkit.checkpoint.families.qwen3_5 import QWEN3_5, QWEN3_5_TEXT
from mtpkit.checkpoint.families.qwen3_5_moe import QWEN3_5_MOE, QWEN3_5_MOE_TEXT
from mtpkit.checkpoint.families.qwen3_next import QWEN3_NEXT
from mtpkit.config import ModelConfig
from mtpkit.errors import UserError, listed, shown

__all__ = ["FAMILIES", "Family", "find_family", "get_family", "only_fit"]

# To support another family, add it here.
_ALL = (
    NEMOTRON_H,
    DEEPSEEK_V3,
    GLM4_MOE,
    MIMO,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_TEXT,
    QWEN3_5_MOE_TEXT,
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
"""Families by the `model_type` of their Hugging Face config."""


def get_family(name: object, where: object = "model config", key: str = "family") -> Family:
    """Look up a family by name, the `model_type` of a Hugging Face config.

    Args:
        where: file that holds the name, for messages.
        key: key of the name in that file, for messages.

    Raises:
        UserError: no family has that name; the message lists the supported ones.
    """
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(
            f"{where}: {key} {shown(name)} is not supported; supported: {listed(sorted(FAMILIES))}"
        )
    return FAMILIES[name]


def only_fit(config: ModelConfig) -> str:
    """Name of the one family that expresses a model's layers and settings; empty if no family or
    several do."""
    fitting = _fitting(config)
    return fitting[0] if len(fitting) == 1 else ""


def _fitting(config: ModelConfig) -> list[str]:
    return [name for name, family in FAMILIES.items() if not any(family.misfits(config))]


def find_family(
    config: ModelConfig, name: str | None = None, where: object = "model config"
) -> Family:
    """Choose the family to write a model as: the requested one, the model's own, or the only one
    that fits.

    Args:
        name: the requested family.
        where: file or directory of the model, for messages.

    Raises:
        UserError: the family is unknown; or none was requested, the model names none, and not
            exactly one fits.
    """
    if name is not None:
        return get_family(name, where, "--family")
    if config.family:
        return get_family(config.family, where)
    fitting = _fitting(config)
    if len(fitting) == 1:
        return FAMILIES[fitting[0]]
    if fitting:
        raise UserError(
            f"{where} fits several families, {listed(fitting)}; choose one with --family"
        )
    lacks = [
        f"{name} cannot express {listed(family.misfits(config), width=120)}"
        for name, family in FAMILIES.items()
    ]
    raise UserError(
        f"{where} fits no family that --family could name: {listed(lacks, separator='; ')}; "
        "keep the Megatron layout, which mtpkit reads as well"
    )
