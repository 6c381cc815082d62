"""Intervals over prompts against the standard error of a ratio, and how often they hold the
truth."""

import math

import numpy as np
import pytest
from scipy import stats

from mtpkit.training.bootstrap import MOST_UNITS, acceptance_interval, interval_around
from tests.shared import each


def sample(prompts, seed):
    """Steps and accepted drafts of prompts that differ in length and in how easy they are; 1.8
    drafts per step."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(5, 60, prompts)
    return steps, rng.binomial(3 * steps, rng.beta(6, 4, prompts))


@pytest.mark.parametrize("prompts", [100, MOST_UNITS, 20 * MOST_UNITS])
def test_is_as_wide_as_the_standard_error_says(prompts):
    steps, accepted = sample(prompts, 0)
    ratio = accepted.sum() / steps.sum()
    error = np.sqrt(((accepted - ratio * steps) ** 2).sum()) / steps.sum()
    low, high = acceptance_interval(steps, accepted)
    assert low == pytest.approx(1 + ratio - 1.96 * error, abs=0.35 * error)
    assert high == pytest.approx(1 + ratio + 1.96 * error, abs=0.35 * error)


def test_holds_the_truth_in_95_of_100_samples():
    found = [acceptance_interval(*sample(60, seed)) for seed in range(200)]
    assert 180 <= sum(low <= 2.8 <= high for low, high in found) <= 198


@pytest.mark.parametrize("prompts", [2, 3, 5])
def test_holds_the_truth_as_often_with_few_prompts(prompts):
    """The middle 95% of resamples alone would hold it in 97, 143 and 164 of these 200 samples."""
    found = [acceptance_interval(*sample(prompts, seed)) for seed in range(200)]
    assert 176 <= sum(low <= 2.8 <= high for low, high in found) <= 198
    assert all(low >= 1 for low, _ in found)


@each("units", [2, 3, 8, 1000])
def test_is_as_much_wider_than_resamples_as_the_t_distribution_says(units):
    """And as the variance of few units is too small."""
    wider = stats.t.ppf(0.975, units - 1) / stats.norm.ppf(0.975) * math.sqrt(units / (units - 1))
    values = np.linspace(0, 1, 41)
    low, high = interval_around(0.5, values, units)
    assert low == pytest.approx(0.5 - 0.475 * wider, rel=0.02, abs=0.01)
    assert high == pytest.approx(0.5 + 0.475 * wider, rel=0.02, abs=0.01)


def test_the_order_of_prompts_does_not_matter_and_one_is_too_few():
    steps, accepted = sample(30, 0)
    assert acceptance_interval(steps[::-1], accepted[::-1]) == acceptance_interval(steps, accepted)
    assert acceptance_interval(steps[:1], accepted[:1]) is None
    assert acceptance_interval(np.array([9, 9]), np.array([9, 9])) == (2, 2)
    assert acceptance_interval(np.array([9, 0, 9]), np.array([9, 0, 9])) == (2, 2), (
        "no step, no weight"
    )
    assert acceptance_interval(np.zeros(9, dtype=int), np.zeros(9, dtype=int)) is None
