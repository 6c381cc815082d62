"""Bytes of a model's matrices as memory holds them, for limits: codes, scales and zero points of
quantised ones, and plain ones in their own dtype.

They are counted in the tensors of a model itself, so that each format counts as what it stores.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mtpkit.config import ModelConfig
from mtpkit.errors import listed
from mtpkit.model.flops import eh_proj_matrix
from mtpkit.model.formats.weight import QuantizedWeight, Weight
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.kinds import KINDS, layers_of
from mtpkit.model.kinds.base import LayerKind, Matrices
from mtpkit.model.mtp import output_weight
from mtpkit.model.quantized import for_drafts, quantized_as


class Held(NamedTuple):
    """Some matrices in memory."""

    bytes: float = 0.0
    fp8: float = 0.0
    """Elements that are multiplied with inputs in fp8."""

    def plus(self, other: "Held") -> "Held":
        """Both together."""
        return Held(self.bytes + other.bytes, self.fp8 + other.fp8)

    def times(self, factor: float) -> "Held":
        """So many times these."""
        return Held(self.bytes * factor, self.fp8 * factor)


@dataclass(frozen=True)
class LayerWeights:
    """The matrices of one layer."""

    always: Held
    """Those that every token uses."""
    expert: Held
    """Those of one routed expert, the mean over all."""
    counted: Matrices
    """Their elements."""

    def experts_read(self, tokens: float) -> float:
        """The expected bytes of routed experts that a batch of `tokens` tokens reads, if each draws
        experts at random."""
        return self.expert.bytes * self.counted.experts.touched(tokens)

    @property
    def fp8(self) -> float:
        """Elements that a token uses with inputs in fp8."""
        return self.always.fp8 + self.expert.fp8 * self.counted.experts.chosen


@dataclass(frozen=True)
class HeadWeights:
    """The matrices of one depth, without the lm_head."""

    eh_proj: Held
    layers: Sequence[LayerWeights]


@dataclass(frozen=True)
class ModelWeights:
    """The matrices of a whole model that decoding multiplies with; on several tensor-parallel
    ranks, those of all ranks together, copies once."""

    base: Sequence[LayerWeights]
    heads: Sequence[HeadWeights]
    output: Held
    """The lm_head."""
    output_quantized: bool = False
    formats: tuple[str, ...] = ()
    """Formats of its quantised matrices."""

    def said(self, dtype: torch.dtype) -> str:
        """The dtype of activations and plain matrices, and the formats of the others, in words."""
        name = str(dtype).removeprefix("torch.")
        if not self.formats:
            return name
        return f"{name} with matrices in {listed(self.formats)}"

    @classmethod
    def in_dtype(cls, config: ModelConfig, dtype: torch.dtype) -> "ModelWeights":
        """The matrices of a config that is not quantised."""
        size = dtype.itemsize

        def layers(pattern: str) -> list[LayerWeights]:
            counted = (KINDS[letter].matrices(config) for letter in pattern)
            return [
                LayerWeights(Held(each.always * size), Held(each.expert * size), each)
                for each in counted
            ]

        head = HeadWeights(Held(eh_proj_matrix(config) * size), layers(config.mtp.pattern))
        output = Held(config.vocab_size * config.hidden_size * size)
        return cls(layers(config.pattern), [head] * config.mtp.num_layers, output)

    @classmethod
    def of(cls, model: HybridModel) -> "ModelWeights":
        """The matrices of a model. Collective over pipeline stages."""
        config = model.mtpkit_config
        names = [(name, _layer(layer, kind, config)) for name, layer, kind in layers_of(model)]
        own = cls(
            [found for name, found in names if name.startswith("decoder.")],
            _heads(model, [found for name, found in names if name.startswith("mtp.")]),
            _output(model),
            model.post_process and isinstance(output_weight(model), QuantizedWeight),
            tuple(sorted(quantized_as(model))),
        )
        group = model.pg_collection.pp
        if group.size() == 1:
            return own
        stages: list[ModelWeights] = [own] * group.size()
        dist.all_gather_object(stages, own, group=group)
        # The last stage has the heads and the lm_head.
        return cls(
            [layer for stage in stages for layer in stage.base],
            stages[-1].heads,
            stages[-1].output,
            stages[-1].output_quantized,
            tuple(sorted({name for stage in stages for name in stage.formats})),
        )


def draft_row_bytes(model: HybridModel, dtype: str) -> float:
    """Bytes of a row of the copy of the lm_head that drafts may have, see `for_drafts`."""
    width = model.mtpkit_config.hidden_size
    return _held(for_drafts(torch.zeros(1, width), dtype)).bytes


def _held(weight: Weight) -> Held:
    """The matrix of a linear on this rank."""
    if isinstance(weight, Tensor):
        return Held(weight.nbytes)
    return Held(sum(tensor.nbytes for tensor in weight.buffers()), weight.fp8_elements)


def _whole(weight: Weight, elements: int) -> Held:
    """The matrix of all ranks, given its elements, in the mean as this rank's part of it."""
    rows, columns = weight.shape
    return _held(weight).times(elements / (rows * columns))


def _matrices(module: nn.Module) -> Mapping[str, Weight]:
    """The matrices of a module on this rank, by name."""
    found: dict[str, Weight] = {
        name: each for name, each in module.named_parameters() if each.dim() == 2
    }
    quantized = (
        (name, each) for name, each in module.named_modules() if isinstance(each, QuantizedWeight)
    )
    return found | dict(quantized)


def _elements(kind: LayerKind, config: ModelConfig) -> Mapping[str, int]:
    """Elements of a layer's matrices on all ranks, by name."""
    found: dict[str, int] = defaultdict(int)
    for name, shape in kind.tensors(config).items():
        # Checkpoints split some matrices into parts, which are named behind them.
        found[name.partition(".weight.")[0] + ".weight" if ".weight." in name else name] += (
            math.prod(shape)
        )
    return found


def _layer(layer: nn.Module, kind: LayerKind, config: ModelConfig) -> LayerWeights:
    counted = kind.matrices(config)
    elements = _elements(kind, config)
    always = Held()
    routed = Held()
    routed_elements = 0
    for name, weight in _matrices(layer).items():
        if ".local_experts." in name:
            routed = routed.plus(_held(weight))
            routed_elements += weight.shape[0] * weight.shape[1]
        else:
            always = always.plus(_whole(weight, elements[name]))
    # A rank may have some of the experts, or a part of each.
    share = counted.expert / routed_elements if routed_elements else 0.0
    return LayerWeights(always, routed.times(share), counted)


def _heads(model: HybridModel, layers: Sequence[LayerWeights]) -> list[HeadWeights]:
    if not model.mtp_process:
        return []
    config = model.mtpkit_config
    length = len(config.mtp.pattern)
    return [
        HeadWeights(
            _whole(head.eh_proj.weight, eh_proj_matrix(config)),
            layers[depth * length : (depth + 1) * length],
        )
        for depth, head in enumerate(model.mtp.layers)
    ]


def _output(model: HybridModel) -> Held:
    if not model.post_process:
        return Held()
    config = model.mtpkit_config
    return _whole(output_weight(model), config.vocab_size * config.hidden_size)
