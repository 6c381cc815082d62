"""Sizes of the ring buffers that keep the inputs of recent steps, so that recurrent states can
replay them.

Shape legend: R rows, L ring length; position i lies at place i % L of a ring.
"""

import torch
from torch import Tensor

_SMALLEST_STEP = 4


def ring_length(tokens: int) -> int:
    """Number of places of a ring for steps of up to `tokens` tokens: 20 for up to 4 tokens, then
    40, 80, ...

    Four fifths hold committed entries, see `ring_capacity`; their number is a power of two, which
    fills a tile. The smallest ring is the one for 4 tokens, so that the state is written once in
    several steps rather than at every step.
    """
    return 5 * (1 << (max(_SMALLEST_STEP, tokens) - 1).bit_length())


def ring_capacity(length: int) -> int:
    """Most committed entries in a ring of `length` places.

    The other places, one in five, are for the tokens of a step. Some programs of a kernel read old
    entries while other programs write new ones, so old and new entries must never share a place.
    """
    return length - length // 5


def ring_base(ring_lens: Tensor, new_tokens: int, length: int) -> Tensor:
    """[R] number of committed entries that stay in a ring of `length` places when a step adds
    `new_tokens`; 0 where the entries are folded into the state first.

    The next `ring_lens` of a row is this number plus its accepted tokens.
    """
    return torch.where(ring_lens > ring_capacity(length) - new_tokens, 0, ring_lens)
