"""Routed experts as megatron-core has them, of which all run in two products, with gradients.

megatron-core runs one expert after the other, each in some ten launches. With hundreds of narrow experts a step of
training then consists of little else than launches.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from mtpkit.model.layers.norm import ACTIVATIONS
from mtpkit.model.transformer_config import TransformerConfig

_ALIGNED = 16
"""Bytes of which rows of matrices must be a multiple for `grouped_mm`."""
_MOST_COPIED = 4 << 30
"""Bytes of one matrix of all experts, up to which they are copied together where they lie apart; a copy of more would
take too much memory."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What `grouped_mm` multiplies on a CPU."""


class Experts(SequentialMLP):
    """megatron-core's experts, whose matrices are multiplied all at once where PyTorch has a product for that: rows are
    to be multiples of 16 bytes, and on a GPU in bfloat16. Elsewhere they run one by one, and where `apart` says so.

    Where they do not lie side by side, as those of heads, all fc1 and then all fc2 are copied in each pass, forward and
    backward; the backward pass has the gradient of one of them, too.
    """

    config: TransformerConfig
    apart = False

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Run the experts of this rank.

        Args:
            permuted_local_hidden_states: [P, h] rows, one for each token and expert of it, sorted by expert.
            tokens_per_expert: [E] rows of each expert, on any device.
            permuted_probs: [P], the weight of each row.

        Returns:
            [P, h], each expert's output times the weight; and None.
        """
        x = permuted_local_hidden_states
        if self.apart or not self._run_together(x):
            return super().forward(x, tokens_per_expert, permuted_probs)
        ends = tokens_per_expert.cumsum(0).to(x.device, torch.int32, non_blocking=True)
        inner = ACTIVATIONS[self.config.mtpkit.mlp.activation](_multiply(x, ends, self._linears("linear_fc1")))
        inner = (inner * permuted_probs[:, None]).to(x.dtype)
        return _multiply(inner, ends, self._linears("linear_fc2")), None

    def _linears(self, name: str) -> list[ColumnParallelLinear | RowParallelLinear]:
        return [getattr(expert, name) for expert in self.local_experts]

    def _run_together(self, x: Tensor) -> bool:
        first = self.local_experts[0]
        pair = first.linear_fc1, first.linear_fc2
        plain = isinstance(pair[0], ColumnParallelLinear) and isinstance(pair[1], RowParallelLinear)
        # Linears of Transformer Engine, and weights in fp8, have products of their own.
        if not plain or not len(x) or any(getattr(one, "weight_scale", None) is not None for one in pair):
            return False
        aligned = not any(size * x.element_size() % _ALIGNED for one in pair for size in one.weight.shape)
        alike = all(one.weight.dtype == x.dtype for one in pair)
        known = x.dtype == torch.bfloat16 or (not x.is_cuda and x.dtype in _DTYPES)
        return aligned and alike and known and all(map(self._fits, ("linear_fc1", "linear_fc2")))

    def _fits(self, name: str) -> bool:
        """Whether these matrices lie side by side or can be copied."""
        weights = [linear.weight for linear in self._linears(name)]
        return sum(weight.nbytes for weight in weights) <= _MOST_COPIED or _evenly_spaced(weights) is not None


def _multiply(x: Tensor, ends: Tensor, linears: Sequence[ColumnParallelLinear | RowParallelLinear]) -> Tensor:
    """[P, out] rows of x [P, in] times the weights of their experts, whose rows end at `ends` [E] int32."""
    weights = [linear.weight for linear in linears]
    fused = [linear.gradient_accumulation_fusion for linear in linears]
    sums = [getattr(each, "main_grad", None) if adds else None for each, adds in zip(weights, fused, strict=True)]
    return _Grouped.apply(x.contiguous(), ends, sums, *weights)


class _Grouped(torch.autograd.Function):
    """Products of groups of rows with a matrix each. The gradient of a weight is added to its one of `sums`, if there
    is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, sums: list[Tensor | None], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        ctx.sums = sums
        return F.grouped_mm(x, side_by_side(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        out = grads[0].contiguous()
        own = F.grouped_mm(out, side_by_side(weights), offs=ends) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[3:]):
            return own, None, None, *([None] * len(weights))
        of_weights = F.grouped_mm(out.t(), x, offs=ends)  # [E, out, in]
        # Not on every GPU is that of no rows written: https://github.com/pytorch/pytorch/issues/172439
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
    """[E, n, m], the matrices [n, m] as one tensor, copied only if they do not lie evenly spaced in one memory."""
    together = _evenly_spaced(matrices)
    return torch.stack(list(matrices)) if together is None else together


def _evenly_spaced(matrices: Sequence[Tensor]) -> Tensor | None:
    """The matrices as a view, if there is one."""
    first = matrices[0].detach()
    places = [matrix.data_ptr() for matrix in matrices]
    step = places[1] - places[0] if len(places) > 1 else 0
    one_memory = all(each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for each in matrices)
    even = all(place == places[0] + index * step for index, place in enumerate(places))
    size = first.element_size()
    if not one_memory or not even or step < 0 or step % size or not all(each.is_contiguous() for each in matrices):
        return None
    return first.as_strided((len(matrices), *first.shape), (step // size, *first.stride()), first.storage_offset())
