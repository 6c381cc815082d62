"""fp32 gradients, master weights and moments of the heads, sharded over data-parallel ranks.

The gradients of all parameters with the same data-parallel group are views of one flat fp32 buffer.
A rank owns one of the buffer's equal parts: it gets the sum of that part over ranks, keeps its
master weights and moments, and updates it (ZeRO stage 1: Rajbhandari et al. 2020,
arXiv:1910.02054). The updated weights are gathered in the same buffer. Reduce-scatter and
all-gather together send as many bytes as one all-reduce.
"""

import mtpkit.platform  # noqa: F401  (it prepares megatron-core's import, so it comes first)

# isort: split
import itertools
import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch import Tensor, nn

DECAYED, MATRIX, PARTIAL_MATRIX, PARTIAL_VECTOR, VECTOR = range(5)
"""Kinds of parameters, in their order in a buffer. In this order every treatment covers a
contiguous range: weight decay (all but vectors), Muon (matrices), and a gradient sum over
tensor-parallel ranks, each of which sees only a part of the sequence (partial)."""
PADDING = 64  # a rank's part is a multiple of this many elements, for aligned loads


def kind_of(parameter: nn.Parameter) -> int:
    """The kind of a parameter."""
    partial = getattr(parameter, "sequence_parallel", False)
    if parameter.ndim < 2:
        return PARTIAL_VECTOR if partial else VECTOR
    if parameter.ndim == 2:
        return PARTIAL_MATRIX if partial else MATRIX
    assert not partial, "only matrices and vectors may be sequence-parallel"
    return DECAYED


@dataclass
class Region:
    """Contiguous elements of a buffer that this rank owns and updates in the same way."""

    first: int
    """Index of the first element in the buffer."""
    grad: Tensor
    """[n] fp32, in the buffer; holds the new weights after an update."""
    weight_decay: float
    tensors: dict[str, Tensor]
    """[n] fp32 each: `fp32_param` and the optimizer's state, by their names in checkpoints."""

    @property
    def master(self) -> Tensor:
        """The fp32 weights."""
        return self.tensors["fp32_param"]


