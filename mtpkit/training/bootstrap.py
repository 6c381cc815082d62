"""95% intervals by the bootstrap over prompts: what the same measurement may say of other prompts of the same kind."""

import numpy as np

RESAMPLES = 1000
MOST_UNITS = 1000
"""Largest number of units that are drawn; more prompts are put into this many groups at random, which are drawn."""

Interval = tuple[float, float]


def draw_weights(units: int) -> np.ndarray:
    """[RESAMPLES, units] int64, how often each unit is in each resample; the same for each call."""
    return np.random.default_rng(0).multinomial(units, np.full(units, 1 / units), size=RESAMPLES)


def middle(values: np.ndarray) -> Interval:
    """The interval that holds the middle 95% of the resamples' values."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def acceptance_interval(steps: np.ndarray, accepted: np.ndarray) -> Interval | None:
    """Interval of the acceptance length, from steps [n] and accepted drafts [n] of each prompt.

    Prompts without a step do not count. None for fewer than two prompts, which say nothing about others.
    """
    counts = np.stack([steps, accepted], axis=1)[steps > 0].astype(np.float64)
    if len(counts) < 2:
        return None
    counts = counts[np.lexsort(counts.T)]  # the result does not depend on the order of the prompts
    if len(counts) > MOST_UNITS:
        shuffled = np.random.default_rng(0).permutation(counts)
        counts = np.add.reduceat(shuffled, np.arange(MOST_UNITS) * len(counts) // MOST_UNITS)
    taken, kept = (draw_weights(len(counts)) @ counts).T
    return middle(1 + kept / taken)


def show_interval(interval: Interval | None) -> str:
    """`2.70-2.93`; empty without an interval."""
    if interval is None:
        return ""
    low, high = interval
    return f"{low:.2f}-{high:.2f}"
