"""What tensor-parallel ranks exchange where nothing is differentiated: sums of partial results, and small gathers.

All of it can be captured in a CUDA graph: sizes are fixed, and no call waits for the host. Every rank gets the same
bits, so that ranks which decide by them decide alike.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mtpkit.kernels import NO_TOKEN


class AllReduce(Protocol):
    """Sums a tensor over the ranks of a group."""

    def __call__(self, values: Tensor, group: Any) -> Tensor:
        """The sum, with the same bits on all ranks; `values` may be overwritten by it."""
        ...


def all_reduce_by_group(values: Tensor, group: Any) -> Tensor:
    """Sum by the group's own backend, NCCL or gloo."""
    values = values.contiguous()
    dist.all_reduce(values, group=group)
    return values


_chosen: dict[Any, AllReduce] = {}
"""What sums over a group, where that is not its backend."""


def use_all_reduce(group: Any, function: AllReduce | None) -> None:
    """Let `all_reduce` over a group call `function`, such as a kernel that sums small tensors through peer memory;
    None: the group's backend. All ranks must choose the same one, before graphs are captured."""
    if function is None:
        _chosen.pop(group, None)
    else:
        _chosen[group] = function


def all_reduce(values: Tensor, group: Any) -> Tensor:
    """Sum `values` over the ranks of a group, perhaps in place; of one rank they are the sum."""
    return values if group.size() == 1 else _chosen.get(group, all_reduce_by_group)(values, group)


def all_gather(values: Tensor, group: Any) -> Tensor:
    """[ranks, ...], the `values` [...] of each rank."""
    if group.size() == 1:
        return values[None]
    gathered = values.new_empty(group.size() * len(values), *values.shape[1:])
    dist.all_gather_into_tensor(gathered, values.contiguous(), group=group)
    return gathered.view(group.size(), *values.shape)


def best_of_ranks(values: Tensor, tokens: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """The best token over the parts of a vocabulary that ranks hold: 16 bytes per row and rank are exchanged.

    Args:
        values: [M] float32, the largest logit of this rank's part, +inf where a logit is NaN or +inf.
        tokens: [M] int64, its token, counted over all ranks; `NO_TOKEN` where the value is not finite.

    Returns:
        [M] float32 the largest logit of all, and [M] int64 its token, the smallest one among equals: as on one rank.
    """
    if group.size() == 1:
        return values, tokens
    pairs = all_gather(torch.stack([values.double(), tokens.double()], 1), group)  # exact: tokens are below 2^53
    top = pairs[..., 0].amax(0)
    none = torch.iinfo(torch.int64).max
    return top.float(), torch.where(pairs[..., 0] == top, pairs[..., 1].long(), none).amin(0)


def top_of_ranks(values: Tensor, tokens: Tensor, log_sums: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """The best tokens over the parts of a vocabulary that ranks hold, each as many as this rank gives.

    Args:
        values: [M, n] float32, the largest logits of this rank's part, descending; -inf where there are fewer.
        tokens: [M, n] int64, their tokens, counted over all ranks; among equals the first rank holds the smaller ones.
        log_sums: [M] float32, log of the sum of exp(logit) over the part; +inf in a row with NaN or +inf.

    Returns:
        [M, n] int64 and [M, n] float32 log-probabilities, see `kernels.draft_head.top_tokens`.
    """
    count = values.shape[1]
    parts = all_gather(torch.cat([part.double() for part in (values, tokens, log_sums[:, None])], 1), group)
    values, tokens, log_sums = parts.split([count, count, 1], 2)
    total = log_sums[..., 0].logsumexp(0)[:, None]
    values, tokens = (part.transpose(0, 1).flatten(1) for part in (values, tokens))
    values, order = torch.sort(values, dim=1, descending=True, stable=True)
    values, tokens = values[:, :count], tokens.gather(1, order[:, :count]).long()
    valid = total.isfinite() & (values > -torch.inf)
    return torch.where(valid, tokens, NO_TOKEN), torch.where(valid, (values - total).float(), torch.nan)
