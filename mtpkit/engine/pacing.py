"""How many prompt tokens a step carries: as many as the requests that decode beside them can wait for."""

from collections.abc import Sequence

from mtpkit.engine.step import Plan

_FIRST = 512
"""Prompt tokens beside decoding requests until step times are known."""
_LEAST = 16
"""Fewest prompt tokens of a step, so that prompts are not starved whatever the bound is."""
_PATIENCE = 2.5
"""Without a bound from the user, a step with prompts takes at most about this many times what decoding alone takes."""
_WEIGHT = 0.2
"""Weight of the newest time in a running mean."""
_LONG = 256
"""Chunks of fewer tokens mostly wait for the weights to be read: they say nothing about the time of a token."""


class Pacing:
    """Chooses the prompt tokens of a step from the times of earlier steps.

    A step with n prompt tokens takes d + c n seconds, with d the time of decoding alone, and c that of one token; both
    are running means, d for each power of two of decoding requests. Nothing is bounded while no request decodes.

    Args:
        bound: seconds that a decoding request may wait from step to step; None: `_PATIENCE` times d.
        sizes: the numbers of prompt tokens that are captured, ascending; a step is filled up to one of them.
    """

    def __init__(self, bound: float | None, sizes: Sequence[int] = ()) -> None:
        self.bound = bound
        self.sizes = sizes
        self._decode: dict[int, float] = {}
        self._token: float | None = None

    def most_tokens(self, budget: int, num_decoding: int) -> int:
        """Most prompt tokens of a step with `num_decoding` decode rows, at most `budget`."""
        if num_decoding:
            budget = min(budget, self._bounded(num_decoding))
        return max((size for size in self.sizes if size <= budget), default=budget)

    def _bounded(self, num_decoding: int) -> int:
        decode = self._decode_seconds(num_decoding)
        if decode is None or not self._token:
            return _FIRST
        spare = (_PATIENCE - 1) * decode if self.bound is None else self.bound - decode
        return max(_LEAST, int(spare / self._token))

    def _decode_seconds(self, num_decoding: int) -> float | None:
        """d for the nearest number of requests that was timed."""
        if not self._decode:
            return None
        level = num_decoding.bit_length()
        return self._decode[min(self._decode, key=lambda known: abs(known - level))]

    def observe(self, plans: Sequence[Plan], seconds: float) -> None:
        """Take up how long the plans of a step took together."""
        decoding = sum(plan.num_decode_rows for plan in plans)
        tokens = sum(plan.num_chunk_tokens for plan in plans)
        if not tokens:
            level = decoding.bit_length()
            self._decode[level] = _mean(self._decode.get(level), seconds)
        elif tokens >= _LONG:
            alone = self._decode_seconds(decoding) if decoding else 0.0
            if alone is not None:
                self._token = _mean(self._token, max(0.0, seconds - alone) / tokens)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
