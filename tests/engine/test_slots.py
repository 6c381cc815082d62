"""A slot keeps nothing of the request that had it before."""

import pytest
import torch

from mtpkit import SamplingParams
from mtpkit.engine import Engine
from mtpkit.engine.slots import Slots
from tests.engine.tiny import generate, guide, make_llm, make_prompts, tiny_model

MIXED = [
    {"top_k": 2},
    {},
    {"top_p": 0.3},
    {"temperature": 2.0},
    {"min_p": 0.4},
    {"temperature": 0.0},
    {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "temperature": 0.7},
    {"temperature": 1.5},
]
"""Every filter is followed by a request without it."""


def assert_same_as_alone(params, k: int, slots: int) -> None:
    """Requests one after another in a few slots give what each gives in an engine of its own."""
    prompts = [[2 * i + 1, 2 * i + 2] for i in range(len(params))]
    want = [make_llm(tiny_model(), 0).generate([p], one)[0] for p, one in zip(prompts, params, strict=True)]
    got = make_llm(tiny_model(), k, max_num_seqs=slots).generate(prompts, params)
    assert [output.outputs[0].token_ids for output in got] == [output.outputs[0].token_ids for output in want]


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("slots", [1, 2])
def test_requests_of_all_kinds_in_slots_that_others_had(slots, k):
    lengths = [4, 9, 14] * 3
    sampled = enumerate(zip(MIXED, lengths, strict=False))
    assert_same_as_alone(
        [SamplingParams(seed=i, max_tokens=n, ignore_eos=True, **sampling) for i, (sampling, n) in sampled], k, slots
    )


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("name, value", [("top_k", 1), ("top_p", 0.1), ("min_p", 0.9)])
def test_a_filter_goes_with_its_request(name, value, k):
    """The third request takes the first one's slot while the second's filter is still computed for both rows."""
    filtered, free = {name: value}, {"temperature": 2.0}
    sampled = enumerate([(filtered, 3), (filtered, 30), (free, 15)])
    assert_same_as_alone(
        [SamplingParams(seed=i, max_tokens=n, ignore_eos=True, **sampling) for i, (sampling, n) in sampled], k, slots=2
    )


def test_a_slot_that_nobody_had_can_be_sampled():
    """Null rows of CUDA graphs are: filters of 0 would leave them no token."""
    slots = Slots.allocate(3, 2, (), torch.device("cpu"), None)
    assert slots.top_k.tolist() == [1] * 3 and slots.top_p.tolist() == [1.0] * 3 and slots.min_p.tolist() == [0.0] * 3


def move_request(engine, request) -> None:
    """Put a running request into a free slot; the one that it had is free then."""
    old, (new,) = request.slot, engine.scheduler.slots.allocate(1)
    engine.states.restore(new, engine.states.copy(old, engine.slots.committed), engine.slots.committed)
    for values in vars(engine.slots).values():
        if isinstance(values, torch.Tensor):
            values[new] = values[old]
    request.slot = new
    engine.scheduler.slots.release([old])
    engine.drafter.known.move(old, new)


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize("mtp_pattern", ["*-", "M*"])
def test_a_request_restored_into_another_slot_goes_on_with_the_same_tokens(mtp_pattern, rollback, monkeypatch):
    """After every step one request changes its slot, and free slots are NaN; its acceptance stays the same too."""
    model, prompts = tiny_model(mtp_pattern=mtp_pattern), make_prompts()
    runs, moved = [], 0

    def step_and_move(self, *args):
        nonlocal moved
        outputs = step(self, *args)
        for request in self.scheduler.running[moved % max(1, len(self.scheduler.running)) :][:1]:
            move_request(self, request)
            moved += 1
        return outputs

    step = Engine.step
    for change in (step, step_and_move):
        monkeypatch.setattr(Engine, "step", change)
        llm = guide(make_llm(model, 3, state_rollback=rollback), prompts)
        runs.append((generate(llm, prompts), llm.stats().acceptance))
    assert runs[0] == runs[1] and moved >= 8
