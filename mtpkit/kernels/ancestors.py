"""Token trees of a decode step, as bit masks and as parents.

A decode row may hold a token tree: the parent of token t is an earlier token of the row, or -1 for
the last committed token. Bit j of token t's mask says that token t sees token j, which is t itself
or one of its ancestors. A chain has the parents -1, 0, 1, .. and the masks 1, 3, 7, ..

Shape legend: R rows, T tokens per row.
"""

import torch
from torch import Tensor


def ancestor_masks(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Compute the masks and depths of trees from their parents.

    Args:
        parents: [R, T] int64, each smaller than the token's own index; -1: no parent.
        depth: the largest depth of any token; a token without a parent has depth 0.

    Returns:
        [R, T] int64 masks, and [R, T] int64 depths.
    """
    masks = 1 << torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    depths = torch.zeros_like(parents)
    above = parents
    for _ in range(depth):
        inside = above >= 0
        masks = masks | torch.where(inside, 1 << above.clamp_min(0), 0)
        depths = depths + inside
        above = torch.where(inside, parents.gather(1, above.clamp_min(0)), -1)
    return masks, depths


def seen_tokens(masks: Tensor, count: int) -> Tensor:
    """Unpack masks [R, T] into [R, T, count] bool: whether token t sees token j."""
    return (masks[..., None] >> torch.arange(count, device=masks.device)) & 1 != 0


def parents_of(masks: Tensor) -> Tensor:
    """Find the parents [R, T] int64 from masks [R, T]: the newest earlier token that each token
    sees, or -1."""
    count = masks.shape[1]
    index = torch.arange(count, device=masks.device)
    above = seen_tokens(masks, count) & (index < index[:, None])
    return torch.where(above, index, -1).amax(-1)