@dataclass
class FlatBuffer:
    """Parameters of one data-parallel `group`, their summed gradients, and this rank's part of
    both.

    Args:
        parameters: in any order; the buffer sorts them.
        group: ranks that hold copies of these parameters and read different data.
        tensor_group: ranks that split these parameters.
        distributed: False: every rank owns the whole buffer.
    """

    parameters: Sequence[nn.Parameter]
    group: dist.ProcessGroup
    tensor_group: dist.ProcessGroup
    distributed: bool
    regions: list[Region] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parameters = sorted(self.parameters, key=kind_of)
        shards = self.group.size() if self.distributed else 1
        sizes = [parameter.numel() for parameter in self.parameters]
        self._bounds = list(itertools.accumulate(sizes, initial=0))
        # Rounded up, so that all ranks have equal parts, as reduce-scatter requires.
        part = -(-sum(sizes) // (shards * PADDING)) * PADDING
        device = self.parameters[0].device
        self.flat = torch.zeros(shards * part, dtype=torch.float32, device=device)
        self.first = part * (self.group.rank() if self.distributed else 0)
        self.own = self.flat[self.first : self.first + part]
        views = self.flat[: sum(sizes)].split(sizes)
        self.grads = [
            view.view_as(parameter) for view, parameter in zip(views, self.parameters, strict=True)
        ]
        """fp32 gradients in the shapes of the parameters; after `gather` the weights in full
        precision."""
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            parameter.main_grad = grad  # type: ignore[attr-defined]  # see `main_grad`

    def add_region(self, kinds: Sequence[int], state: Sequence[str], weight_decay: float) -> None:
        """Add a region: those elements of neighbouring `kinds` that this rank owns.

        Its masters are copies of the parameters; the tensors named in `state` are zeros, which a
        checkpoint can fill.
        """
        # A region may begin or end on another rank: this rank's part of it may be empty.
        start, end = self._span(kinds)
        start, end = (
            min(max(place, self.first), self.first + len(self.own)) for place in (start, end)
        )
        tensors = {
            name: torch.zeros(end - start, dtype=torch.float32, device=self.flat.device)
            for name in ("fp32_param", *state)
        }
        master = tensors["fp32_param"]
        for begin, parameter in zip(self._bounds, self.parameters, strict=False):
            low = max(begin, start)
            high = min(begin + parameter.numel(), end)
            if low < high:
                master[low - start : high - start] = parameter.detach().flatten()[
                    low - begin : high - begin
                ]
        self.regions.append(Region(start, self.flat[start:end], weight_decay, tensors))

    def sum_partial(self) -> None:
        """Sum the partial gradients over tensor-parallel ranks."""
        start, end = self._span((PARTIAL_MATRIX, PARTIAL_VECTOR))
        if self.tensor_group.size() > 1 and start < end:
            dist.all_reduce(self.flat[start:end], group=self.tensor_group)

    def reduce(self) -> None:
        """Sum the gradients over ranks, in the part that this rank owns."""
        if self.group.size() == 1:
            return
        if self.distributed:
            dist.reduce_scatter_tensor(self.own, self.flat, group=self.group)
        else:
            dist.all_reduce(self.flat, group=self.group)

    def gather(self) -> None:
        """Gather every rank's own part into the buffer."""
        if self.distributed and self.group.size() > 1:
            dist.all_gather_into_tensor(self.flat, self.own, group=self.group)

    def square_norm(self) -> Tensor:
        """This rank's share of the squared norm of the summed gradient, [] fp64; ranks count no
        parameter twice."""
        total = torch.zeros((), dtype=torch.float64, device=self.flat.device)
        # All data-parallel ranks have the whole sum then: the first one counts it.
        if not self.distributed and self.group.rank() > 0:
            return total
        for start, end in self._counted():
            start = max(start, self.first)
            end = min(end, self.first + len(self.own))
            if start < end:
                total += torch.linalg.vector_norm(self.flat[start:end]).double().square()
        return total

    def take_masters(self) -> None:
        """Overwrite the gradients that this rank owns with the masters, for `publish`."""
        for region in self.regions:
            region.grad.copy_(region.master)

    @torch.no_grad()
    def publish(self) -> None:
        """Gather the new weights from all ranks, copy them to the parameters, and clear the
        gradients."""
        self.gather()
        for parameter, value in zip(self.parameters, self.grads, strict=True):
            parameter.copy_(value)
        # The buffer held the weights; backward passes add to what is in it.
        self.flat.zero_()

    def sharded_state(
        self, parts: Mapping[int, ShardedTensor | ShardedTensorFactory]
    ) -> ShardedStateDict:
        """The tensors of this rank's regions for megatron-core's checkpoints; `load` takes the same
        nesting.

        Args:
            parts: entry of each parameter in the model's own checkpoint, by `id` of the parameter.
        """
        state: ShardedStateDict = {}
        for region in self.regions:
            for name, tensor in region.tensors.items():
                for low, piece in self._pieces(region, name, tensor, parts):
                    state.setdefault(name, {})[str(low)] = piece
        return state

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy tensors loaded for `sharded_state` into the regions."""
        for region in self.regions:
            for name, tensor in region.tensors.items():
                for low, piece in state.get(name, {}).items():
                    start = int(low) - region.first
                    if 0 <= start < len(tensor):
                        tensor[start : start + piece.numel()].copy_(piece.flatten())

    def _pieces(
        self,
        region: Region,
        name: str,
        tensor: Tensor,
        parts: Mapping[int, ShardedTensor | ShardedTensorFactory],
    ) -> Iterator[tuple[int, ShardedTensor]]:
        """Yield (place in the buffer, piece) for each rectangular block of a parameter inside a
        region."""
        for begin, parameter in zip(self._bounds, self.parameters, strict=False):
            entry = parts[id(parameter)]
            whole = (
                nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
            )
            for part in whole:
                offset = begin + part.data.storage_offset() - parameter.storage_offset()
                low = max(offset, region.first)
                high = min(offset + part.data.numel(), region.first + len(tensor))
                while low < high:
                    block = _block(
                        part, low - offset, high - offset, replicated=not self.distributed
                    )
                    place = low - region.first
                    count = math.prod(block.local_shape)
                    data = tensor.detach()[place : place + count].view(block.local_shape)
                    yield (
                        low,
                        replace(
                            block,
                            key=f"optimizer.state.{name}.{part.key}",
                            data=data,
                            dtype=data.dtype,
                        ),
                    )
                    low += count

    def _span(self, kinds: Sequence[int]) -> tuple[int, int]:
        """Start and end of neighbouring kinds in the buffer."""
        own = [kind_of(parameter) for parameter in self.parameters]
        return self._bounds[bisect_left(own, kinds[0])], self._bounds[bisect_right(own, kinds[-1])]

    def _counted(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of the buffer that this tensor-parallel rank counts and no other; adjacent
        ranges are joined."""
        start = end = 0
        for parameter, (first, after) in zip(
            self.parameters, itertools.pairwise(self._bounds), strict=True
        ):
            if self.tensor_group.rank() == 0 or getattr(parameter, "tensor_model_parallel", False):
                if first > end:
                    yield start, end
                    start = first
                end = after
        yield start, end


def _block(part: ShardedTensor, low: int, high: int, replicated: bool) -> ShardedTensor:
    """The largest rectangular block of a tensor that starts at `low` and ends by `high` in memory
    order.

    Example, entries 2 .. 9 of a part of shape [4, 3]: element [0, 2], then rows 1 and 2, then
    element [3, 0].
    """
    shape = part.local_shape
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    dim = next(d for d, stride in enumerate(strides) if low % stride == 0 and high - low >= stride)
    place = [low // stride % size for stride, size in zip(strides, shape, strict=True)]
    count = min((high - low) // strides[dim], shape[dim] - place[dim])
    lead = part.prepend_axis_num
    offset = (*part.global_offset[:lead], *map(operator.add, part.global_offset[lead:], place))
    replica = (
        part.replica_id
        if replicated or isinstance(part.replica_id, int)
        else (*part.replica_id[:-1], 0)
    )
    block = (*[1] * (lead + dim), count, *shape[dim + 1 :])
    return ShardedTensor(
        part.key, None, part.dtype, block, part.global_shape, offset, None, replica
    )
