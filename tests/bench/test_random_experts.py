"""Experts drawn at random: in what is timed only, so that tokens are checked with the routers' own;
and as many as the limit counts."""

from dataclasses import replace

import pytest
import torch

from mtpkit.bench.decode import measure_decode
from mtpkit.bench.load import measure_load
from mtpkit.bench.settings import (
    DecodeConfig,
    LoadConfig,
    PrefillConfig,
    StallConfig,
    TurnsConfig,
)
from mtpkit.bench.shapes import open_model
from mtpkit.engine.steps import verifier
from mtpkit.errors import MtpkitError, UserError
from mtpkit.kernels.moe import reference
from mtpkit.model.kinds import KINDS
from mtpkit.model.layers import moe

DECODE = DecodeConfig(
    batch_size=(3,),
    num_speculative_tokens=(0, 2),
    prompt_length=20,
    max_tokens=64,
    repeats=2,
    acceptance=(0.9, 0.5),
    random_experts=True,
)
LOAD = LoadConfig(
    num_prompts=6,
    prompt_median=20,
    prompt_max=40,
    output_median=12,
    output_max=20,
    num_speculative_tokens=(2,),
    repeats=2,
    acceptance=(0.9, 0.5),
    random_experts=True,
)
RULES = [
    None,
    PrefillConfig(batch_size=3, prompt_length=20),
    StallConfig(decoding_requests=2, arriving_prompts=1, arriving_length=40, lone_length=(20,)),
    TurnsConfig(turns=3, turn_length=8, conversations=2),
]


@pytest.fixture
def model():
    return open_model("nemotron-3-tiny", torch.device("cpu"), "float32", pattern="*E")


@pytest.fixture
def routed(monkeypatch):
    """Every call of a router: whether it was to draw, its logits, and the experts."""
    calls = []
    route = moe.route

    def spy(logits, bias, top_k, *rest):
        ids, weights = route(logits, bias, top_k, *rest)
        calls.append((bool(rest[-1]), logits, ids[:, :top_k]))
        return ids, weights

    monkeypatch.setattr(moe, "route", spy)
    return calls


def check(calls, model) -> None:
    """Both ways occur, each is what it says, and nothing draws any longer."""
    assert {drawn for drawn, _, _ in calls} == {False, True}
    same = {False: [], True: []}
    for drawn, logits, ids in calls:
        keys = reference.drawn_keys(logits[:, : model.mtpkit_config.moe.num_experts])
        want = keys.topk(ids.shape[1]).indices
        same[drawn].append(torch.equal(ids.sort(1).values, want.sort(1).values))
    assert all(same[True]) and not all(same[False])
    switches = {id(m.draw): int(m.draw) for m in model.modules() if isinstance(m, moe.Router)}
    assert list(switches.values()) == [0]


def test_timed_steps_draw_and_checked_ones_do_not(model, routed):
    result = measure_decode(model, DECODE, name="tiny")
    check(routed, model)
    assert "synthetic acceptance 0.9 0.5, experts drawn at random, float32" in result.title
    assert result.to_dict()["settings"]["random_experts"]
    # The run before, which is checked, is as long as each of the two that are timed.
    steps = [drawn for drawn, _, _ in routed]
    assert steps.count(True) > 1.5 * steps.count(False)

    routed.clear()
    result = measure_decode(model, replace(DECODE, random_experts=False), name="tiny")
    assert not any(drawn for drawn, _, _ in routed) and "drawn" not in result.title


def test_steps_read_as_many_experts_as_the_limit_counts(model, routed):
    """The base's layers, in steps of one token for each of 3 requests."""
    config = replace(DECODE, num_speculative_tokens=(0,))
    for _ in range(3):
        measure_decode(model, config)
    counts = [len(ids.unique()) for drawn, _, ids in routed if drawn and len(ids) == 3]
    matrices = KINDS["E"].matrices(model.mtpkit_config)
    expected = (matrices.read(3) - matrices.always) / matrices.expert
    found = torch.tensor(counts).float()
    assert len(counts) > 300
    assert abs(found.mean() - expected) < 5 * found.std() / len(counts) ** 0.5


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_loads_draw_while_they_are_timed(rule, model, routed):
    result = measure_load(model, LOAD, rule, "tiny")
    check(routed, model)
    assert "tiny" in result.title and "experts drawn at random" in result.title


@pytest.mark.parametrize(
    "measure",
    [
        lambda model: measure_decode(model, replace(DECODE, num_speculative_tokens=(0,))),
        lambda model: measure_load(model, replace(LOAD, num_speculative_tokens=(0,))),
    ],
    ids=["decode", "load"],
)
def test_tokens_of_a_broken_engine_are_refused(measure, model, monkeypatch):
    own_tokens = verifier.own_tokens
    monkeypatch.setattr(verifier, "own_tokens", lambda *args: (own_tokens(*args) + 1) % 512)
    with pytest.raises(MtpkitError, match="tokens are not those of a plain forward pass"):
        measure(model)


def test_what_cannot_draw_is_refused():
    dense = open_model("nemotron-h-tiny", torch.device("cpu"))
    for measure, config in ((measure_decode, DECODE), (measure_load, LOAD)):
        with pytest.raises(UserError, match=r"random_experts is for mixtures .* has none"):
            measure(dense, config)
    with pytest.raises(UserError, match="random_experts needs synthetic acceptance"):
        replace(DECODE, acceptance=None)
