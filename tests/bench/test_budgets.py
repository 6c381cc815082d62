"""`benchmarks.budgets`: the ideal gain by the cost model, and a run of all ways."""

import argparse

import pytest
import torch

from benchmarks.budgets.__main__ import compare, ideal_gain, lengths
from mtpkit.bench.machine import Machine
from mtpkit.bench.roofline import Roofline
from mtpkit.bench.shapes import get_config, open_model

H200 = Machine("an H200", None, "", 4.3e12, 4.4e12, 7.9e14)


def test_expected_tokens():
    assert lengths(0.5, 3).tolist() == [1.0, 1.5, 1.75, 1.875]


@pytest.mark.parametrize(
    ("batch_size", "rates", "least", "most"),
    [
        (128, [0.95, 0.4], 1.15, 1.3),
        (64, [0.95, 0.4], 1.1, 1.2),
        # Where verifying less saves nothing, there is nothing to gain.
        (16, [0.95, 0.4], 1.0, 1.01),
        (128, [0.8, 0.8], 1.0, 1.001),
        (1, [0.8], 1.0, 1.001),
    ],
)
def test_the_ideal_gain(batch_size, rates, least, most):
    roofline = Roofline(get_config("nemotron-h-8b").replace(mtp_num_depths=7), torch.bfloat16)
    assert least <= ideal_gain(roofline, H200, batch_size, rates, 7, 400) <= most


def test_all_ways_are_measured():
    options = argparse.Namespace(
        acceptance=[0.9, 0.3],
        num_speculative_tokens=[1, 2],
        most_drafts=2,
        prompt_length=9,
        steps=16,
    )
    model = open_model("nemotron-h-tiny", torch.device("cpu"), "float32")
    rows = compare(model, H200, 4, options)
    assert [row.way for row in rows] == [1, 2, "auto", "budget"]
    assert max(row.over_best_fixed for row in rows[:2]) == 1.0
    assert all(row.tokens_per_s > 0 and row.step_ms > 0 for row in rows)
    assert rows[-1].ideal >= 1.0
