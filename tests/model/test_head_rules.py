"""Which hidden states heads read, against the fp64 oracle."""

import functools
import itertools
import operator

import pytest
import torch

from mtpkit.checkpoint import load_config, load_model_weights
from mtpkit.checkpoint.families.keys import RULE_KEYS
from mtpkit.model import (
    SequenceInput,
    base_forward,
    build_model,
    compute_logits,
    normed_states,
    unroll_depths,
)
from tests.checkpoint.builders import GOLDEN
from tests.kernels.recurrence import relative
from tests.model.oracle import Oracle
from tests.model.toy import packed

LENGTH = 9
DEPTHS = 2
TOLERANCE = 1e-5
IDS = torch.randint(256, (2, LENGTH), generator=torch.Generator().manual_seed(4))
Rules = tuple[tuple[bool, bool], bool]
"""Of the base and of a depth, whether what they hand on is normed; and whether the first embedding
is left out."""
RULES: list[Rules] = list(
    itertools.product(itertools.product((True, False), repeat=2), (False, True))
)
REPEATED = "tp1/mamba_attention_mlp"
DISTINCT = "tp1/distinct_heads"


@functools.cache
def oracle(case: str, rules: Rules) -> Oracle:
    return Oracle.of(GOLDEN / case, *rules)


def model_of(case: str, rules: Rules):
    words = ["after_final_norm" if each else "before_final_norm" for each in rules[0]]
    changes = dict(zip(RULE_KEYS[:3], [*words, rules[1]], strict=True))
    model = build_model(load_config(GOLDEN / case).replace(**changes), device="cpu", init="none")
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


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("case", [REPEATED, DISTINCT])
def test_states_are_those_of_the_oracle_under_each_rule_and_no_other(case, rules):
    model = model_of(case, rules)
    for error in [error_per_depth, *([error_serving] if case == REPEATED else [])]:
        for other in RULES if error is error_per_depth else one_apart(rules):
            found = error(model, oracle(case, other))
            assert found < TOLERANCE if other == rules else found > 1e-3, (error, other)


def one_apart(rules: Rules) -> list[Rules]:
    """The rules themselves, and those that differ from them in one."""
    flat = [(*normed, zeroed) for normed, zeroed in RULES]
    mine = (*rules[0], rules[1])
    return [
        each for each, one in zip(RULES, flat, strict=True) if sum(map(operator.ne, mine, one)) <= 1
    ]


@pytest.mark.parametrize("rules", RULES[::2])
@torch.no_grad()
def test_the_base_has_the_same_logits_under_each_rule(rules):
    model = model_of(DISTINCT, rules)
    plain = oracle(DISTINCT, RULES[0])
    hidden = base_forward(model, IDS, SequenceInput())
    logits = compute_logits(model, normed_states(model, hidden)).transpose(0, 1)
    assert relative(logits, plain.logits(plain.hidden(IDS))) < TOLERANCE
    assert (
        relative(hidden.transpose(0, 1), plain.hidden(IDS) if rules[0][0] else plain.stream(IDS))
        < TOLERANCE
    )


@pytest.mark.parametrize("attention", ["serving", "per_depth"])
@torch.no_grad()
def test_each_document_of_a_row_has_its_own_position_0(attention):
    model = model_of(REPEATED, ((False, False), True))
    documents, positions = packed(4, 5)
    hidden = base_forward(
        model, IDS, SequenceInput(documents.expand(2, -1), positions.expand(2, -1))
    )
    together = list(
        unroll_depths(
            model, hidden, IDS, DEPTHS, attention, documents.expand(2, -1), positions.expand(2, -1)
        )
    )
    for first, last in ((0, 4), (4, 9)):
        ids = IDS[:, first:last]
        alone = unroll_depths(
            model, base_forward(model, ids, SequenceInput()), ids, DEPTHS, attention
        )
        for depth, (have, want) in enumerate(zip(together, alone, strict=True), start=1):
            count = last - first - depth
            assert relative(have[first : first + count], want[:count].double()) < TOLERANCE, (
                first,
                depth,
            )
    ignored = unroll_depths(model, hidden, IDS, 1, attention, documents.expand(2, -1))
    assert relative(next(ignored)[4:8], together[0][4:8].double()) > 1e-3
