"""Prompts with a beginning in common that is not computed yet: all but the oldest wait until there is a checkpoint."""

from bisect import bisect_left, insort
from collections.abc import Iterable

from mtpkit.engine.prefix.cache import PrefixCache
from mtpkit.engine.request import Request

WORTH = 256
"""Tokens whose computation a request waits for a step to save. A GPU computes about so many in the time in which it
reads the weights, which is what a step takes at least."""


def hold(cache: PrefixCache, begun: Iterable[Request], waiting: Iterable[Request]) -> set[Request]:
    """Find requests that begin like an older one whose prompt has yet to come to where they part; and have that one
    leave a checkpoint there.

    Args:
        begun: running requests whose prompts are not computed to their ends, the oldest first.
        waiting: those that may be admitted, the oldest first. They may wait for one another, too.

    Returns:
        The waiting ones that should go on waiting.
    """
    held = set[Request]()
    if not cache.slots.size:
        return held
    owners: dict[bytes, Request] = {}
    """By the hash of each beginning in whole blocks, the oldest request that has it."""
    for request in begun:
        _note(owners, request)
    for request in waiting:
        cache.extend(request)
        request.prefill_end = request.to_prefill
        length, owner = _shared(cache, owners, request)
        if owner and max(WORTH, owner.num_computed + 1) <= length and owner.arrival < request.arrival:
            hit = cache.match(request)
            if length - (hit.length if hit else 0) >= WORTH:
                _cut(owner, length)
                held.add(request)
        _note(owners, request)
    return held


def _note(owners: dict[bytes, Request], request: Request) -> None:
    for prefix in request.chain[1:]:
        owners.setdefault(prefix, request)


def _shared(cache: PrefixCache, owners: dict[bytes, Request], request: Request) -> tuple[int, Request | None]:
    """The tokens from which a request can go on once their oldest owner has come there, and that owner."""
    chain, size = request.chain, cache.block_size
    # Who has a beginning has every shorter one.
    blocks = bisect_left(range(1, len(chain)), True, key=lambda index: chain[index] not in owners)
    if not blocks:
        return 0, None
    owner = owners[chain[blocks]]
    length, end = blocks * size, min(owner.prefill_end, request.prefill_end)
    while length < end and owner.token_ids[length] == request.token_ids[length]:
        length += 1
    # The token after the checkpoint must be the same where the heads' states depend on it.
    return min(length, end) - cache.successors, owner


def _cut(owner: Request, length: int) -> None:
    """Have a request leave a checkpoint, now if it runs, or when it is admitted."""
    owner.forks.add(length)
    if owner.slot is not None and length < owner.prefill_end and length not in owner.cuts:
        insort(owner.cuts, length)
