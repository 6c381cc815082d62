"""Several batches of requests, which are planned, launched and committed in turn."""

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest

from mtpkit.engine import EngineConfig, SamplingParams
from mtpkit.engine.scheduling.admission import Admission
from mtpkit.engine.scheduling.blocks import IdPool
from tests.engine.fakes import HashModel, check_batches, fake_engine, run

MODEL = HashModel()


def lasting(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def recorded(num_batches: int, **settings):
    """An engine that is ahead of its results, and what it launches and commits: (what, batch)."""
    engine = fake_engine(
        MODEL, num_blocks=400, num_batches=num_batches, async_scheduling=True, **settings
    )
    launch = engine.executor.launch
    commit = engine.scheduler.commit
    events = []

    def launching(plan):
        events.append(("launch", plan.batch))
        return launch(plan)

    def committing(plan, result):
        events.append(("commit", plan.batch))
        return commit(plan, result)

    engine.executor.launch = launching
    engine.scheduler.commit = committing
    return engine, events


def in_batches(engine) -> list[int]:
    """How many running requests each batch has."""
    count = engine.config.num_batches
    found = Counter(request.slot % count for request in engine.scheduler.running)
    return [found[batch] for batch in range(count)]


@pytest.mark.parametrize("num_batches", [1, 2, 3])
@pytest.mark.parametrize("k", [0, 2])
def test_others_are_launched_while_results_of_a_batch_come(num_batches, k):
    engine, events = recorded(num_batches, num_speculative_tokens=k, max_num_seqs=6)
    for _ in range(6):
        engine.add_request([1, 2, 3], lasting(20))
    batches = range(num_batches)
    want = [("launch", batch) for batch in batches]
    for _ in range(4):
        want += [(what, batch) for batch in batches for what in ("launch", "commit")]
    for _ in range(5 * num_batches):
        engine.step()
    assert events == want and len(engine._under_way) == num_batches
    run(engine)
    assert not engine._under_way


def test_a_batch_that_runs_alone_is_one_step_ahead():
    engine, events = recorded(2)
    engine.add_request([1, 2, 3], lasting(20))
    for _ in range(4):
        engine.step()
    assert events == [("launch", 0)] + [("launch", 0), ("commit", 0)] * 3


def test_without_steps_ahead_all_is_committed_at_once():
    engine = fake_engine(MODEL, num_batches=2)
    batches = check_batches(engine.scheduler)
    for _ in range(4):
        engine.add_request([1, 2, 3], lasting(5))
    while engine.has_unfinished:
        assert len(engine.step()) == 2 and not engine._under_way
    assert batches == [0, 1] * 5


@pytest.mark.parametrize("num_batches", [2, 3])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("count", range(1, 9))
def test_few_requests_are_spread(num_batches, together, count):
    """Also those that come one after the other; and a batch whose requests have ended gets the next
    ones."""
    engine, _ = recorded(num_batches, max_num_seqs=8)
    for _ in range(count):
        engine.add_request([1, 2, 3], lasting(300))
        if not together:
            engine.step()
    for _ in range(num_batches):
        engine.step()
    assert (
        sum(in_batches(engine)) == count and max(in_batches(engine)) - min(in_batches(engine)) <= 1
    )
    for request in [one for one in engine.scheduler.running if one.slot % num_batches == 0]:
        engine.abort(request.request_id)
    for _ in range(2):
        engine.add_request([1, 2, 3], lasting(9))
    for _ in range(num_batches):
        engine.step()
    assert in_batches(engine)[0] == min(2, -(-(sum(in_batches(engine))) // num_batches))


def test_a_request_that_waits_has_a_batch_while_a_slot_is_free():
    """However running requests lie in slots, some batch may take one more; with none free no batch
    may."""
    for num_batches, num_slots in itertools.product((1, 2, 3), range(1, 8)):
        admission = Admission(
            EngineConfig(64, 0, max_num_seqs=num_slots, num_batches=num_batches), *[IdPool(8)] * 2
        )
        for taken in range(2**num_slots):
            slots = [slot for slot in range(num_slots) if taken >> slot & 1]
            admission.running = [SimpleNamespace(slot=slot) for slot in slots]
            for admission.waiting in ([None], [None] * 2, [None] * 9):
                room = [min(admission.room(batch)) for batch in range(num_batches)]
                assert any(room) == (len(slots) < num_slots) and min(room) >= 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_batches", [2, 3, 5])
def test_few_blocks_are_given_up_across_batches(num_batches, ahead):
    """The oldest request proceeds whatever its batch; another may come back in another batch. A
    batch that lacks blocks is planned again when the steps under way are committed, before others
    can take what these leave."""
    settings = dict(num_blocks=20, block_size=2, num_speculative_tokens=3, max_num_seqs=5)
    engine = fake_engine(MODEL, num_batches=num_batches, async_scheduling=ahead, **settings)
    scheduler = engine.scheduler
    check_batches(scheduler)
    seen = {}
    admit = scheduler.admission.admit
    waits = []
    plan_decode = scheduler.turns.plan

    def admitted(batch):
        admitted = admit(batch)
        if admitted:
            request = admitted.request
            seen.setdefault(request.request_id, []).append(request.slot % num_batches)
        return admitted

    def planned(batch, drafts, budget):
        rows = plan_decode(batch, drafts, budget)
        waits.append((batch, rows is None))
        return rows

    scheduler.admission.admit = admitted
    scheduler.turns.plan = planned
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1], [2, 2], [3, 1, 4], [1, 5]]
    ids = [engine.add_request(prompt, lasting(24)) for prompt in prompts]
    outputs = run(engine)
    assert engine.stats().preemptions > 0 == outputs[ids[0]].stats.preemptions
    assert any(len(set(batches)) > 1 for batches in seen.values())
    for name, prompt in zip(ids, prompts, strict=True):
        assert outputs[name].outputs[0].token_ids == MODEL.decode(prompt, lasting(24))
    assert all(turn == again for (turn, waited), (again, _) in itertools.pairwise(waits) if waited)
    assert any(waited for _, waited in waits) == ahead
    scheduler.check_integrity()
