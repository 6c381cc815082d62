"""Which hidden states heads read, against the fp64 oracle."""

import itertools

import pytest
import torch

from mtpkit.checkpoint import load_config, load_model_weights
from mtpkit.model import SequenceInput, base_forward, build_model, compute_logits, normed_states, unroll_depths
from tests.checkpoint.builders import GOLDEN
from tests.kernels.recurrence import relative
from tests.model.oracle import Oracle

LENGTH, DEPTHS, TOLERANCE = 9, 2, 1e-5
IDS = torch.randint(256, (2, LENGTH), generator=torch.Generator().manual_seed(4))
NORMED = list(itertools.product((True, False), repeat=2))
"""Of the base and of a depth, whether what they hand on is normed."""
REPEATED, DISTINCT = "tp1/mamba_attention_mlp", "tp1/distinct_heads"


def rules(normed: tuple[bool, bool]) -> dict[str, str]:
    words = ["after_final_norm" if each else "before_final_norm" for each in normed]
    return dict(zip(("mtp_reads_of_base", "mtp_reads_of_depth"), words, strict=True))


def model_of(case: str, normed: tuple[bool, bool]):
    model = build_model(load_config(GOLDEN / case).replace(**rules(normed)), device="cpu", init="none")
    load_model_weights(model, GOLDEN / case)
    return model


@torch.no_grad()
def states(model, attention: str) -> list[torch.Tensor]:
    """g^1, g^2, .. [b, s, h]."""
    hidden = base_forward(model, IDS, SequenceInput())
    return [g.transpose(0, 1) for g in unroll_depths(model, hidden, IDS, DEPTHS, attention)]


def error_per_depth(model, oracle: Oracle) -> float:
    """The largest of all depths, over the positions whose tokens exist."""
    pairs = zip(states(model, "per_depth"), oracle.unroll(IDS, DEPTHS), strict=True)
    return max(relative(have[:, : want.shape[1]], want) for have, want in pairs)


def error_serving(model, oracle: Oracle) -> float:
    have = states(model, "serving")
    places = [(i, oracle.draft(IDS, i, min(DEPTHS, LENGTH - 1 - i))) for i in range(LENGTH - 1)]
    found = [(have[k][:, i], want) for i, drafted in places for k, want in enumerate(drafted)]
    return max(relative(one, want) for one, want in found)


@pytest.mark.parametrize("normed", NORMED)
@pytest.mark.parametrize("case", [REPEATED, DISTINCT])
def test_states_are_those_of_the_oracle_under_each_rule_and_no_other(case, normed):
    model = model_of(case, normed)
    errors = [error_per_depth, *([error_serving] if case == REPEATED else [])]
    for error, other in itertools.product(errors, NORMED):
        found = error(model, Oracle.of(GOLDEN / case, other))
        assert found < TOLERANCE if other == normed else found > 1e-3, (error, other)


@pytest.mark.parametrize("normed", NORMED)
@torch.no_grad()
def test_the_base_has_the_same_logits_under_each_rule(normed):
    model, oracle = model_of(DISTINCT, normed), Oracle.of(GOLDEN / DISTINCT)
    hidden = base_forward(model, IDS, SequenceInput())
    assert (
        relative(compute_logits(model, normed_states(model, hidden)).transpose(0, 1), oracle.logits(oracle.hidden(IDS)))
        < TOLERANCE
    )
    handed_on = oracle.hidden(IDS) if normed[0] else oracle.stream(IDS)
    assert relative(hidden.transpose(0, 1), handed_on) < TOLERANCE
