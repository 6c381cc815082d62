"""Limits on the prompt tokens of each step, so that decoding requests do not wait too long for
their next token."""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median

from mtpkit.engine.requests.config import EngineConfig
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
_LONG = 256
"""Prompt tokens from which a step is long. Shorter steps mostly wait for the weights to be read, so
their seconds per token are only an upper bound."""
_KEPT = 9
"""Measurements of one quantity that are kept. Its value is their median: a late host makes one
interval too long and often the next one too short, and five of nine would have to be wrong in the
same direction."""
_FEW = 3
"""Measurements from which on a median is trusted. Where a quantity is measured again after a long
time, only two old measurements are kept beside the new one, so that two new ones outvote them."""
_SOON = 8
_LATER = 128
"""A step has no prompt tokens if this many steps had some since its level was last timed without:
one while the level has never been timed, `_SOON` while it has fewer than `_FEW` measurements, then
`_LATER`."""
_AGAIN = 48
"""The kind of step that is not chosen is tried again after the other kind has computed this many
times as many prompt tokens as the trial would, so that trials compute about 2 % of the tokens,
whichever kind has longer steps."""
_TRIAL = 20
"""Steps after which a trial ends although it has not been timed, since too few prompts wait. It is
more than the number of steps for which prompts may gather."""
_FASTEST = 1e-9
"""Least seconds per prompt token, even if measurements leave none."""


class _Measured:
    """The newest measurements of one quantity."""

    def __init__(self) -> None:
        self.newest = deque[tuple[float, int, int | None]](maxlen=_KEPT)
        """Seconds, prompt tokens and level of each step that was timed; the level is None without
        decode rows."""
        self.since = 0
        """Steps (for d) or prompt tokens (for c) of the other kind since this one was last measured
        or due."""
        self.stale = False
        """Whether so many of these passed that the next measurement counts for more."""
        self.trial = 0
        """Steps that are left of a trial."""

    def due(self, steps: int = 1) -> None:
        """Note that the quantity is to be measured within `steps` steps."""
        self.since = 0
        self.stale = True
        self.trial = steps

    def add(self, seconds: float, tokens: int, level: int | None) -> None:
        """Add the time of a step."""
        while self.stale and len(self.newest) >= _FEW:
            self.newest.popleft()
        self.newest.append((seconds, tokens, level))
        self.since = 0
        self.stale = False
        self.trial = 0


