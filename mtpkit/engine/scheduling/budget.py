"""Budgets of verification: which requests of a step verify fewer drafts than the others.

At many requests a step takes longer the more tokens it verifies, and a draft that is rarely right
does not pay for its place. What decides is known before the drafts are drawn: the acceptance of the
request's earlier steps. Whatever it says, the output keeps its law: a draft that is verified has
the distribution that it was drawn from, and a token without a draft is the base's own.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mtpkit.engine.requests.request import Request
from mtpkit.engine.requests.tree import DraftShape
from mtpkit.engine.scheduling.adaptive import GAIN, AdaptiveSpeculation

_MOST_SHORT = 3
"""The most drafts that short rows verify, to be considered."""
_LEARNING_RATE = 0.1
_PARTS = 8
"""Rows that verify all drafts are counted in eighths, since each number is a CUDA graph."""


class SplitTimes(NamedTuple):
    """Seconds of steps that make the most drafts and in which some rows verify none."""

    all_short: float
    """All rows verify none."""
    half_short: Sequence[float]
    """For K = 1, 2, ..: half of the rows, rounded down, verify none; the others verify K drafts,
    and all make so many."""


def long_rows(rows: int, wanted: int) -> int:
    """The number of rows that verify all drafts, at least `wanted` of `rows`."""
    part = max(1, (1 << max(0, rows - 1).bit_length()) // _PARTS)
    return min(rows, -(-wanted // part) * part)


def by_acceptance(requests: Sequence[Request]) -> list[Request]:
    """Requests by how much the verification of their drafts is worth, the best first; of equals the
    oldest. All ranks find the same order: it depends on results alone."""
    return sorted(requests, key=lambda request: (-request.draft_worth, request.arrival))


class BudgetedSpeculation(AdaptiveSpeculation):
    """Chooses K for a step as `AdaptiveSpeculation` does, and which rows verify fewer drafts.

    A step with R rows takes K d + V seconds: d for a draft of all rows, V for the verification of
    all tokens. V is known where none, half and all of the rows verify K drafts, from times that are
    measured before the first request, and taken to be linear between.

    Args:
        step_times, batches: see `AdaptiveSpeculation`; chains only.
        split_times: for the same numbers of rows.
        fixed: always make the most drafts.
    """

    def __init__(
        self,
        step_times: Mapping[tuple[int, DraftShape], float],
        split_times: Mapping[int, SplitTimes],
        batches: int = 1,
        fixed: bool = False,
    ) -> None:
        super().__init__(step_times, batches)
        assert not self._trees
        self._fixed = fixed
        self._offsets = np.zeros(self.max_depth)
        """For each depth, what is added to the logit of a request's rate."""
        self._costs = {
            size: _Cost.of([self.step_times[size, k] for k in self._shapes], times)
            for size, times in split_times.items()
        }

    def decide(self, requests: Sequence[Request]) -> tuple[DraftShape, tuple[int, int]]:
        """Choose the drafts of a step with these decode rows, and `Decision.short`."""
        rows = len(requests)
        size = self._size(rows)
        cost = self._costs.get(size)
        best = self.max_depth if self._fixed else self._best(size)
        probe = None if self._fixed else self._probe(best)
        if probe is not None or cost is None or rows < 2:
            return best if probe is None else probe, (0, 0)

        lengths = self._lengths(by_acceptance(requests))
        counts = np.array(sorted({long_rows(rows, wanted) for wanted in range(rows + 1)}))
        found: tuple[DraftShape, tuple[int, int]] = best, (0, 0)
        fastest = 0.0
        for k in range(self.max_depth if self._fixed else 0, self.max_depth + 1):
            for fewer in range(max(1, min(k, 1 + _MOST_SHORT))):
                gains = np.concatenate([[0.0], (lengths[:, k] - lengths[:, fewer]).cumsum()])
                seconds = cost.seconds(k, fewer, counts / rows)
                speeds = (lengths[:, fewer].sum() + gains[counts]) / seconds
                # Fewer shapes are better, where they are as fast.
                speeds[counts < rows] /= GAIN
                fast = int(speeds.argmax())
                if speeds[fast] > fastest * (GAIN if k else 1.0):
                    fastest = float(speeds[fast])
                    short = rows - int(counts[fast])
                    found = k, (short, fewer if short else 0)
        return found

    def _lengths(self, requests: Sequence[Request]) -> np.ndarray:
        """[R, 1 + K] expected tokens of each row for every number of drafts."""
        own = np.array([request.history.rate for request in requests])
        drafting = np.array([request.params.speculate for request in requests])
        reached = np.cumprod(self._expected(own), axis=1) * drafting[:, None]
        first = np.ones((len(own), 1))
        return np.concatenate([first, reached], axis=1).cumsum(axis=1)

    def _expected(self, own: np.ndarray) -> np.ndarray:
        """[R, K] rate of each depth, given what each request's own drafts show, [R]."""
        logits = np.log(own / (1 - own))[:, None] + self._offsets
        return 1 / (1 + np.exp(-logits))

    def observe(
        self, accepted: Sequence[int], fresh: Sequence[int], rates: Sequence[float] = ()
    ) -> None:
        """See `AdaptiveSpeculation.observe`. Which rows verify many drafts depends on their rates,
        so that means over rows say too much of deep drafts: depths are compared with what the
        request's own rate lets expect of them.

        Args:
            rates: `AcceptanceHistory.rate` of each row before the step.
        """
        super().observe(accepted, fresh)
        right = np.array(accepted)
        known = np.array(fresh)
        expected = self._expected(np.array(rates))
        for depth in range(self.max_depth):
            tested = (right >= depth) & (known > depth)
            if tested.any():
                errors = (right > depth)[tested] - expected[tested, depth]
                change = _LEARNING_RATE * float(errors.mean())
                self._offsets[depth] = np.clip(self._offsets[depth] + change, -4, 4)


