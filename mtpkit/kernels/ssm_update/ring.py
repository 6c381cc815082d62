"""How the ring of `ssm_replay_update` is counted. Position i of a request has place i % length."""

from torch import Tensor

_SMALLEST_STEP = 4


def ring_length(tokens: int) -> int:
    """Places of a ring for steps of up to `tokens` tokens: 20 for up to 4 tokens, then 40, 80, ..

    Four fifths hold committed entries, see `ring_capacity`: with a power of two of them no lane of a tile is idle.
    The smallest ring is that of 4 tokens, so that the state is written once in a while rather than at every step.
    """
    return 5 * (1 << (max(_SMALLEST_STEP, tokens) - 1).bit_length())


def ring_capacity(length: int) -> int:
    """Committed entries that a ring of `length` places may hold.

    The other places, one in five, are room for the tokens of a step: programs of one kernel read the old entries while
    others write the new ones, in no order, so that the two must never share a place.
    """
    return length - length // 5


def ring_base(ring_lens: Tensor, new_tokens: int, length: int) -> Tensor:
    """[R] committed entries that stay in a ring of `length` places when a step brings `new_tokens` more; 0 where they
    are folded into the state first.

    A row's next `ring_lens` is this plus the tokens that were accepted.
    """
    return ring_lens * (ring_lens + new_tokens <= ring_capacity(length))
