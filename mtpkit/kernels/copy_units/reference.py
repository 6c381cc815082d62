"""Copies of units (slots of requests, checkpoints) between tensors, for many pairs of tensors at
once.

Shape legend: R copies of each pair of tensors.
"""

from torch import Tensor


def copy_units(sources: Tensor, targets: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
    """Copy unit sources[r] of one tensor to unit targets[r] of another, for each pair of tensors.

    Args:
        sources, targets: [R] int64, indices of units; no two copies have the same target. Where
            either index is negative, nothing is copied.
        pairs: (tensor to read, tensor to write), both [units, ...]. The two may differ in the
            number of units and in dtype; all other sizes are the same. The second one is updated in
            place. Each unit must be dense, but there may be gaps between units.
    """
    copied = (sources >= 0) & (targets >= 0)
    of = sources[copied]
    to = targets[copied]
    for read, written in pairs:
        written[to] = read[of].to(written.dtype)
