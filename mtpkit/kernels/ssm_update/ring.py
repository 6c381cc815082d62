"""How the ring of `ssm_replay_update` is counted. Position i of a request has place i % length."""

from torch import Tensor


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
