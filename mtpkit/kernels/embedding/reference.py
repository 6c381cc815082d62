"""Rows of an embedding table of which this rank holds one part."""

import torch
from torch import Tensor


def embedding_part(token_ids: Tensor, table: Tensor, first: int) -> Tensor:
    """Rows of `table`, which begins at token `first`; zeros for tokens outside the table. Summed
    over the ranks that hold the parts of a vocabulary, this gives the rows of all tokens.

    Args:
        token_ids: [T] int64.
        table: [v, h].

    Returns:
        [T, h] in the dtype of the table.
    """
    place = token_ids - first
    held = (place >= 0) & (place < len(table))
    return table[torch.where(held, place, 0)].masked_fill_(~held[:, None], 0)
