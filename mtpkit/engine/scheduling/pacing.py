"""Limits on the prompt tokens of each step, so that decoding requests do not wait too long for
their next token."""

import math
from collections.abc import Sequence

import torch

from mtpkit.engine.requests.options import EngineConfig
from mtpkit.engine.steps.plan import Plan

_FIRST = 512
"""Prompt tokens of a step beside decoding requests until step times have been measured."""
_LEAST = 16
"""Fewest prompt tokens of a step, so that prompts make progress under any bound."""
_PATIENCE = 2.75
_MOST_PATIENCE = 12.0
"""Without a bound from the user, a step with prompt tokens takes at most about `_PATIENCE` times as
long as a step that only decodes. The factor grows up to `_MOST_PATIENCE` with the number of
uncomputed prompts per decoding request, and is `_MOST_PATIENCE` while more requests wait than slots
are free: then prompts wait longer than decoding requests do."""
_ENOUGH = 4096
"""Prompt tokens beyond which a longer step does not lower the time per token: it would only delay
decoding."""
_WEIGHT = 0.2
"""Weight of the newest measurement in a running mean."""
_DRIFT = 0.0003
"""At each long step of the faster kind, the slower kind's seconds per token are lowered by this
share of the gap to the faster kind's. A kind that was measured too slow, and is therefore no longer
chosen, is thus tried again after some thousand steps."""
_LATE = 2.0
"""Measurements are clipped at this many times the running mean: a pause of the host says nothing
about the device."""
_LONG = 256
"""Prompt tokens from which a step is long. Shorter steps mostly wait for the weights to be read, so
their seconds per token are only an upper bound."""


