"""Trees of a step's tokens, as bit masks and as parents.

A decode row may feed a tree: token t of a row follows its parent, an earlier token of the row, or -1 for the last
committed one. Bit j of token t's mask says that token t sees token j, which is itself or one of its ancestors. A chain
has the parents -1, 0, 1, .. and the masks 1, 3, 7, ..

Shape legend: R rows, T tokens of a row.
"""

import torch
from torch import Tensor


def ancestor_masks(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Masks and depths of trees.

    Args:
        parents: [R, T] int64, each smaller than the token's own index; -1: none.
        depth: the largest depth of any token; a token without a parent has depth 0.

    Returns:
        [R, T] int64 masks, and [R, T] int64 depths.
    """
    masks = 1 << torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    depths, above = torch.zeros_like(parents), parents
    for _ in range(depth):
        inside = above >= 0
        masks = masks | torch.where(inside, 1 << above.clamp_min(0), 0)
        depths = depths + inside
        above = torch.where(inside, parents.gather(1, above.clamp_min(0)), -1)
    return masks, depths


def seen_tokens(masks: Tensor, count: int) -> Tensor:
    """[R, T, count] bool, whether token t sees token j, of masks [R, T]."""
    return (masks[..., None] >> torch.arange(count, device=masks.device)) & 1 != 0


def parents_of(masks: Tensor) -> Tensor:
    """[R, T] int64, the newest token below its own index that each token sees, or -1; of masks [R, T]."""
    count = masks.shape[1]
    index = torch.arange(count, device=masks.device)
    above = seen_tokens(masks, count) & (index < index[:, None])
    return torch.where(above, index, -1).amax(-1)