class Pacing:
    """Chooses the number of prompt tokens of each step from the times of earlier steps.

    A step is taken to last d + c n seconds: n is its number of prompt tokens, d the time of a step
    that only decodes, and c the time per prompt token. Each level of the number of decoding
    requests has its own d; levels are about a fifth apart. There are two values of c, one for each
    kind of step: prompt tokens *mixed* into the forward pass of the decode rows, or in a pass
    *apart*. Mixed tokens are cheaper while the decode rows leave the device room, since the weights
    are read for those rows anyway, and dearer otherwise.

    Both d and c are medians of the newest measurements. Only steps without prompt tokens measure d.
    Where prompts wait in every step, a step goes without them now and then; the kind of step that
    is not chosen is tried now and then. So no wrong value lasts because it prevents the steps that
    would correct it.

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
        self._decode: defaultdict[int, _Measured] = defaultdict(_Measured)
        """Steps without prompt tokens, by level."""
        self._decode_seconds: dict[int, float] = {}
        """d of each level that was timed."""
        self._long = {True: _Measured(), False: _Measured()}
        """Long steps with mixed tokens (True) and with tokens apart (False)."""
        self._short = {True: _Measured(), False: _Measured()}
        """Shorter steps since the newest long one."""

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
            budget: upper limit of the result, which is 0 where a step without prompt tokens is to
                be timed.
            num_decoding: decode rows of the step.
            num_waiting: requests of the step's batch whose prompts are not computed yet.
            crowded: whether some of the waiting requests cannot begin before running requests end.
            elsewhere: mean number of decode rows of each other batch, which a step without decode
                rows delays.
        """
        if not num_waiting:
            return budget
        if num_decoding and self._decodes_alone(_level(num_decoding)):
            return 0
        if delayed := num_decoding or elsewhere:
            share = 1.0 if crowded else min(1.0, (num_waiting - 1) / delayed)
            most_mixed = self.most_mixed if num_decoding else 0
            budget = self._bounded(
                budget, delayed, max(_PATIENCE, share * _MOST_PATIENCE), most_mixed, crowded
            )
        sizes = self.beside if num_decoding else self.alone
        return max((size for size in sizes if size <= budget), default=budget)

    def _decodes_alone(self, level: int) -> bool:
        """Whether the next step has no prompt tokens, so that d of this level is measured."""
        measured = self._decode[level]
        if not measured.newest:
            wait = 1
        elif len(measured.newest) < _FEW:
            wait = _SOON
        else:
            wait = _LATER
        if measured.since < wait:
            return False
        measured.due()
        return True

    def _bounded(
        self, budget: int, num_decoding: int, patience: float, most_mixed: int, crowded: bool
    ) -> int:
        decode = self._seconds_to_decode(_level(num_decoding))
        mixed = self._token_seconds(True)
        apart = self._token_seconds(False)
        if not decode or not mixed or not apart:
            return min(budget, _FIRST)
        bound = patience * decode if self.bound is None else self.bound
        room = max(0.0, bound - decode)
        most = budget if self.bound is not None else min(budget, _ENOUGH)
        tokens = {True: min(most, most_mixed, room / mixed), False: min(most, room / apart)}
        kind = bool(most_mixed)
        if most_mixed and tokens[False] > most_mixed:
            # More tokens in a pass of their own may take so much longer that fewer are computed per
            # second.
            rate_mixed = tokens[True] / (decode + tokens[True] * mixed)
            rate_apart = tokens[False] / (decode + tokens[False] * apart)
            gathering = crowded and most_mixed >= _LONG and mixed < apart
            kind = self._tried(gathering or rate_mixed >= rate_apart, tokens)
        return min(budget, max(_LEAST, int(tokens[kind])))

    def _tried(self, best: bool, tokens: dict[bool, float]) -> bool:
        """The kind of the next step: `best`, unless the other kind is to be tried. `tokens`: its
        prompt tokens, by kind."""
        if tokens[True] >= _LONG and len(self._long[True].newest) < _FEW:
            return True
        other = self._long[not best]
        if tokens[not best] >= _LONG and other.since >= _AGAIN * tokens[not best]:
            other.due(_TRIAL)
        if not other.trial:
            return best
        other.trial -= 1
        return not best

    def _token_seconds(self, mixed: bool) -> float | None:
        """c of this kind of step. While it has few measurements, c is at most twice that of the
        other kind, and at least half of it."""
        token = self._median(self._long[mixed])
        other = self._median(self._long[not mixed])
        if token is None:
            token = other
        elif other is not None and len(self._long[mixed].newest) < _FEW:
            token = min(max(token, other / 2), other * 2)
        if token is None:
            return None
        short = self._median(self._short[mixed])
        # A few short steps say too little. Many show that c is too high, perhaps so high that no
        # step is long any more.
        if short is not None and len(self._short[mixed].newest) == _KEPT:
            token = min(token, short)
        return max(token, _FASTEST)

    def _median(self, steps: _Measured) -> float | None:
        """Median of the seconds per prompt token, with d as it is known now."""
        tokens = []
        for seconds, num_tokens, level in steps.newest:
            decode = 0.0 if level is None else self._seconds_to_decode(level)
            if decode is not None:
                tokens.append((seconds - decode) / num_tokens)
        return median(tokens) if tokens else None

    def _seconds_to_decode(self, level: int) -> float | None:
        """d of the nearest level that was timed."""
        known = self._decode_seconds
        if not known or level in known:
            return known.get(level)
        return known[min(known, key=lambda other: abs(other - level))]

    def observe(self, plans: Sequence[Plan], seconds: float) -> None:
        """Record the seconds of a step, from the arrival of the previous results (of any batch) to
        that of its own."""
        decoding = sum(plan.num_decode_rows for plan in plans)
        tokens = sum(plan.num_chunk_tokens for plan in plans)
        level = _level(decoding) if decoding else None
        if not tokens:
            if level is not None:  # otherwise there are only copies between slots and checkpoints
                self._decode[level].add(seconds, 0, level)
                self._decode_seconds[level] = median(
                    one for one, _, _ in self._decode[level].newest
                )
            return
        if level is not None:
            self._decode[level].since += 1
        mixed = any(plan.num_decode_rows and plan.num_chunk_tokens for plan in plans)
        if tokens < _LONG:
            self._short[mixed].add(seconds, tokens, level)
            return
        self._long[mixed].add(seconds, tokens, level)
        self._short[mixed].newest.clear()
        if decoding:
            self._long[not mixed].since += tokens


def pacing_for(
    config: EngineConfig,
    on_gpu: bool,
    alone: Sequence[int] = (),
    beside: Sequence[int] = (),
) -> Pacing | None:
    """The pacing of an engine.

    None on a CPU without graphs and without a bound from the user, so that plans do not depend on
    measured times. With several batches, a request waits for one step of each batch between its
    tokens, so that each step gets an equal part of the user's bound.

    Args:
        on_gpu: whether steps run on a GPU.
        alone, beside: the captured sizes, if graphs are captured, see `Pacing`.
    """
    bound = config.max_inter_token_latency
    if bound is not None:
        bound /= config.num_batches
    if not on_gpu and not config.graphs and bound is None:
        return None
    return Pacing(bound, alone, beside, config.max_mixed_tokens)


def _level(num_decoding: int) -> int:
    """The level of a number of decoding requests, all of which share one d: four levels per
    doubling."""
    return round(4 * math.log2(num_decoding))
