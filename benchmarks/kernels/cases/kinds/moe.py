"""Mixtures of experts: the router and the routed experts.

Shape legend: R rows (requests), T = 1 + K tokens per row, N = R * T tokens.
"""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from benchmarks.kernels.case import Args, Case, Shapes, size
from benchmarks.kernels.cases import quantized
from mtpkit.kernels import moe
from tests.kernels.inputs import expert_weights, matrix


def decode(shapes: Shapes) -> Iterator[Case]:
    """The ops of a step."""
    yield from (
        router_logits(shapes),
        route(shapes, shapes.count),
        expert_mlp(shapes, shapes.count),
    )
    yield from quantized.experts(shapes)


def prefill(shapes: Shapes, lens: tuple[int, ...]) -> Iterator[Case]:
    """The ops of prompts, with names that differ from those of a decode step."""
    for case in (route(shapes, sum(lens)), expert_mlp(shapes, sum(lens))):
        yield replace(case, name=f"{case.op}, prefill")


def router_logits(shapes: Shapes) -> Case:
    """The norm before a mixture of experts and the router's product."""
    config = shapes.config
    count = shapes.count
    width = config.hidden_size
    experts = config.moe.num_experts

    def make() -> Args:
        zero_centered = config.layernorm_zero_centered_gamma
        norm = shapes.normal(width), config.layernorm_epsilon, zero_centered
        return shapes.normal(count, width), *norm, matrix(shapes.normal, experts, width)

    return Case(
        moe.router_logits,
        f"[{count}, {width}] x [{experts}, {width}]",
        make,
        lambda args: 2 * size(args[0]) + size(args[-1]) + 4 * count * experts,
        judge=lambda args, out: out[1],
    )


def route(shapes: Shapes, tokens: int) -> Case:
    """Choosing the experts of each token."""
    config = shapes.config
    count = shapes.config.moe.num_experts
    rest = config.moe.routing

    def make() -> Args:
        bias = shapes.normal(count).float() if config.moe.router_enable_expert_bias else None
        return shapes.normal(tokens, count).float(), bias, *rest

    def chosen(args: Args, out: tuple[Tensor, Tensor]) -> Tensor:
        expert_ids, weights = out
        return args[0].new_zeros(args[0].shape).scatter(1, expert_ids, weights)

    return Case(
        moe.route,
        f"[{tokens}, {count}], {rest.top_k} each",
        make,
        lambda args: size(args[0], args[1]) + tokens * rest.top_k * 12,
        judge=chosen,
    )


def expert_mlp(shapes: Shapes, tokens: int) -> Case:
    """The routed experts, drawn at random for each token; bytes count only the experts that were
    drawn."""
    config = shapes.config
    count = config.moe.num_experts
    inner = config.moe.ffn_hidden_size
    top_k = config.moe.router_topk
    width = config.moe.latent_size or config.hidden_size
    rows = inner * (2 if config.mlp.activation == "swiglu" else 1)

    def draw(weights: Args) -> Args:
        expert_ids = shapes.uniform(tokens, count).topk(top_k).indices
        mixing = shapes.uniform(tokens, top_k).float()
        return shapes.normal(tokens, width), *weights, expert_ids, mixing, config.mlp.activation

    def make() -> Args:
        return draw(expert_weights(shapes.normal, count, width, inner, config.mlp.activation))

    def moved(args: Args) -> float:
        x, fc1, fc2, expert_ids, *_ = args
        return len(expert_ids.unique()) / count * size(fc1, fc2) + 2 * size(x)

    return Case(
        moe.expert_mlp,
        f"[{tokens}, {width}], {top_k} of {count} x [{rows}, {width}]",
        make,
        moved,
        flops=2.0 * tokens * top_k * width * (rows + inner),
        more=lambda args: draw(args[1:3]),
    )