class Pacing:
    """Chooses the number of prompt tokens of each step from the times of earlier steps.

    A step is taken to last d + c n seconds: n is its number of prompt tokens, d the time of a step
    that only decodes, and c the time per prompt token. Both d and c are running means. Each level
    of the number of decoding requests has its own d; levels are about a fifth apart. There are two
    values of c, one for each kind of step: prompt tokens *mixed* into the forward pass of the
    decode rows, or in a pass *apart*. Mixed tokens are cheaper while the decode rows leave the
    device room, since the weights are read for those rows anyway, and dearer otherwise.

    The kind that computes more prompt tokens per second is chosen. While requests wait for a slot,
    mixed tokens are chosen if their c is smaller: running requests have few prompt tokens left, and
    computing these faster would let no waiting request begin sooner. While no request decodes, the
    token budget is the only bound.

    Args:
        bound: seconds that a step may take while requests decode; None: a multiple of d.
        alone, beside: captured sizes, as numbers of prompt tokens, ascending: `alone` for steps
            without decode rows, `beside` for steps with decode rows. A step gets the largest size
            within its limit.
        most_mixed: most prompt tokens that share a forward pass with decode rows.
    """

    def __init__(
        self,
        bound: float | None,
        alone: Sequence[int] = (),
        beside: Sequence[int] = (),
        most_mixed: int = 0,
    ) -> None:
        self.bound = bound
        self.alone = alone
        self.beside = beside
        self.most_mixed = most_mixed
        self.chosen: int | None = None
        """The newest result of `most_tokens`."""
        self.told: int | None = None
        """The number that rank 0 chose for the next step; `most_tokens` then returns it."""
        self._decode: dict[int, float] = {}
        self._token: dict[bool, float] = {}
        """c of mixed tokens (True) and of tokens apart (False)."""

    def most_tokens(
        self,
        budget: int,
        num_decoding: int,
        num_waiting: int,
        crowded: bool = False,
        elsewhere: int = 0,
    ) -> int:
        """Most prompt tokens of a step.

        Args:
            budget: upper limit of the result.
            num_decoding: decode rows of the step.
            num_waiting: requests of the step's batch whose prompts are not computed yet.
            crowded: whether some of the waiting requests cannot begin before running requests end.
            elsewhere: mean number of decode rows of each other batch, which a step without decode
                rows delays.
        """
        chosen = self.told
        if chosen is None:
            chosen = self._most(budget, num_decoding, num_waiting, crowded, elsewhere)
        self.chosen = chosen
        return chosen

    def _most(
        self, budget: int, num_decoding: int, num_waiting: int, crowded: bool, elsewhere: int
    ) -> int:
        if delayed := num_decoding or elsewhere:
            share = 1.0 if crowded else min(1.0, (num_waiting - 1) / delayed)
            most_mixed = self.most_mixed if num_decoding else 0
            budget = self._bounded(
                budget, delayed, max(_PATIENCE, share * _MOST_PATIENCE), most_mixed, crowded
            )
        sizes = self.beside if num_decoding else self.alone
        return max((size for size in sizes if size <= budget), default=budget)

    def _bounded(
        self, budget: int, num_decoding: int, patience: float, most_mixed: int, crowded: bool
    ) -> int:
        decode = self._decode_seconds(num_decoding)
        mixed = self._token_seconds(True)
        apart = self._token_seconds(False)
        if not decode or not mixed or not apart:
            return min(budget, _FIRST)
        bound = patience * decode if self.bound is None else self.bound
        room = max(0.0, bound - decode)
        most = budget if self.bound is not None else min(budget, _ENOUGH)
        choices = [(min(most, room / apart), apart)]
        if most_mixed:
            choices = [
                (min(most, most_mixed, room / mixed), mixed),
                *(one for one in choices if one[0] > most_mixed),
            ]
        untimed = True not in self._token  # then mixed tokens are tried
        if most_mixed >= _LONG and (untimed or (crowded and mixed < apart)):
            choices = choices[:1]
        # More tokens in a pass of their own may take so much longer that fewer are computed per
        # second.
        tokens, _ = max(choices, key=lambda choice: choice[0] / (decode + choice[0] * choice[1]))
        return min(budget, max(_LEAST, int(tokens)))

    def _token_seconds(self, mixed: bool) -> float | None:
        """c of this kind of step; of the other kind while none of this kind has been timed."""
        return self._token.get(mixed, self._token.get(not mixed))

    def _decode_seconds(self, num_decoding: int) -> float | None:
        """d of the nearest timed number of decoding requests."""
        if not self._decode:
            return None
        return self._decode[min(self._decode, key=lambda known: abs(known - _level(num_decoding)))]

    def observe(self, plans: Sequence[Plan], seconds: float) -> None:
        """Record the seconds of a step, from the arrival of the previous results (of any batch) to
        that of its own."""
        decoding = sum(plan.num_decode_rows for plan in plans)
        tokens = sum(plan.num_chunk_tokens for plan in plans)
        level = _level(decoding)
        mixed = any(plan.num_decode_rows and plan.num_chunk_tokens for plan in plans)
        known = self._token_seconds(mixed)
        if not tokens:
            if not decoding:  # only copies between slots and checkpoints
                return
            self._decode[level] = _mean(self._decode.get(level), seconds)
            return
        # while prompts keep coming, perhaps no step only decodes
        if decoding and level not in self._decode:
            fed = sum(row.length for plan in plans for row in plan.decode_rows)
            left = 0.0 if known is None else seconds - tokens * known
            self._decode[level] = max(left, seconds * fed / (fed + tokens))
        # it may have been timed too high, or the host was late
        elif decoding and seconds < self._decode[level]:
            self._decode[level] = _mean(self._decode[level], seconds)
        token = (seconds - (self._decode[level] if decoding else 0.0)) / tokens
        if token <= 0.0:  # results of two steps came together
            return
        if tokens >= _LONG:
            if mixed not in self._token and known:
                token = min(max(token, known / _LATE), known * _LATE)
            self._token[mixed] = _mean(self._token.get(mixed), token)
            this = self._token[mixed]
            other = self._token.get(not mixed, 0.0)
            if this < other:
                self._token[not mixed] = other + _DRIFT * (this - other)
        elif known is not None and token < known:
            self._token[mixed] = _mean(known, token)


def pacing_for(
    config: EngineConfig,
    device: torch.device,
    alone: Sequence[int] = (),
    beside: Sequence[int] = (),
) -> Pacing | None:
    """The pacing of an engine. `alone` and `beside` are the captured sizes, if graphs are captured:
    see `Pacing`.

    None on a CPU without graphs and without a bound from the user, so that plans do not depend on
    measured times. With several batches, a request waits for one step of each batch between its
    tokens, so that each step gets an equal part of the user's bound.
    """
    bound = config.max_inter_token_latency
    if bound is not None:
        bound /= config.num_batches
    if device.type != "cuda" and not config.graphs and bound is None:
        return None
    return Pacing(bound, alone, beside, config.max_mixed_tokens)


def _level(num_decoding: int) -> int:
    """The level of a number of decoding requests, all of which share one d: four levels per
    doubling."""
    return round(4 * math.log2(num_decoding)) if num_decoding else 0


def _mean(old: float | None, new: float) -> float:
    return new if not old else old + _WEIGHT * (min(new, _LATE * old) - old)
