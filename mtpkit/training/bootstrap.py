"""95% intervals by the bootstrap over prompts: what the same measurement may say of other prompts
of the same kind."""

import functools
import math
from statistics import NormalDist

import numpy as np

RESAMPLES = 1000
MOST_UNITS = 1000
"""Largest number of units that are drawn; more prompts are put into this many groups at random,
which are drawn."""

Interval = tuple[float, float]


def draw_weights(units: int) -> np.ndarray:
    """[RESAMPLES, units] int64, how often each unit is in each resample; the same for each call."""
    return np.random.default_rng(0).multinomial(units, np.full(units, 1 / units), size=RESAMPLES)


def interval_around(estimate: float, values: np.ndarray, units: int) -> Interval:
    """The interval around an estimate from the values of the resamples.

    It holds the middle 95% of them, made wider for few units: see `_widening`.
    """
    low, high = estimate + _widening(units) * (np.quantile(values, [0.025, 0.975]) - estimate)
    return float(low), float(high)


@functools.cache
def _widening(units: int) -> float:
    """How many times too narrow the middle 95% of resamples is: 9 times for 2 units, 1.3 times for
    8 (Hesterberg 2014, arXiv:1411.5279).

    Resamples differ as the units at hand do, which lie closer to their own mean than to that of all
    units; and the spread of few units is little known, so that the estimate follows a
    t-distribution.
    """
    draws = np.random.default_rng(0).standard_t(units - 1, size=200_000)
    return (
        float(np.quantile(np.abs(draws), 0.95))
        / NormalDist().inv_cdf(0.975)
        * math.sqrt(units / (units - 1))
    )


def acceptance_interval(steps: np.ndarray, accepted: np.ndarray) -> Interval | None:
    """Interval of the acceptance length, from steps [n] and accepted drafts [n] of each prompt.

    Prompts without a step do not count. None for fewer than two prompts, which say nothing about
    others.
    """
    counts = np.stack([steps, accepted], axis=1)[steps > 0].astype(np.float64)
    if len(counts) < 2:
        return None
    counts = counts[np.lexsort(counts.T)]  # the result does not depend on the order of the prompts
    if len(counts) > MOST_UNITS:
        shuffled = np.random.default_rng(0).permutation(counts)
        counts = np.add.reduceat(shuffled, np.arange(MOST_UNITS) * len(counts) // MOST_UNITS)
    taken, kept = (draw_weights(len(counts)) @ counts).T
    whole_taken, whole_kept = counts.sum(axis=0)
    low, high = interval_around(1 + whole_kept / whole_taken, 1 + kept / taken, len(counts))
    return max(low, 1.0), high


def show_interval(interval: Interval | None) -> str:
    """`2.70-2.93`; empty without an interval."""
    if interval is None:
        return ""
    low, high = interval
    return f"{low:.2f}-{high:.2f}"
