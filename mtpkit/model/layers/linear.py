"""megatron-core's parallel linears, run as plain matrix products if no gradient is needed."""

from functools import partial
from typing import Literal

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear as MegatronColumnParallelLinear
from megatron.core.tensor_parallel import RowParallelLinear as MegatronRowParallelLinear
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mtpkit.kernels.norm import rms_norm
from mtpkit.model.collectives import all_reduce
from mtpkit.model.formats.weight import QuantizedWeight, multiply, product
from mtpkit.model.layers.base import NoExtraState, linear_of
from mtpkit.model.layers.norm import ACTIVATIONS, GatedRMSNorm, norm_weight
from mtpkit.model.transformer_config import TransformerConfig


def is_plain(
    module: "ColumnParallelLinear | RowParallelLinear", *inputs: Tensor | QuantizedWeight | None
) -> bool:
    """Return whether the linear is only a matrix product, possibly with a bias and a sum over
    ranks: no gradient to `inputs` or the bias, no sequence parallelism."""
    tensors = (*inputs, module.bias)
    differentiated = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )
    return not differentiated and not module.sequence_parallel


class MaybeQuantized:
    """Mixin of megatron-core's linears, whose own product gets the widened matrix in the backward
    if `weight` is a `QuantizedWeight`."""

    quantizable = True
    """Whether `weight` may be a `QuantizedWeight`."""

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: ProcessGroup | None,
        **rest: object,
    ) -> Tensor:
        if isinstance(weight, Tensor):
            return super()._forward_impl(  # type: ignore[misc]
                input,
                weight,
                bias=bias,
                allreduce_dgrad=allreduce_dgrad,
                sequence_parallel=sequence_parallel,
                tp_group=tp_group,
                **rest,
            )
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        return product(input, weight, bias)


class ColumnParallelLinear(MaybeQuantized, MegatronColumnParallelLinear):
    """Linear whose output features are split over tensor-parallel ranks."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Map input_ [s, b, in] to (output [s, b, out / tp], bias for the caller to add)."""
        used = self.weight if weight is None else weight
        gathers = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if is_plain(self, input_, used) and (self.tp_group.size() == 1 or not gathers):
            output = multiply(
                input_.flatten(0, -2), used, bias=self.bias, early=self.tp_group.size() > 1
            )
            return output.view(*input_.shape[:-1], len(used)), None
        return super().forward(input_, weight, runtime_gather_output)


class NormColumnParallelLinear(ColumnParallelLinear):
    """Column-parallel linear of the RMS norm of its input; the norm's weight is
    `layer_norm_weight`, as in Megatron."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: object
    ) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.layer_norm_weight = norm_weight(input_size, config)

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Norm input_ [s, b, input_size] and multiply; returns (output [s, b, output_size / tp],
        bias)."""
        given = weight is not None or runtime_gather_output is not None
        if not given and is_plain(self, input_, self.weight, self.layer_norm_weight):
            return self._fused(input_, None), None
        product = partial(
            super().forward, weight=weight, runtime_gather_output=runtime_gather_output
        )
        norm = partial(rms_norm, eps=self.eps, zero_centered=self.zero_centered)
        return linear_of(product, norm, input_, self.layer_norm_weight)

    def normed(self, input_: Tensor) -> Tensor:
        """Return only the norm of input_ [..., input_size]."""
        return rms_norm(input_, self.layer_norm_weight, self.eps, self.zero_centered)

    def activated(self, input_: Tensor, activation: Literal["relu2", "swiglu"]) -> Tensor:
        """Return the activation of the output; with few rows, `relu2` is fused into the product's
        kernel."""
        if activation == "relu2" and is_plain(self, input_, self.weight, self.layer_norm_weight):
            return self._fused(input_, activation)
        return ACTIVATIONS[activation](self(input_)[0])

    def _fused(self, input_: Tensor, activation: Literal["relu2"] | None) -> Tensor:
        output = multiply(
            input_.flatten(0, -2),
            self.weight,
            norm_weight=self.layer_norm_weight,
            eps=self.eps,
            zero_centered=self.zero_centered,
            bias=self.bias,
            activation=activation,
            early=self.tp_group.size() > 1,
        )
        return output.view(*input_.shape[:-1], len(self.weight))


class CopiedLinear(NoExtraState, nn.Module):
    """Linear without bias that every tensor-parallel rank holds whole."""

    quantizable = True

    def __init__(self, input_size: int, output_size: int, config: TransformerConfig) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
        )
        # Under sequence parallelism each rank sees part of the sequence; this flag sums the
        # gradients over ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: Tensor) -> Tensor:
        """Map input_ [..., in] to [..., out]."""
        if torch.is_grad_enabled():
            return product(input_, self.weight)
        output = multiply(input_.flatten(0, -2), self.weight)
        return output.view(*input_.shape[:-1], len(self.weight))


class RowParallelLinear(MaybeQuantized, MegatronRowParallelLinear):
    """Linear whose input features are split over tensor-parallel ranks; can add its output to a
    residual stream.

    A `residual` [s, b, out] may be overwritten by the sum: the matrix product accumulates into it
    where possible, so that the addition costs neither a kernel nor a copy.
    """

    def forward(
        self, input_: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map input_ [s, b, in / tp] to (residual + output [s, b, out], bias for the caller to
        add)."""
        return self._forward(input_, None, None, residual)

    def gated(
        self, input_: Tensor, gate: Tensor, norm: GatedRMSNorm, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run `forward` on norm(input_, gate); with few rows the norm is fused into the product's
        kernel."""
        return self._forward(input_, gate, norm, residual)

    def of_swiglu(
        self, input_: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run `forward` on swiglu(input_), given input_ [s, b, 2 in / tp]; if the weight's inputs
        are quantised, the activation runs in the launch that does so."""
        return self._forward(input_, None, None, residual, swiglu=True)

    def _forward(
        self,
        input_: Tensor,
        gate: Tensor | None,
        norm: GatedRMSNorm | None,
        residual: Tensor | None,
        swiglu: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        assert self.bias is None, "built without"
        norm_weight = None if norm is None else norm.weight
        if not is_plain(self, input_, self.weight, residual, gate, norm_weight):
            if norm is not None:
                input_ = norm(input_, gate)
            if swiglu:
                input_ = ACTIVATIONS["swiglu"](input_)
            output, bias = super().forward(input_)
            # Not in place: layers before this one may keep the residual for the backward.
            return (output if residual is None else residual + output), bias

        if self.tp_group.rank():
            residual = None  # only the first rank adds it, so that it counts once
        output = multiply(
            input_.flatten(0, -2),
            self.weight,
            norm_weight=norm_weight,
            eps=0.0 if norm is None else norm.eps,
            group_size=None if norm is None else norm.group_size,
            gate=None if gate is None else gate.flatten(0, -2),
            residual=None if residual is None else residual.contiguous().flatten(0, -2),
            swiglu=swiglu,
            early=self.tp_group.size() > 1,
        )
        return all_reduce(output, self.tp_group).view(*input_.shape[:-1], len(self.weight)), None
