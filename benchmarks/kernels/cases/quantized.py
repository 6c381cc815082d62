"""Linears and experts with quantised weights, by format, with the bytes that the format takes.

FLOPs are counted only where weights become bf16 before the product: the machine's matrix rate is
that of bf16.

Shape legend: R rows (requests), T = 1 + K tokens per row, N = R * T tokens.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from torch import Tensor

from benchmarks.kernels.case import Args, Case, Shapes, size
from mtpkit.kernels.quantized import Inputs, Matrix, quantized_experts, quantized_linear, reference
from mtpkit.model.kinds.base import Linear
from tests.kernels.quantized import RULES, draw_matrix


class Served(NamedTuple):
    """A format as it is served."""

    matrix: str
    """Name of the matrix for `draw_matrix`."""
    inputs: Inputs


FORMATS = {
    "fp8 block": Served("block", RULES["group"]),
    "fp8 row": Served("row", RULES["token"]),
    "int4": Served("int4", RULES["none"]),
    "nvfp4": Served("nvfp4", RULES["none"]),
}
_MULTIPLE = 16
"""Columns of the smallest group; other widths are not quantised."""


def linears(shapes: Shapes, calls: Iterator[Linear]) -> Iterator[Case]:
    """Yield the case of each linear in each format."""
    for of in calls:
        for name in FORMATS:
            if of.width % _MULTIPLE == 0:
                yield linear(shapes, of, name)


def linear(shapes: Shapes, of: Linear, name: str) -> Case:
    """A linear with quantised weights, with the operations around it."""
    config = shapes.config
    count = shapes.count
    gated = of.gated_norm
    served = FORMATS[name]
    activation = of.activation if of.activation == "relu2" else None

    def make() -> Args:
        return (
            shapes.normal(count, of.width),
            draw_matrix(served.matrix, of.outputs, of.width, device=shapes.device),
            shapes.normal(of.width) if of.norm or gated else None,
            shapes.normal(count, gated.projected)[:, : of.width] if gated else None,
            shapes.normal(count, of.outputs) if of.residual else None,
            shapes.normal(of.outputs) if of.bias else None,
        )

    def run(op: Callable[..., Tensor], *args: Tensor | Matrix | None) -> Tensor:
        x, matrix, norm_weight, gate, residual, bias = args
        return op(
            x,
            matrix,
            inputs=served.inputs,
            norm_weight=norm_weight,
            gate=gate,
            bias=bias,
            residual=residual,
            eps=config.layernorm_epsilon,
            group_size=gated.group_size if gated else None,
            activation=activation,
            zero_centered=of.norm and config.layernorm_zero_centered_gamma,
        )

    def moved(args: Args) -> float:
        written = count * of.outputs * shapes.dtype.itemsize
        return size(*args, *args[1]) + written

    return Case(
        partial(run, quantized_linear),
        f"{of.name} {name}, [{count}, {of.width}] x [{of.outputs}, {of.width}]",
        make,
        moved,
        flops=_flops(served, 2.0 * count * of.outputs * of.width),
        name="quantized_linear",
        reference=partial(run, reference.quantized_linear),
        scratch=(4,),
    )


def experts(shapes: Shapes) -> Iterator[Case]:
    """Yield the case of the routed experts in each format."""
    config = shapes.config
    width = config.moe.latent_size or config.hidden_size
    if width % _MULTIPLE == 0 and config.moe.ffn_hidden_size % _MULTIPLE == 0:
        yield from (_experts(shapes, name, width) for name in FORMATS)


def _experts(shapes: Shapes, name: str, width: int) -> Case:
    """Experts drawn at random for each token; bytes count only those that were drawn."""
    config = shapes.config
    moe = config.moe
    tokens = shapes.count
    inner = moe.ffn_hidden_size
    activation = config.mlp.activation
    rows = inner * (2 if activation == "swiglu" else 1)
    served = FORMATS[name]

    def draw(matrices: Args) -> Args:
        expert_ids = shapes.uniform(tokens, moe.num_experts).topk(moe.router_topk).indices
        mixing = shapes.uniform(tokens, moe.router_topk).float()
        return shapes.normal(tokens, width), *matrices, expert_ids, mixing, activation

    def make() -> Args:
        one = partial(draw_matrix, served.matrix, moe.num_experts, device=shapes.device)
        return draw((one(rows, width), one(width, inner)))

    def moved(args: Args) -> float:
        x, fc1, fc2, expert_ids, *_ = args
        drawn = len(expert_ids.unique()) / moe.num_experts
        return drawn * size(*fc1, *fc2) + 2 * size(x)

    return Case(
        partial(quantized_experts, inputs=served.inputs),
        f"{name}, [{tokens}, {width}], {moe.router_topk} of {moe.num_experts} x [{rows}, {width}]",
        make,
        moved,
        flops=_flops(served, 2.0 * tokens * moe.router_topk * width * (rows + inner)),
        name="quantized_experts",
        reference=partial(reference.quantized_experts, inputs=served.inputs),
        more=lambda args: draw(args[1:3]),
    )


def _flops(served: Served, flops: float) -> float:
    """FLOPs at the rate of bf16; 0 if both sides are fp8."""
    return flops if served.inputs.rule == "none" else 0.0
