"""Weight gradients of a repeated head, summed over its depths in fp32.

Autograd would sum the contributions of the K uses of a weight in the weight's dtype: bf16 loses a
contribution that is 256 times smaller than the sum so far. Here the backward pass adds each
contribution to `parameter.main_grad` (megatron-core's name for the optimizer's fp32 gradient), and
`parameter.grad` stays None. megatron-core's linears compute their contribution and add it in one
fp32 product, without a temporary tensor; the contribution of experts that run together is first
rounded to the weight's dtype.
"""

import mtpkit.platform  # noqa: F401  (it prepares megatron-core's import, so it comes first)

# isort: split
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor, nn

from mtpkit.model.hybrid import HybridModel
from mtpkit.model.inputs import LayerInput
from mtpkit.model.mtp import depth_forward, head_of
from mtpkit.platform import accumulate_weight_gradients


def _accumulate(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add grad_output [n, out] transposed times inputs [n, in] to main_grad [out, in] fp32."""
    if not len(inputs):  # an expert without tokens
        return
    # Only CUDA has a product of bf16 that adds to fp32 without rounding in between.
    if inputs.is_cuda and inputs.dtype != main_grad.dtype:
        torch.addmm(main_grad, grad_output.t(), inputs, out_dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.addmm_(grad_output.t().to(main_grad.dtype), inputs.to(main_grad.dtype))


accumulate_weight_gradients(_accumulate)
_LINEARS = (layers.ColumnParallelLinear, layers.RowParallelLinear)


class _IntoMainGrad(torch.autograd.Function):
    """The identity on a parameter, whose gradient goes to `main_grad`; megatron-core's linears do
    this themselves."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, main_grad: Tensor) -> Tensor:
        ctx.main_grad = main_grad
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.main_grad.add_(grads[0])
        return None, None


@contextmanager
def gradients_into_main(module: nn.Module) -> Iterator[None]:
    """A context in which each use of a parameter in `module` that has a `main_grad` adds its
    gradient to `main_grad`.

    Every backward pass through such a use adds to it, even a pass that is run only for other
    gradients. Do not nest the context on one module.
    """
    found = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and parameter.requires_grad and hasattr(parameter, "main_grad")
    ]
    linears = [
        owner for owner, name, _ in found if name == "weight" and isinstance(owner, _LINEARS)
    ]
    others = [
        entry for entry in found if entry[1] != "weight" or not isinstance(entry[0], _LINEARS)
    ]
    try:
        # megatron-core's own switch: a linear adds up in fp32 inside the product.
        for linear in linears:
            linear.gradient_accumulation_fusion = True
        for owner, name, parameter in others:
            owner._parameters[name] = _IntoMainGrad.apply(parameter, parameter.main_grad)
        yield
    finally:
        for linear in linears:
            linear.gradient_accumulation_fusion = False
        for owner, name, parameter in others:
            owner._parameters[name] = parameter


def training_forward(
    model: HybridModel, depth: int, hidden: Tensor, token_ids: Tensor, inputs: LayerInput
) -> tuple[Tensor, Tensor]:
    """`depth_forward` with gradients into `main_grad`."""
    with gradients_into_main(head_of(model, depth)):
        return depth_forward(model, depth, hidden, token_ids, inputs)
