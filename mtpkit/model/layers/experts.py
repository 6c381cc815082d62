"""megatron-core's routed experts, run together in two grouped matrix products, with gradients.

megatron-core runs one expert after the other, each in some ten kernel launches. With hundreds of
narrow experts, launches then dominate a training step.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from mtpkit.model.formats.weight import QuantizedWeight
from mtpkit.model.layers.linear import MaybeQuantized
from mtpkit.model.layers.norm import ACTIVATIONS
from mtpkit.model.transformer_config import TransformerConfig

_ALIGNED = 16
"""`grouped_mm` needs matrix rows whose size is a multiple of this many bytes."""
_MOST_COPIED = 4 << 30
"""Most bytes of all experts' fc1, or of all their fc2, that are copied into one tensor if they lie
apart; a larger copy would take too much memory."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types that `grouped_mm` multiplies on a CPU."""


class ExpertColumnLinear(MaybeQuantized, ColumnParallelLinear):
    """megatron-core's column-parallel linear, with a weight that may be quantised."""


class ExpertRowLinear(MaybeQuantized, RowParallelLinear):
    """megatron-core's row-parallel linear, with a weight that may be quantised."""


class SpecProvider(LocalSpecProvider):
    """megatron-core's choice of modules for a mixture of experts, with the linears above."""

    def column_parallel_linear(self) -> type:
        return ExpertColumnLinear

    def row_parallel_linear(self) -> type:
        return ExpertRowLinear

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> partial[SequentialMLP]:
        """One linear per expert, whose parameters have the local experts' names."""
        submodules = MLPSubmodules(linear_fc1=ExpertColumnLinear, linear_fc2=ExpertRowLinear)
        return partial(SequentialMLP, submodules=submodules)


