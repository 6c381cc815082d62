"""Mixture of experts: where tokens go, and what the routed experts make of them.

Shape legend: N = R * T tokens of a step, E experts, k experts a token, h their width, f their inner width.
"""

import math

from torch import Tensor

from mtpkit.bench.kernel_inputs import Args, Case, Shapes, size
from mtpkit.kernels import moe


def route(shapes: Shapes, tokens: int) -> Case:
    """The experts of each token."""
    config, count = shapes.config, shapes.config.moe.num_experts
    rest = (config.moe.router_topk, config.moe.router_topk_scaling_factor)
    groups = (config.moe.router_num_groups, config.moe.router_group_topk)

    def make() -> Args:
        logits = shapes.normal(tokens, count).float()
        return logits, shapes.normal(count).float(), *rest, *groups

    def chosen(args: Args, out: tuple[Tensor, Tensor]) -> Tensor:
        expert_ids, weights = out
        return args[0].new_zeros(args[0].shape).scatter(1, expert_ids, weights)

    return Case(
        moe.route,
        f"[{tokens}, {count}], {rest[0]} each",
        make,
        lambda args: size(args[0], args[1]) + tokens * rest[0] * 12,
        judge=chosen,
    )


def expert_mlp(shapes: Shapes, tokens: int) -> Case:
    """The routed experts, each token's drawn at random; bytes are of the experts that were drawn."""
    config = shapes.config
    count, inner, top_k = config.moe.num_experts, config.moe.ffn_hidden_size, config.moe.router_topk
    width, rows = config.moe.latent_size or config.hidden_size, inner * (2 if config.mlp.activation == "swiglu" else 1)

    def draw(weights: Args) -> Args:
        expert_ids = shapes.uniform(tokens, count).topk(top_k).indices
        mixing = shapes.uniform(tokens, top_k).float()
        return shapes.normal(tokens, width), *weights, expert_ids, mixing, config.mlp.activation

    def make() -> Args:
        return draw((_matrices(shapes, count, rows, width), _matrices(shapes, count, width, inner)))

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


def _matrices(shapes: Shapes, *sizes: int) -> Tensor:
    return shapes.normal(*sizes, std=1 / math.sqrt(sizes[-1]))
