"""How many prompt tokens a step carries: at most as many as the requests that decode beside them can wait for."""

import math
from collections.abc import Sequence

import torch

from mtpkit.engine.options import EngineConfig
from mtpkit.engine.step import Plan

_FIRST = 512
"""Prompt tokens beside decoding requests until step times are known."""
_LEAST = 16
"""Fewest prompt tokens of a step, so that prompts are not starved whatever the bound is."""
_PATIENCE, _MOST_PATIENCE = 2.75, 12.0
"""Without a bound from the user, a step with prompts takes at most about this many times what decoding alone takes. It
is the larger number where requests wait for others to end, or as many more wait as decode: they wait longer than those
for their next token."""
_ENOUGH = 4096
"""Prompt tokens of a step beyond which a token costs no less: decoding requests would wait for nothing."""
_WEIGHT = 0.2
"""Weight of the newest time in a running mean."""
_DRIFT = 0.0003
"""Share of the gap by which the slower kind's seconds of a token fall towards the faster kind's, at each long step of
the faster kind: a kind that was timed too high, and is not chosen for it, is tried again after some thousand steps."""
_LATE = 2.0
"""A time of more than so many times the mean counts as that: a pause of the host says nothing about the device."""
_LONG = 256
"""Chunks of fewer tokens mostly wait for the weights to be read: a token takes at most what they suggest."""


