"""Of prompts that begin alike and come together, the oldest computes the beginning and the others wait for it."""

import pytest

from mtpkit.engine.prefix import forks
from tests.engine.prefix.compare import Pair
from tests.engine.prefix.test_equality import KINDS
from tests.engine.tiny import decode, greedy, make_llm, make_prompts, tiny_model

(SHARED,) = make_prompts((29,))
PROMPTS = [[*SHARED, index, 5, 7] for index in range(5)]


@pytest.fixture(autouse=True)
def short_beginnings_are_worth_it(monkeypatch):
    monkeypatch.setattr(forks, "WORTH", 20)


@pytest.mark.parametrize("pattern, mtp_pattern", [*KINDS, ("M-*M-", "M-")])
@pytest.mark.parametrize("heads, k", [("repeated", 0), ("repeated", 3), ("distinct", 3)])
@pytest.mark.parametrize("budget", [12, 400])
def test_all_but_one_go_on_from_where_they_part(pattern, mtp_pattern, heads, k, budget):
    """At the last token in common, where the heads' states depend on the next one."""
    pair = Pair(tiny_model(heads, pattern, mtp_pattern), k, max_num_batched_tokens=budget)
    pair.run(PROMPTS, greedy(6))
    pair.check()
    scheduler = pair.on.engine.scheduler
    less = scheduler.prefix.successors
    assert less == (k > 0 and mtp_pattern == "M-")
    assert pair.hits == (len(PROMPTS) - 1) * (len(SHARED) - less)
    assert scheduler.num_prefilled == sum(map(len, PROMPTS)) - pair.hits


@pytest.mark.parametrize("k", [0, 3])
def test_equal_prompts_are_computed_once(k):
    pair = Pair(tiny_model(), k)
    pair.run([SHARED] * 3, greedy(4))
    pair.check()
    assert pair.hits == 2 * len(SHARED)


def test_each_waits_for_the_one_that_it_shares_most_with():
    longer = [*SHARED, *SHARED]
    pair = Pair(tiny_model(), 2, max_num_batched_tokens=16)
    pair.run([[*SHARED, 1], [*longer, 2], [*longer, 3], [4, *SHARED]], greedy(4))
    pair.check()
    assert pair.hits == len(SHARED) + len(longer)


@pytest.mark.parametrize("worth, found", [(29, 29), (30, 0)])
def test_a_short_beginning_is_computed_by_each(worth, found, monkeypatch):
    monkeypatch.setattr(forks, "WORTH", worth)
    pair = Pair(tiny_model(), 1)
    pair.run(PROMPTS[:2], greedy(4))
    assert pair.hits == found


def test_what_is_known_already_is_nothing_to_wait_for():
    """A checkpoint of all but one token of the beginning is there."""
    pair = Pair(tiny_model(), 1)
    pair.run([SHARED[:28]], greedy(1))
    pair.run(PROMPTS, greedy(4))
    pair.check()
    assert pair.hits == len(PROMPTS) * 28


def steps_of(llm, prompts):
    """The prompts that have rows in each step."""
    names = [llm.engine.add_request(prompt, greedy(3)) for prompt in prompts]
    found, plan = [], llm.engine.scheduler.plan

    def noted():
        plans = plan()
        found.append({names.index(row.request.request_id) for one in plans for row in one.rows})
        return plans

    llm.engine.scheduler.plan = noted
    while llm.engine.has_unfinished:
        llm.engine.step()
        llm.engine.scheduler.check_integrity()
    return found


def test_others_do_not_wait_and_places_are_kept():
    """Two slots: the third prompt does not overtake the second one, which waits for the first."""
    prompts = [PROMPTS[0], PROMPTS[1], [3, 1, 4]]
    first, second, *_ = steps_of(make_llm(tiny_model(), 0, enable_prefix_caching=True), prompts)
    assert first == {0, 2} and 1 in second
    few = make_llm(tiny_model(), 0, enable_prefix_caching=True, max_num_seqs=2, max_num_batched_tokens=40)
    first, second, *_ = steps_of(few, prompts)
    assert first == {0} and {0, 1} <= second and 2 not in second


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_an_aborted_one_keeps_nobody_waiting(when):
    model = tiny_model()
    llm = make_llm(model, 2, enable_prefix_caching=True, max_num_batched_tokens=8)
    engine = llm.engine
    first, second = (engine.add_request(prompt, greedy(4)) for prompt in PROMPTS[:2])
    if when == "running":
        engine.step()
        assert [request.request_id for request in engine.scheduler.waiting] == [second]
    engine.abort(first)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step(finished_only=True)
    assert [output.outputs[0].token_ids for output in outputs] == [decode(model, PROMPTS[1], 4)]


def test_those_that_wait_for_one_begin_together():
    first, second, *_ = steps_of(make_llm(tiny_model(), 0, enable_prefix_caching=True), PROMPTS)
    assert first == {0} and second == set(range(len(PROMPTS)))


def test_one_that_has_begun_leaves_its_checkpoint_too():
    pair = Pair(tiny_model(), 1, max_num_batched_tokens=8)
    for llm in (pair.off, pair.on):
        engine = llm.engine
        engine.add_request(PROMPTS[0], greedy(4))
        engine.step()
        engine.add_request(PROMPTS[1], greedy(4))
        while engine.has_unfinished:
            engine.step()
    pair.check()
    assert pair.hits == len(SHARED)


def test_nobody_waits_for_a_younger_one():
    engine = make_llm(tiny_model(), 1, enable_prefix_caching=True).engine
    older, younger = (engine.make_request(prompt, greedy(4)) for prompt in PROMPTS[:2])
    cache = engine.scheduler.prefix
    cache.extend(younger)
    younger.prefill_end = younger.to_prefill
    assert forks.hold(cache, [younger], [older]) == set() and not younger.forks
    assert forks.hold(cache, [], [older, younger]) == {younger} and older.forks == {len(SHARED)}
