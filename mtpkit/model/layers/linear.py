"""megatron-core's parallel linears, as plain matrix products where there is nothing to differentiate or reduce."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear as MegatronColumnParallelLinear
from megatron.core.tensor_parallel import RowParallelLinear as MegatronRowParallelLinear
from torch import Tensor


def _is_plain(linear: "ColumnParallelLinear | RowParallelLinear", *inputs: Tensor | None) -> bool:
    """Whether the linear is its matrix product and nothing else: one rank, no bias, no gradient."""
    differentiated = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
    return not differentiated and linear.bias is None and linear.tp_group.size() == 1


class ColumnParallelLinear(MegatronColumnParallelLinear):
    """Linear whose output features are split over tensor-parallel ranks."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """input_ [s, b, in] to (output [s, b, out / tp], bias for the caller to add)."""
        used = self.weight if weight is None else weight
        if _is_plain(self, input_, used):
            return F.linear(input_, used), None
        return super().forward(input_, weight, runtime_gather_output)


class RowParallelLinear(MegatronRowParallelLinear):
    """Linear whose input features are split over tensor-parallel ranks; can add its output to a residual stream."""

    _residual: Tensor | None = None

    @contextmanager
    def adding_to(self, residual: Tensor) -> Iterator[None]:
        """The one call inside returns `residual` [s, b, out] plus its output.

        `residual` may be overwritten by that sum: the matrix product accumulates into it where it can, and the addition
        costs neither a kernel nor a copy. This way the mixer that owns the linear need not know of the residual.
        """
        self._residual = residual
        try:
            yield
            assert self._residual is None, "the linear was not called"
        finally:
            self._residual = None

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """input_ [s, b, in / tp] to (output [s, b, out], bias for the caller to add)."""
        residual, self._residual = self._residual, None
        if not _is_plain(self, input_, self.weight, residual):
            output, bias = super().forward(input_)
            return (output if residual is None else residual + output), bias
        if residual is None:
            return F.linear(input_, self.weight), None
        total = residual.contiguous().view(-1, residual.shape[-1])
        return total.addmm_(input_.flatten(0, -2), self.weight.t()).view(residual.shape), None