class Pacing:
    """Chooses the prompt tokens of a step from the times of earlier steps.

    A step with n prompt tokens takes d + c n seconds, with d the time of decoding alone, and c that of one token; both
    are running means, d for numbers of decoding requests within a fifth of each other. A token that shares a forward
    pass with decode rows has a c of its own: it takes less where they leave the device room, since the weights are read
    for them anyway, and more where they do not. While requests wait for others to end, the smaller c is chosen: those
    that run have few prompts left, and more of their tokens a second would bring nothing forward. Otherwise it is the
    kind of which a second computes more. Nothing is bounded while no request decodes.

    Args:
        bound: seconds that a step may take while requests decode; None: a multiple of d.
        alone, beside: the numbers of prompt tokens that are captured without decode rows, and for steps that have
            decode rows too, both ascending; a step is filled up to one of them.
        most_mixed: most prompt tokens that share a forward pass with decode rows.
    """

    def __init__(
        self, bound: float | None, alone: Sequence[int] = (), beside: Sequence[int] = (), most_mixed: int = 0
    ) -> None:
        self.bound = bound
        self.alone, self.beside, self.most_mixed = alone, beside, most_mixed
        self.chosen: int | None = None
        """What `most_tokens` chose last."""
        self.told: int | None = None
        """What another rank chose for the next step: it is chosen here, too."""
        self._decode: dict[int, float] = {}
        self._token: dict[bool, float] = {}
        """c by whether the token shares a forward pass with decode rows."""

    def most_tokens(
        self, budget: int, num_decoding: int, num_waiting: int, crowded: bool = False, elsewhere: int = 0
    ) -> int:
        """Most prompt tokens of a step.

        Args:
            budget: what it is at most.
            num_decoding: decode rows of the step.
            num_waiting: requests of its batch whose prompts are not computed yet.
            crowded: whether some of these cannot begin before others end.
            elsewhere: decode rows of each other batch, on average. A step without decode rows delays these.
        """
        chosen = self.told
        if chosen is None:
            chosen = self._most(budget, num_decoding, num_waiting, crowded, elsewhere)
        self.chosen = chosen
        return chosen

    def _most(self, budget: int, num_decoding: int, num_waiting: int, crowded: bool, elsewhere: int) -> int:
        if delayed := num_decoding or elsewhere:
            share = 1.0 if crowded else min(1.0, (num_waiting - 1) / delayed)
            most_mixed = self.most_mixed if num_decoding else 0
            budget = self._bounded(budget, delayed, max(_PATIENCE, share * _MOST_PATIENCE), most_mixed, crowded)
        sizes = self.beside if num_decoding else self.alone
        return max((size for size in sizes if size <= budget), default=budget)

    def _bounded(self, budget: int, num_decoding: int, patience: float, most_mixed: int, crowded: bool) -> int:
        decode, mixed, apart = self._decode_seconds(num_decoding), self._token_seconds(True), self._token_seconds(False)
        if not decode or not mixed or not apart:
            return min(budget, _FIRST)
        bound = patience * decode if self.bound is None else self.bound
        room = max(0.0, bound - decode)
        most = budget if self.bound is not None else min(budget, _ENOUGH)
        choices = [(min(most, room / apart), apart)]
        if most_mixed:
            choices = [(min(most, most_mixed, room / mixed), mixed), *(one for one in choices if one[0] > most_mixed)]
        untimed = True not in self._token  # then these are tried
        if most_mixed >= _LONG and (untimed or (crowded and mixed < apart)):
            choices = choices[:1]
        # More tokens in a pass of their own may take so much longer that fewer are computed in a second.
        tokens, _ = max(choices, key=lambda choice: choice[0] / (decode + choice[0] * choice[1]))
        return min(budget, max(_LEAST, int(tokens)))

    def _token_seconds(self, mixed: bool) -> float | None:
        """c, or that of the other kind of steps where none of this kind was timed."""
        return self._token.get(mixed, self._token.get(not mixed))

    def _decode_seconds(self, num_decoding: int) -> float | None:
        """d for the nearest number of requests that was timed."""
        if not self._decode:
            return None
        return self._decode[min(self._decode, key=lambda known: abs(known - _level(num_decoding)))]

    def observe(self, plans: Sequence[Plan], seconds: float) -> None:
        """Record the time of a step: from the previous results, of whichever batch, to its own."""
        decoding = sum(plan.num_decode_rows for plan in plans)
        tokens = sum(plan.num_chunk_tokens for plan in plans)
        level, mixed = _level(decoding), any(plan.num_decode_rows and plan.num_chunk_tokens for plan in plans)
        known = self._token_seconds(mixed)
        if not tokens:
            self._decode[level] = _mean(self._decode.get(level), seconds)
            return
        if decoding and level not in self._decode:  # while prompts wait, no step may ever decode alone
            fed = sum(row.length for plan in plans for row in plan.decode_rows)
            left = 0.0 if known is None else seconds - tokens * known
            self._decode[level] = max(left, seconds * fed / (fed + tokens))
        elif decoding and seconds < self._decode[level]:  # it may have been timed too high, or the host was late
            self._decode[level] = _mean(self._decode[level], seconds)
        token = (seconds - (self._decode[level] if decoding else 0.0)) / tokens
        if token <= 0.0:  # results of two steps came together
            return
        if tokens >= _LONG:
            if mixed not in self._token and known:
                token = min(max(token, known / _LATE), known * _LATE)
            self._token[mixed] = _mean(self._token.get(mixed), token)
            this, other = self._token[mixed], self._token.get(not mixed, 0.0)
            if this < other:
                self._token[not mixed] = other + _DRIFT * (this - other)
        elif known is not None and token < known:
            self._token[mixed] = _mean(known, token)


def pacing_for(
    config: EngineConfig, device: torch.device, alone: Sequence[int] = (), beside: Sequence[int] = ()
) -> Pacing | None:
    """The pacing of an engine, given the captured sizes that `Pacing` takes, if there are any.

    None on a CPU without a bound from the user: steps as plans have them, which do not depend on times. A request waits
    from step to step for a step of each batch, so that each of these has its part of the user's bound.
    """
    bound = config.max_inter_token_latency
    if bound is not None:
        bound /= config.num_batches
    if device.type != "cuda" and not config.graphs and bound is None:
        return None
    return Pacing(bound, alone, beside, config.max_mixed_tokens)


def _level(num_decoding: int) -> int:
    """Which numbers of requests decode at the same d: four levels for each doubling."""
    return round(4 * math.log2(num_decoding)) if num_decoding else 0


def _mean(old: float | None, new: float) -> float:
    return new if not old else old + _WEIGHT * (min(new, _LATE * old) - old)
