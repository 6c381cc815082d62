"""Models with random weights drawn on a device, in bfloat16 or fp32, or with matrices in a
quantisation format.

Matrices are quantised layer by layer, as soon as a layer is drawn, so that a model whose matrices
fit only in their format can be made.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from mtpkit.bench.settings import HeadFormat, PublishedFormat
from mtpkit.config import ModelConfig
from mtpkit.engine.requests.model_factory import ModelFactory
from mtpkit.kernels.quantized import Inputs
from mtpkit.model import build_model
from mtpkit.model.build import init_weights
from mtpkit.model.formats import INPUT_SCALE, ONLINE, Format, Fp8, Int4, Nvfp4
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.kinds import layers_of
from mtpkit.model.kinds.base import Draw
from mtpkit.model.quantized import allocate, quantizable_in, quantize_linear, waiting_in

_GROUPS = (128, 64, 32, 16)
"""Columns of a group of int4: the first of these that divides a width."""


_INPUT_SCALE = 1 / 16
"""Scale of inputs that have a fixed one. Inputs up to 448 / 16 = 28 are not cut, and those of
random models are smaller."""


@dataclass(frozen=True)
class _Rule:
    """How the matrices of a model are quantised."""

    format: Callable[[str, int], Format | None]
    """Format of a matrix by the letter of its layer and by its width, a multiple of 16; None: it is
    not quantised."""
    heads: bool = False
    """Whether the layers of heads are quantised, too, as in checkpoints in this format."""
    output: Format | None = None
    """Format of the lm_head."""


_STATIC = Fp8(rows=None, columns=None, scale="weight_scale", inputs=Inputs("static"))
_LIGHTNING: Mapping[str, Format] = {"E": Nvfp4(), "-": Nvfp4(), "M": _STATIC}
_RULES: Mapping[str, _Rule] = {
    "fp8": _Rule(lambda letter, width: ONLINE),
    "fp8-blocks": _Rule(lambda letter, width: Fp8(), heads=True),
    "int4": _Rule(lambda letter, width: Int4(columns=next(n for n in _GROUPS if not width % n))),
    "nvfp4": _Rule(lambda letter, width: Nvfp4()),
    "nemotron-nvfp4": _Rule(lambda letter, width: _LIGHTNING.get(letter), output=Nvfp4()),
}


@torch.no_grad()
def draw_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    weight_format: PublishedFormat | Literal["fp8"] | None = None,
    head_format: HeadFormat | None = None,
    **parallel: Any,
) -> HybridModel:
    """A model whose random weights are drawn on the device, and whose outputs depend on all earlier
    tokens, so that a wrong cache shows in the tokens: with the usual initialisation, the best
    tokens are the same without state or attention.

    Args:
        weight_format: format of the linears and experts of the base, for "fp8-blocks" of the heads'
            layers, and for "nemotron-nvfp4" of the lm_head; "fp8" is that of `quantize_base`.
            Routers, input projections of heads, and matrices with a size that is not a multiple of
            16 are in `dtype`.
        head_format: format of the heads' layers; None: as `weight_format` says.
        parallel: further arguments of `build_model`.
    """
    rule = None if weight_format is None else _RULES[weight_format]
    head_rule = rule if rule is not None and rule.heads else None
    if head_format is not None:
        head_rule = _RULES[head_format]
    waiting = rule is not None or head_rule is not None
    model = build_model(config, dtype, device, init="none", waiting=waiting, **parallel)
    names = {module: name for name, module in model.named_modules()}
    layers = [*layers_of(model)]
    in_layers = {module for _, layer, _ in layers for module in waiting_in(layer)}
    for module in [*waiting_in(model)]:
        if module not in in_layers:
            allocate(module, device)
    init_weights(model, config, seed=0, init="device")

    draw = Draw(torch.Generator().manual_seed(0))
    for place, layer, kind in layers:
        in_base = place.startswith("decoder.")
        if waiting:
            for module in [*waiting_in(layer)]:
                allocate(module, device)
            init_weights(model, config, seed=0, prefix=f"{names[layer]}.", init="device")
        if in_base:
            kind.depend_on_context(layer, config, draw)
        own = rule if in_base else head_rule
        if own is not None:
            for module in [*quantizable_in(layer)]:
                _quantize(module, own.format(kind.letter, module.weight.shape[1]))
    if rule is not None and model.post_process and not config.tie_word_embeddings:
        _quantize(model.output_layer, rule.output)
    return model.requires_grad_(False)


def _quantize(module: Any, format_: Format | None) -> None:
    """Quantise the weight of a linear, if there is a format for it."""
    if format_ is None:
        return
    others = {}
    if format_.inputs.rule == "static":
        others[INPUT_SCALE] = torch.full((1, 1), _INPUT_SCALE, device=module.weight.device)
    quantize_linear(module, format_, **others)


@dataclass(frozen=True)
class DrawnModel(ModelFactory):
    """A model whose weights are drawn by the processes that decode with it."""

    name: str
    mtpkit_config: ModelConfig = field(repr=False)
    weight_format: PublishedFormat | None = None
    """See `draw_model`."""

    def __str__(self) -> str:
        return self.name

    def make(
        self,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Literal["fp8"] | None,
        **parallel: Any,
    ) -> HybridModel:
        """See `ModelFactory`."""
        drawn_as = self.weight_format or quantization
        return draw_model(self.mtpkit_config, dtype, device, drawn_as, **parallel)
