"""Linears as the layers call them, and what runs around them in kernels of its own.

A layer's one call holds the norm of its input, the activation and the residual too. What of that is fused, and what
runs apart as a further kernel within the same call, depends on the rows: the note says it.

Shape legend: R rows (requests), T = 1 + K tokens a row, N = R * T tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from mtpkit.bench.kernel_inputs import Args, Case, Shapes, size
from mtpkit.config.sections import AttentionConfig, Mamba2Config, MlpConfig
from mtpkit.kernels import activation as activations
from mtpkit.kernels import norm
from mtpkit.kernels.linear import linear, reference


@dataclass(frozen=True)
class Call:
    """A layer's weight [outputs, width], and what the layer has `linear` do around it."""

    name: str
    outputs: int
    width: int
    norm: bool = False
    gated: bool = False
    """The norm is Mamba's, of the input times silu(gate)."""
    activation: Literal["relu2"] | None = None
    residual: bool = False

    def fuses(self, shapes: Shapes) -> bool:
        """Whether N tokens are one kernel with norm and activation in it."""
        if shapes.device.type != "cuda" or shapes.dtype != torch.bfloat16:
            return False
        from mtpkit.kernels.linear import triton as kernel  # there may be none without a GPU

        return _count(shapes) <= kernel.MAX_ROWS and kernel.choose_tile(self.outputs, self.width) is not None

    def note(self, shapes: Shapes) -> str:
        """What of the call is in the kernel of the product, and what is not."""
        around = [name for name, there in (("norm", self.norm), (self.activation, self.activation)) if there]
        fused, apart = (around, []) if self.fuses(shapes) else ([], around)
        fused += ["residual"] * self.residual
        apart += ["gated norm"] * self.gated
        return ", ".join(
            f"{' + '.join(map(str, part))} {how}" for part, how in ((fused, "fused"), (apart, "apart")) if part
        )


def _count(shapes: Shapes) -> int:
    """N."""
    return shapes.rows * shapes.tokens


def calls(shapes: Shapes) -> list[Call]:
    """Those of each layer kind that the model has; see `mtpkit.model.layers`."""
    config = shapes.config
    hidden, inner = config.hidden_size, config.mamba2.inner
    sizes, width = config.attention, config.mlp.ffn_hidden_size
    queries, keys = sizes.num_attention_heads * sizes.kv_channels, sizes.num_query_groups * sizes.kv_channels
    found = []
    if config.has(Mamba2Config):
        found.append(Call("in_proj", config.mamba2.projected, hidden, norm=True))
        found.append(Call("out_proj", hidden, inner, gated=True, residual=True))
    if config.has(AttentionConfig):
        found.append(Call("linear_qkv", queries + 2 * keys, hidden, norm=True))
        found.append(Call("linear_proj", hidden, queries, residual=True))
    if config.has(MlpConfig):
        relu2: Literal["relu2"] | None = "relu2" if config.mlp.activation == "relu2" else None
        rows = (2 if config.mlp.gated else 1) * width
        found.append(Call("linear_fc1", rows, hidden, norm=True, activation=relu2))
        found.append(Call("linear_fc2", hidden, width, residual=True))
    if config.mtp.num_depths:
        found.append(Call("eh_proj", hidden, 2 * hidden))
    return [*found, Call("lm_head", config.vocab_size, hidden)]


def linears(shapes: Shapes) -> Iterator[Case]:
    """The matrix products of each layer kind, of the heads' own and of the vocabulary."""
    return (_linear(shapes, call) for call in calls(shapes))


def _linear(shapes: Shapes, of: Call) -> Case:
    config, count = shapes.config, _count(shapes)
    group_size = of.width // config.mamba2.num_groups if of.gated else None
    own = partial(linear, eps=config.layernorm_epsilon, group_size=group_size, activation=of.activation)
    twin = partial(reference.linear, eps=config.layernorm_epsilon, group_size=group_size, activation=of.activation)

    def make() -> Args:
        return (
            shapes.normal(count, of.width),
            shapes.normal(of.outputs, of.width, std=1 / math.sqrt(of.width)),
            shapes.normal(of.width) if of.norm or of.gated else None,
            _gate(shapes) if of.gated else None,
            shapes.normal(count, of.outputs) if of.residual else None,
        )

    def call(x: Tensor, weight: Tensor, *rest: Tensor | None) -> Tensor:
        norm_weight, gate, residual = rest
        return own(x, weight, norm_weight=norm_weight, gate=gate, residual=residual)

    def in_float(x: Tensor, weight: Tensor, *rest: Tensor | None) -> Tensor:
        norm_weight, gate, residual = (None if arg is None else arg.float() for arg in rest)
        y = twin(x.float(), weight.float(), norm_weight=norm_weight, gate=gate, residual=residual)
        return y.to(shapes.dtype)

    return Case(
        call,
        f"[{count}, {of.width}] x [{of.outputs}, {of.width}]",
        make,
        lambda args: _all(args) + count * of.outputs * shapes.dtype.itemsize,
        flops=2.0 * count * of.outputs * of.width,
        name=f"linear {of.name}",
        reference=in_float,
        note=lambda _: of.note(shapes),
        scratch=(4,),
    )


def _gate(shapes: Shapes) -> Tensor:
    """[N, inner] z, a slice of Mamba's projection."""
    config = shapes.config
    return shapes.normal(_count(shapes), config.mamba2.projected)[:, : config.mamba2.inner]


def _all(args: Args) -> float:
    """Bytes of all tensors."""
    return size(*(arg for arg in args if isinstance(arg, Tensor)))


def _in_and_out(args: Args) -> float:
    """Bytes of an op that gives something like its first input and reads all tensors."""
    return size(args[0]) + _all(args)


def rms_norm(shapes: Shapes) -> Case:
    """The norm as a kernel of its own: always after the last layer, before others where the linear does not fuse it."""
    count, hidden, eps = _count(shapes), shapes.config.hidden_size, shapes.config.layernorm_epsilon
    normed = [call for call in calls(shapes) if call.norm]
    fused = bool(normed) and all(call.fuses(shapes) for call in normed)
    return Case(
        norm.rms_norm,
        f"[{count}, {hidden}]",
        lambda: (shapes.normal(count, hidden), shapes.normal(hidden), eps),
        _in_and_out,
        note=lambda _: "final norm, others fused" if fused else "",
    )


def gated_norm(shapes: Shapes) -> Case:
    """The norm before Mamba's output projection, which no linear fuses."""
    config, count = shapes.config, _count(shapes)
    inner = config.mamba2.inner

    def make() -> Args:
        group_size = inner // config.mamba2.num_groups
        return shapes.normal(count, inner), _gate(shapes), shapes.normal(inner), group_size, config.layernorm_epsilon

    return Case(norm.gated_rms_norm, f"[{count}, {inner}]", make, _in_and_out)


def activation(shapes: Shapes) -> Iterator[Case]:
    """The activation of feed-forward layers, unless fc1 fuses it."""
    count, width = _count(shapes), shapes.config.mlp.ffn_hidden_size
    if shapes.config.mlp.activation == "swiglu":
        yield Case(
            activations.swiglu,
            f"[{count}, {2 * width}]",
            lambda: (shapes.normal(count, 2 * width),),
            lambda args: 1.5 * size(args[0]),
        )
    elif not any(call.activation and call.fuses(shapes) for call in calls(shapes)):
        yield Case(activations.relu2, f"[{count}, {width}]", lambda: (shapes.normal(count, width),), _in_and_out)
