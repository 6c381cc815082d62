"""Weight gradients of a repeated head, summed over its depths in fp32.

Autograd sums what the K uses of a weight contribute in the weight's own dtype: in bf16 a contribution that is 256 times
smaller than the sum so far is lost. Here each use adds its contribution to `parameter.main_grad` (megatron-core's name
for the fp32 gradient that the optimizer keeps) as soon as the backward has it, and `parameter.grad` stays None.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor, nn

from mtpkit.model.inputs import LayerInput
from mtpkit.model.mtp import head_of, mtp_forward


class _IntoMainGrad(torch.autograd.Function):
    """The parameter itself, whose gradient goes to `main_grad`."""

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
    """Uses inside of parameters in `module` that have a `main_grad` add their gradients to it, one by one."""
    found = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and parameter.requires_grad and hasattr(parameter, "main_grad")
    ]
    try:
        for owner, name, parameter in found:
            owner._parameters[name] = _IntoMainGrad.apply(parameter, parameter.main_grad)
        yield
    finally:
        for owner, name, parameter in found:
            owner._parameters[name] = parameter


def training_forward(model: HybridModel, depth: int, hidden: Tensor, token_ids: Tensor, inputs: LayerInput) -> Tensor:
    """`mtp_forward` for training, see the module."""
    with gradients_into_main(head_of(model, depth)):
        return mtp_forward(model, depth, hidden, token_ids, inputs)