class Experts(SequentialMLP):
    """megatron-core's experts, multiplied all at once where PyTorch has a grouped product: rows
    must be multiples of 16 bytes, and bfloat16 on a GPU. Otherwise, or if `apart` is set, the
    experts run one by one.

    If the matrices do not lie side by side, as in the heads, all fc1 and then all fc2 are copied in
    each forward and backward pass. The backward pass holds the gradient of all fc1 or of all fc2
    besides.
    """

    config: TransformerConfig
    apart = False

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Run the experts of this rank.

        Args:
            permuted_local_hidden_states: [P, h], one row for each pair of a token and one of its
                experts, sorted by expert.
            tokens_per_expert: [E], number of rows of each expert, on any device.
            permuted_probs: [P], the weight of each row.

        Returns:
            [P, h], each row's expert output times its weight; and None.
        """
        x = permuted_local_hidden_states
        if self.quantized:
            return self._weighted_after(x, tokens_per_expert, permuted_probs), None
        if self.apart or not self._run_together(x):
            return super().forward(x, tokens_per_expert, permuted_probs)
        ends = tokens_per_expert.cumsum(0).to(x.device, torch.int32, non_blocking=True)
        inner = ACTIVATIONS[self.config.mtpkit.mlp.activation](
            _multiply(x, ends, self._linears("linear_fc1"))
        )
        inner = (inner * permuted_probs[:, None]).to(x.dtype)
        return _multiply(inner, ends, self._linears("linear_fc2")), None

    @property
    def quantized(self) -> bool:
        """Whether some expert's weight is quantised."""
        return any(
            isinstance(linear.weight, QuantizedWeight)
            for name in ("linear_fc1", "linear_fc2")
            for linear in self._linears(name)
        )

    def _weighted_after(self, x: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        """Run the experts one by one, with the arguments of `forward`, and multiply their outputs
        by the weights.

        megatron-core multiplies the input of fc2 instead. Quantised inputs would then be others
        than in decoding, where the weights are applied to outputs.
        """
        activation = ACTIVATIONS[self.config.mtpkit.mlp.activation]
        parts = x.split(counts.tolist())
        outputs = [
            expert.linear_fc2(activation(expert.linear_fc1(part)[0]))[0]
            for expert, part in zip(self.local_experts, parts, strict=True)
        ]
        return (torch.cat(outputs) * weights[:, None]).to(x.dtype)

    def _linears(self, name: str) -> list[ColumnParallelLinear | RowParallelLinear]:
        return [getattr(expert, name) for expert in self.local_experts]

    def _run_together(self, x: Tensor) -> bool:
        first = self.local_experts[0]
        pair = first.linear_fc1, first.linear_fc2
        plain = isinstance(pair[0], ColumnParallelLinear) and isinstance(pair[1], RowParallelLinear)
        # Transformer Engine's linears use other matrix products.
        if not plain or not len(x):
            return False
        aligned = not any(
            size * x.element_size() % _ALIGNED for one in pair for size in one.weight.shape
        )
        alike = all(one.weight.dtype == x.dtype for one in pair)
        known = x.dtype == torch.bfloat16 or (not x.is_cuda and x.dtype in _DTYPES)
        return aligned and alike and known and all(map(self._fits, ("linear_fc1", "linear_fc2")))

    def _fits(self, name: str) -> bool:
        """Return whether the matrices of the linear `name` lie side by side or are small enough to
        copy."""
        weights = [linear.weight for linear in self._linears(name)]
        return (
            sum(weight.nbytes for weight in weights) <= _MOST_COPIED
            or _evenly_spaced(weights) is not None
        )


def _multiply(
    x: Tensor, ends: Tensor, linears: Sequence[ColumnParallelLinear | RowParallelLinear]
) -> Tensor:
    """Multiply rows of x [P, in] with their experts' weights to [P, out]; experts' rows end at
    `ends` [E] int32."""
    weights = [linear.weight for linear in linears]
    fused = [linear.gradient_accumulation_fusion for linear in linears]
    sums = [
        getattr(each, "main_grad", None) if adds else None
        for each, adds in zip(weights, fused, strict=True)
    ]
    return _Grouped.apply(x.contiguous(), ends, sums, *weights)


class _Grouped(torch.autograd.Function):
    """Product of each group of rows with its own matrix. The gradient of a weight is added to its
    tensor in `sums`, if that is not None."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ends: Tensor, sums: list[Tensor | None], *weights: Tensor
    ) -> Tensor:
        # The parameters, not one tensor of them: where that is a copy, it would stay until then.
        ctx.save_for_backward(x, ends, *weights)
        ctx.sums = sums
        return F.grouped_mm(x, side_by_side(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        out = grads[0].contiguous()
        own = None
        if ctx.needs_input_grad[0]:
            own = F.grouped_mm(out, side_by_side(weights), offs=ends)
        if not any(ctx.needs_input_grad[3:]):
            return own, None, None, *([None] * len(weights))
        of_weights = F.grouped_mm(out.t(), x, offs=ends)  # [E, out, in]
        # Some GPUs leave the gradient of empty groups unwritten:
        # https://github.com/pytorch/pytorch/issues/172439
        empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        of_weights.masked_fill_(empty[:, None, None], 0)

        sums = [total for total in ctx.sums if total is not None]
        if len(sums) == len(weights) and (together := _evenly_spaced(sums)) is not None:
            together.add_(of_weights)
            return own, None, None, *([None] * len(weights))
        found: list[Tensor | None] = []
        for total, part in zip(ctx.sums, of_weights, strict=True):
            found.append(part if total is None else None)
            if total is not None:
                total.add_(part)
        return own, None, None, *found


def side_by_side(matrices: Sequence[Tensor]) -> Tensor:
    """Return matrices [n, m] as one tensor [E, n, m], copied only if they are not evenly spaced in
    one storage."""
    together = _evenly_spaced(matrices)
    return torch.stack(list(matrices)) if together is None else together


def _evenly_spaced(matrices: Sequence[Tensor]) -> Tensor | None:
    """Return the matrices as one view; None if they are not evenly spaced in one storage."""
    first = matrices[0].detach()
    places = [matrix.data_ptr() for matrix in matrices]
    step = places[1] - places[0] if len(places) > 1 else 0
    one_memory = all(
        each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for each in matrices
    )
    even = all(place == places[0] + index * step for index, place in enumerate(places))
    size = first.element_size()
    if (
        not one_memory
        or not even
        or step < 0
        or step % size
        or not all(each.is_contiguous() for each in matrices)
    ):
        return None
    return first.as_strided(
        (len(matrices), *first.shape), (step // size, *first.stride()), first.storage_offset()
    )
