"""Sizes of the ring buffers that keep the inputs of recent steps, so that recurrent states can
replay them.

Shape legend: R rows, L ring length; position i lies at place i % L of a ring.
"""

import torch
from torch import Tensor

_SMALLEST_STEP = 4
_LEAST_CAPACITY = 16
"""With less, the state would be written almost every step rather than once in several."""


def ring_length(tokens: int) -> int:
    """Number of places of a ring for steps of up to `tokens` tokens: 20 for up to 4 tokens, 24 for
    up to 8, then 48, 96, ...

    Most of them hold committed entries, see `ring_capacity`: those of two of the widest steps, and
    at least 16. More would have to be replayed in each step, which takes longer than writing the
    state more often saves.
    """
    width = 1 << (max(_SMALLEST_STEP, tokens) - 1).bit_length()
    return max(_LEAST_CAPACITY, 2 * width) + width


def ring_capacity(length: int) -> int:
    """Most committed entries in a ring of `length` places: the largest power of two that leaves
    places, since a power of two fills a tile.

    The other places are for the tokens of a step. Some programs of a kernel read old entries while
    other programs write new ones, so old and new entries must never share a place.
    """
    return 1 << ((length - 1).bit_length() - 1)


def ring_base(ring_lens: Tensor, new_tokens: int, length: int) -> Tensor:
    """[R] number of committed entries that stay in a ring of `length` places when a step adds
    `new_tokens`; 0 where the entries are folded into the state first.

    The next `ring_lens` of a row is this number plus its accepted tokens.
    """
    return torch.where(ring_lens > ring_capacity(length) - new_tokens, 0, ring_lens)
