"""Weight gradients of a repeated head, summed over its depths in fp32.

Autograd sums what the K uses of a weight contribute in the weight's own dtype: in bf16 a contribution that is 256 times
smaller than the sum so far is lost. Here each use adds its contribution to `parameter.main_grad` (megatron-core's name
for the fp32 gradient that the optimizer keeps) as soon as the backward has it, and `parameter.grad` stays None. The
product that gives the contribution of one of megatron-core's linears is itself added up in fp32, without a tensor of
its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor, nn

from mtpkit.model.hybrid import HybridModel
from mtpkit.model.inputs import LayerInput
from mtpkit.model.mtp import head_of, mtp_forward
from mtpkit.platform import accumulate_weight_gradients


def _accumulate(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add grad_output [n, out] transposed times inputs [n, in] to main_grad [out, in] fp32."""
    if not len(inputs):  # an expert without tokens
        return
    if inputs.is_cuda and inputs.dtype != main_grad.dtype:
        torch.addmm(main_grad, grad_output.t(), inputs, out_dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.addmm_(grad_output.t().to(main_grad.dtype), inputs.to(main_grad.dtype))


accumulate_weight_gradients(_accumulate)
_LINEARS = (layers.ColumnParallelLinear, layers.RowParallelLinear)


class _IntoMainGrad(torch.autograd.Function):
    """The parameter itself, whose gradient goes to `main_grad`; megatron-core's linears see to that themselves."""

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
    """Uses inside of parameters in `module` that have a `main_grad` add their gradients to it, one by one.

    Every backward through them does, even one that asks for other gradients alone. Not to be nested on one module.
    """
    found = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and parameter.requires_grad and hasattr(parameter, "main_grad")
    ]
    linears = [owner for owner, name, _ in found if name == "weight" and isinstance(owner, _LINEARS)]
    others = [entry for entry in found if entry[1] != "weight" or not isinstance(entry[0], _LINEARS)]
    try:
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


def training_forward(model: HybridModel, depth: int, hidden: Tensor, token_ids: Tensor, inputs: LayerInput) -> Tensor:
    """`mtp_forward` for training, see the module."""
    with gradients_into_main(head_of(model, depth)):
        return mtp_forward(model, depth, hidden, token_ids, inputs)
