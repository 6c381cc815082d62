"""Collectives of tensor-parallel ranks without gradients: sums of partial results, and small
gathers.

All of them can be captured in a CUDA graph: sizes are fixed, and no call waits for the host. Every
rank gets the same bits, so that ranks that decide by a result decide alike.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mtpkit.kernels import NO_TOKEN


class Exchange:
    """Collectives of a group through its own backend, NCCL or gloo."""

    def all_reduce(self, values: Tensor, group: ProcessGroup) -> Tensor:
        """Sum `values` over the ranks, with the same bits on all of them; `values` may be
        overwritten by the sum."""
        values = values.contiguous()
        dist.all_reduce(values, group=group)
        return values

    def all_gather(self, values: Tensor, group: ProcessGroup) -> Tensor:
        """[ranks, ...], the `values` [...] of each rank."""
        gathered = values.new_empty(group.size() * len(values), *values.shape[1:])
        dist.all_gather_into_tensor(gathered, values.contiguous(), group=group)
        return gathered.view(group.size(), *values.shape)

    def best_of_ranks(
        self, values: Tensor, tokens: Tensor, first: int, group: ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        """See `best_of_ranks`."""
        # `NO_TOKEN` is negative and the same on all ranks.
        tokens = torch.where(tokens < 0, tokens, tokens + first)

        # float64 holds tokens exactly, so that one gather carries both.
        pairs = self.all_gather(torch.stack([values.double(), tokens.double()], 1), group)
        of_ranks = pairs[..., 0]
        top = of_ranks.amax(0)

        # Of ranks in a tie, the one with the smallest token wins, as among the tokens of one rank.
        none = torch.iinfo(torch.int64).max
        best = torch.where(of_ranks == top, pairs[..., 1].long(), none).amin(0)
        return top.float(), best


_by_group = Exchange()
_chosen: dict[ProcessGroup, Exchange] = {}
"""Exchanges of the groups that do not use their own backend."""


def use_exchange(group: ProcessGroup, exchange: Exchange | None) -> None:
    """Make the functions below use `exchange` for a group, such as kernels that access the memory
    of other GPUs. None: use the group's backend. All ranks must choose the same exchange, before
    CUDA graphs are captured."""
    if exchange is None:
        _chosen.pop(group, None)
    else:
        _chosen[group] = exchange


def _exchange(group: ProcessGroup) -> Exchange:
    return _chosen.get(group, _by_group)


def all_reduce(values: Tensor, group: ProcessGroup) -> Tensor:
    """Sum `values` over the ranks of a group, perhaps in place; with one rank, return them."""
    if group.size() == 1:
        return values
    return _exchange(group).all_reduce(values, group)


def all_gather(values: Tensor, group: ProcessGroup) -> Tensor:
    """[ranks, ...], the `values` [...] of each rank."""
    if group.size() == 1:
        return values[None]
    return _exchange(group).all_gather(values, group)


def best_of_ranks(
    values: Tensor, tokens: Tensor, group: ProcessGroup, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Find each row's best token over the vocabulary parts of all ranks; exchanges up to 16 bytes
    per row and rank.

    Args:
        values: [M] float32, the largest logit of this rank's part, +inf where a logit is NaN or
            +inf.
        tokens: [M] int64, the token of that logit; `NO_TOKEN` where the value is not finite.
        first: offset to add to this rank's tokens, so that they are numbered over all ranks.

    Returns:
        [M] float32, the largest logit over all ranks, and [M] int64, its token; the smallest in a
        tie, as on one rank.
    """
    if group.size() == 1:
        return values, tokens
    return _exchange(group).best_of_ranks(values, tokens, first, group)


def top_of_ranks(
    values: Tensor, tokens: Tensor, log_sums: Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Find each row's n best tokens over the vocabulary parts of all ranks.

    Args:
        values: [M, n] float32, the largest logits of this rank's part, descending; -inf where the
            part has fewer.
        tokens: [M, n] int64, their tokens, numbered over all ranks; a lower rank holds smaller
            tokens, which win ties.
        log_sums: [M] float32, log of the sum of exp(logit) over the part; +inf in a row with NaN or
            +inf.

    Returns:
        [M, n] int64 and [M, n] float32 log-probabilities, see `kernels.draft_head.top_tokens`.
    """
    count = values.shape[1]

    # float64 holds tokens exactly, so that one gather carries all three.
    own = torch.cat([part.double() for part in (values, tokens, log_sums[:, None])], 1)
    parts = all_gather(own, group)
    values, tokens, log_sums = parts.split([count, count, 1], 2)
    total = log_sums[..., 0].logsumexp(0)[:, None]

    # [ranks, M, n] -> [M, ranks * n]
    values, tokens = (part.transpose(0, 1).flatten(1) for part in (values, tokens))
    # Stable: of equal logits, those of lower ranks, whose tokens are smaller, come first.
    values, order = torch.sort(values, dim=1, descending=True, stable=True)
    values = values[:, :count]
    tokens = tokens.gather(1, order[:, :count]).long()

    valid = total.isfinite() & (values > -torch.inf)
    tokens = torch.where(valid, tokens, NO_TOKEN)
    return tokens, torch.where(valid, (values - total).float(), torch.nan)
