"""Linears as the layers call them, and the norm that may run before them.

A layer's single call also includes the norm of its input, the activation and the residual. The note
says which of them are fused and which run as separate kernels within the same call; this depends on
the number of rows.

Shape legend: R rows (requests), T = 1 + K tokens per row, N = R * T tokens.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.case import Args, Case, Shapes, size
from mtpkit.kernels import norm
from mtpkit.kernels.linear import linear, reference
from mtpkit.model.kinds.base import Linear
from tests.kernels.inputs import matrix


def fused(shapes: Shapes, one: Linear) -> list[str]:
    """Operations around the product of N tokens that are fused into its kernel."""
    around = ["residual"] * one.residual
    if shapes.device.type != "cuda" or shapes.dtype != torch.bfloat16:
        return around
    from mtpkit.kernels.linear import triton as kernel  # may be missing without a GPU

    count = shapes.count
    if count > kernel.MAX_ROWS or kernel.choose_tile(one.outputs, one.width, count) is None:
        return around
    norm = ["norm"] * (one.norm and count <= kernel.NORMED_ROWS)
    return norm + ([one.activation] if one.activation else []) + around


def note(shapes: Shapes, one: Linear) -> str:
    """Parts of the call that are fused into the kernel of the product, and parts that run as
    separate kernels."""
    around = [("norm", one.norm), (one.activation, one.activation), ("residual", one.residual)]
    within = fused(shapes, one)
    apart = [name for name, there in around if there and name not in within]
    apart += ["gated norm"] * (one.gated_norm is not None)
    return ", ".join(
        f"{' + '.join(map(str, part))} {how}"
        for part, how in ((within, "fused"), (apart, "apart"))
        if part
    )


def calls(shapes: Shapes) -> Iterator[Linear]:
    """Yield the linears of each layer kind of the model, then the heads' own linear and the
    vocabulary's."""
    config = shapes.config
    for kind in shapes.step_kinds:
        yield from kind.linears(config)
    if config.mtp.num_depths:
        yield Linear("eh_proj", config.hidden_size, 2 * config.hidden_size)
    yield Linear("lm_head", config.vocab_size, config.hidden_size)


def linear_case(shapes: Shapes, of: Linear) -> Case:
    """The matrix product of a linear, with the operations around it."""
    config = shapes.config
    count = shapes.count
    gated = of.gated_norm
    group_size = gated.group_size if gated else None

    def make() -> Args:
        return (
            shapes.normal(count, of.width),
            matrix(shapes.normal, of.outputs, of.width),
            shapes.normal(of.width) if of.norm or gated else None,
            shapes.normal(count, gated.projected)[:, : of.width] if gated else None,
            shapes.normal(count, of.outputs) if of.residual else None,
            shapes.normal(of.outputs) if of.bias else None,
        )

    def run(op: Callable[..., Tensor], *args: Tensor | None) -> Tensor:
        x, weight, norm_weight, gate, residual, bias = args
        around = dict(eps=config.layernorm_epsilon, group_size=group_size, activation=of.activation)
        around["zero_centered"] = of.norm and config.layernorm_zero_centered_gamma
        return op(
            x, weight, norm_weight=norm_weight, gate=gate, bias=bias, residual=residual, **around
        )

    def in_float(*args: Tensor | None) -> Tensor:
        return run(reference.linear, *(None if arg is None else arg.float() for arg in args)).to(
            shapes.dtype
        )

    return Case(
        partial(run, linear),
        f"[{count}, {of.width}] x [{of.outputs}, {of.width}]",
        make,
        lambda args: size(*args) + count * of.outputs * shapes.dtype.itemsize,
        flops=2.0 * count * of.outputs * of.width,
        name=f"linear {of.name}",
        reference=in_float,
        note=lambda _: note(shapes, of),
        scratch=(4,),
    )


def rms_norm(shapes: Shapes) -> Case:
    """The norm as a separate kernel: always after the last layer, and before linears that do not
    fuse it."""
    config = shapes.config
    count = shapes.count
    hidden = shapes.config.hidden_size
    rest = config.layernorm_epsilon, config.layernorm_zero_centered_gamma
    fusing = ["norm" in fused(shapes, one) for one in calls(shapes) if one.norm]
    return Case(
        norm.rms_norm,
        f"[{count}, {hidden}]",
        lambda: (shapes.normal(count, hidden), shapes.normal(hidden), *rest),
        lambda args: size(args[0], *args),
        note=lambda _: "final norm, others fused" if fusing and all(fusing) else "",
    )
