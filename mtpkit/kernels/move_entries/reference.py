"""Move the entries that a step wrote to caches, so that those of an accepted path lie one after
another."""

from torch import Tensor


def move_entries(sources: Tensor, targets: Tensor, *tensors: Tensor) -> None:
    """Copy entries to other places of the same tensors; a row reads all of its entries before it
    writes any.

    Args:
        sources, targets: [R, P] int64, indices of entries; no two rows share an index. Nothing is
            moved where a source is negative.
        tensors: [entries, ...] each, dense, updated in place.
    """
    moved = (sources >= 0) & (sources != targets)
    to = targets[moved]
    of = sources[moved]
    for tensor in tensors:
        tensor[to] = tensor[of]
