"""Copies of units (slots of requests, checkpoints) from tensors to others, many tensors at once.

Shape legend: R copies of each pair of tensors.
"""

from torch import Tensor


def copy_units(sources: Tensor, targets: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
    """Copy unit sources[r] of one tensor to unit targets[r] of another, for each pair of tensors.

    Args:
        sources, targets: [R] int64, indices of units; no two copies have one target. Where either is negative, nothing
            is copied.
        pairs: what is read [units, ...] and what is written [units, ...] of other units, which has the same shape but
            for their number, may have another dtype, and is updated in place. A unit is dense, units may lie apart.
    """
    copied = (sources >= 0) & (targets >= 0)
    of, to = sources[copied], targets[copied]
    for read, written in pairs:
        written[to] = read[of].to(written.dtype)