class _Cost(NamedTuple):
    """Times of steps with R rows."""

    draft: float
    """Seconds of a draft of all rows."""
    verify: np.ndarray
    """[1 + K] seconds of verification where all rows verify so many drafts."""
    half: np.ndarray
    """[1 + K] the same where half of the rows verify so many and the others none. Where kernels pad
    rows to a power of two of tokens, as many tokens in rows of one kind take longer."""

    @classmethod
    def of(cls, times: Sequence[float], split: SplitTimes) -> "_Cost":
        """Fit to the times of steps in which all rows verify as many drafts as they make, 0 and
        more, and to those of steps with short rows."""
        most = len(times) - 1
        draft = max(0.0, (split.all_short - times[0]) / most) if most else 0.0
        drafting = draft * np.arange(1 + most)
        verify = np.maximum.accumulate(np.array(times) - drafting)
        half = np.maximum.accumulate(np.array([times[0], *split.half_short]) - drafting)
        return cls(draft, verify, half)

    def seconds(self, drafts: int, fewer: int, long: np.ndarray) -> np.ndarray:
        """[n] seconds of steps that make `drafts` drafts.

        Args:
            fewer: the drafts that short rows verify.
            long: [n] the share of the rows that verify all drafts.
        """
        times = [self.verify[0], self.half[drafts], self.verify[drafts]]
        verify = np.interp(long, [0, 0.5, 1], times)

        # The drafts of short rows take what those of long rows do on average, and more where matrix
        # products need another tile for them.
        average = 2 * (self.half[drafts] - self.verify[0]) / max(1, drafts)
        drafted = (1 - long) * fewer
        fed = long * drafts
        counts = np.arange(len(self.verify))
        alone = np.interp(fed, counts, self.verify)
        more = np.interp(fed + drafted, counts, self.verify) - alone
        return drafts * self.draft + verify + np.maximum(more, drafted * average)
