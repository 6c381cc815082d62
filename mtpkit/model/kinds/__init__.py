"""Layer kinds, one file each, and the table from letters of patterns to kinds."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from torch import nn

from mtpkit.config import SECTIONS, ModelConfig, register_section
from mtpkit.config.checked import keys_of
from mtpkit.model.kinds.attention import Attention
from mtpkit.model.kinds.base import LayerKind
from mtpkit.model.kinds.gated_delta_net import GatedDeltaNet
from mtpkit.model.kinds.mamba2 import Mamba2
from mtpkit.model.kinds.mla import Mla
from mtpkit.model.kinds.mlp import Mlp
from mtpkit.model.kinds.moe import Moe

KINDS: dict[str, LayerKind] = {}
"""Letter -> layer kind."""


def register(kind: LayerKind) -> None:
    """Register a layer kind, so that models can use it; a kind from outside mtpkit needs nothing
    else."""
    # Sections of mtpkit's own kinds are in the table from the start.
    if SECTIONS.get(kind.letter) is not kind.section:
        register_section(kind.section)
    KINDS[kind.letter] = kind


for _kind in (Attention(), Mla(), Mlp(), Mamba2(), Moe(), GatedDeltaNet()):
    register(_kind)


def kinds_in(pattern: str) -> list[LayerKind]:
    """Return the kinds of a pattern's layers, each kind once."""
    return [kind for letter, kind in KINDS.items() if letter in pattern]


class UnevenSize(NamedTuple):
    """A size of a model that cannot be divided over the tensor-parallel ranks."""

    key: str
    """The size's key in files."""
    size: int
    shared: bool
    """Whether several ranks may hold the same part."""


def uneven_sizes(
    config: ModelConfig, ranks: int, whole_experts: bool = False
) -> Iterator[UnevenSize]:
    """Yield the sizes of a model's layers that cannot be divided over `ranks` tensor-parallel
    ranks.

    Args:
        whole_experts: each routed expert is whole on one rank.
    """
    for kind in kinds_in(config.letters):
        section = config.section(kind.section)
        keys = keys_of(kind.section)

        for key, size in kind.divided_sizes(config, whole_experts).items():
            if size % ranks:
                yield UnevenSize(key, size, False)

        for name in kind.divided_or_shared:
            size = getattr(section, name)
            # Fewer parts than ranks must be shared by equally many ranks each.
            if size % ranks and ranks % size:
                yield UnevenSize(keys[name], size, True)


def caching_length(pattern: str) -> int:
    """Count the layers of a pattern up to the last one that keeps a state or cache of earlier
    tokens; 0 without any."""
    places = [place for place, letter in enumerate(pattern) if KINDS[letter].keeps_past]
    return 1 + max(places, default=-1)


class StageModel(Protocol):
    """The part of a `HybridModel` that `layers_of` reads."""

    mtpkit_config: ModelConfig
    stage_patterns: list[str]
    pg_collection: ProcessGroupCollection
    decoder: HybridStack
    mtp: MultiTokenPredictionBlock
    mtp_process: bool


def layers_of(model: StageModel, heads: bool = True) -> Iterator[tuple[str, nn.Module, LayerKind]]:
    """Yield (name, module, kind) of each layer that a pipeline stage of a `HybridModel` has.

    Args:
        heads: include the layers of the heads.
    """
    stage = model.stage_patterns[model.pg_collection.pp.rank()]
    # There is none if the model was built without base layers.
    for number, layer in enumerate(model.decoder.layers):
        yield f"decoder.layers.{number}", layer, KINDS[stage[number]]

    # Only the last stage has heads.
    if not (heads and model.mtp_process):
        return
    for depth, head in enumerate(model.mtp.layers):
        for number, layer in enumerate(head.mtp_model_layer.layers):
            name = f"mtp.layers.{depth}.layers.{number}"
            yield name, layer, KINDS[model.mtpkit_config.mtp.pattern[number]]
