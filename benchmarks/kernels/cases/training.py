"""The ops that training has and decoding lacks: backward passes, the losses, and the update.

Inputs are one sequence of one document. They are copied before differentiation, and times include
the copies.

Shape legend: s sequence, K depths, V vocabulary, h hidden size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.case import Args, Case, Shapes, size
from mtpkit.kernels import attention as ops
from mtpkit.kernels import linear as linears
from mtpkit.kernels.adamw import adamw_
from mtpkit.kernels.attention import reference
from mtpkit.kernels.head_loss import LossKind
from mtpkit.training.config.settings import LossConfig
from mtpkit.training.loss import head_losses
from tests.kernels.inputs import matrix


class Heads(NamedTuple):
    """Sizes of attention over sequences."""

    queries: int
    """Heads of queries."""
    keys: int
    """Heads of keys and values."""
    key_width: int
    value_width: int


def _attention_flops(sizes: Heads, length: int, products: int) -> float:
    """FLOPs of `products` matrix products of scores or values, half of which is masked."""
    return products * length**2 * sizes.queries * (sizes.key_width + sizes.value_width) / 2


def _projections(shapes: Shapes, length: int, sizes: Heads, depths: int = 1) -> Args:
    """q [1, s, heads, d], and keys [1, s, kv_heads, d] and values [1, s, kv_heads, e] of each depth
    in turn."""
    heads, groups, keys, values = sizes
    widths = (keys, values) * depths
    return shapes.normal(1, length, heads, keys), *(
        shapes.normal(1, length, groups, width) for width in widths
    )


def differentiated(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Wrap `function` to return its output and its inputs' gradients; the output's is 1 /
    sqrt(output size)."""

    def both(*tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.inference_mode(False), torch.enable_grad():
            leaves = [tensor.clone().requires_grad_() for tensor in tensors]
            output = function(*leaves)
            return output.detach(), *torch.autograd.grad(
                output, leaves, torch.full_like(output, output.numel() ** -0.5)
            )

    return both


def sequence_attention(shapes: Shapes, length: int, sizes: Heads) -> Case:
    """Attention of the base, which is not differentiated."""
    return Case(
        ops.sequence_attention,
        f"s = {length}",
        lambda: _projections(shapes, length, sizes),
        lambda args: size(args[0], *args),
        flops=_attention_flops(sizes, length, 2),
    )


def depth_attention(shapes: Shapes, length: int, sizes: Heads) -> Case:
    """Attention of the last depth, and its backward."""

    def split(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        def whole(q: Tensor, *keys: Tensor) -> Tensor:
            return function(q, *keys[:2], list(keys[2::2]), list(keys[3::2]))

        return differentiated(whole)

    return Case(
        split(ops.depth_attention),
        f"s = {length}, depth {shapes.k}, with backward",
        lambda: _projections(shapes, length, sizes, shapes.k),
        lambda args: size(args[0], *args) + size(args[0], *args, *args),
        flops=_attention_flops(sizes, length, 2 + 5),
        name="depth_attention",
        reference=split(reference.depth_attention),
    )


def quantize_rows(shapes: Shapes, length: int) -> Case:
    """Quantizing inputs of the base's matrices to fp8."""
    hidden = shapes.config.hidden_size

    def value(args: Args, out: tuple[Tensor, Tensor]) -> Tensor:
        return out[0].float() * out[1]

    return Case(
        linears.quantize_rows,
        f"[{length}, {hidden}]",
        lambda: (shapes.normal(length, hidden),),
        lambda args: size(args[0]) + args[0].numel() + 4 * length,
        judge=value,
    )


def update(shapes: Shapes) -> Case:
    """AdamW on one square matrix."""
    count = shapes.config.hidden_size**2

    def make() -> Args:
        grad, master, first = (shapes.normal(count, dtype=torch.float32) for _ in range(3))
        second = shapes.uniform(count, dtype=torch.float32)
        return grad, master, first, second, 10, 1e-3, (0.9, 0.95), 1e-8, 0.01

    return Case(adamw_, f"[{count}]", make, lambda args: 2 * size(*args[:4]))


def losses(shapes: Shapes, length: int, kind: LossKind) -> Case:
    """The loss of all depths through the frozen lm_head, and the gradient with respect to the
    heads' outputs."""
    config = shapes.config
    depths = shapes.k

    def make() -> Args:
        states = [shapes.normal(length, config.hidden_size) for _ in range(1 + depths)]
        return (
            matrix(shapes.normal, config.vocab_size, config.hidden_size),
            *states,
        )

    targets = shapes.ints(config.vocab_size, length)
    mask = torch.ones(depths, length, dtype=torch.bool, device=shapes.device)

    def ours(weight: Tensor, teacher: Tensor, *students: Tensor) -> tuple[Tensor, ...]:
        def total(*leaves: Tensor) -> Tensor:
            return head_losses(
                leaves, teacher.clone(), weight, targets.clone(), mask.clone(), LossConfig(kind)
            )[0]

        return differentiated(total)(*students)

    def plain(weight: Tensor, teacher: Tensor, *students: Tensor) -> tuple[Tensor, ...]:
        def total(*leaves: Tensor) -> Tensor:
            head = weight.clone()
            base = (teacher.clone() @ head.t()).float().log_softmax(-1)
            found = []
            for leaf in leaves:
                draft = (leaf @ head.t()).float().log_softmax(-1)
                if kind == "ce":
                    found.append(F.nll_loss(draft, targets.clone(), reduction="sum"))
                elif kind == "tv":
                    found.append((base.exp() - draft.exp()).abs().sum() / 2)
                else:
                    found.append(F.kl_div(draft, base, reduction="sum", log_target=True))
            return torch.stack(found)

        return differentiated(total)(*students)

    return Case(
        ours,
        f"[{length}, {config.hidden_size}] x {1 + depths}, V = {config.vocab_size}, with gradient",
        make,
        lambda args: size(*args) + size(*args[2:]),
        flops=2.0 * length * config.vocab_size * config.hidden_size * (1 + 2 * depths),
        name=f"head_losses {kind}",
        reference=plain,
        # rounding flips the sign of p - q where they are close
        tolerance=0.1 if kind == "tv" else None,
    )
