"""K from measured times and acceptance."""

import itertools
import random

import pytest

from mtpkit.engine import SamplingParams
from mtpkit.engine.device.executor import Executor
from mtpkit.engine.requests.tree import TokenTree
from mtpkit.engine.scheduling.adaptive import AdaptiveSpeculation
from mtpkit.engine.steps.plan import Drafts, StepShape
from mtpkit.errors import UserError
from mtpkit.kernels.ring import ring_capacity
from mtpkit.model import build_model
from mtpkit.model.state import Ring
from tests.engine.fakes import HashModel, fake_engine, run
from tests.engine.tiny import (
    decode,
    generate,
    greedy,
    guide,
    make_llm,
    make_prompts,
    record_drafts,
    teacher_forced_drafts,
    tiny_model,
)
from tests.toy_config import toy_config

CHEAP = {(rows, k): 1.0 + 0.1 * k for rows in (1, 8) for k in range(4)}
DEAR = {(rows, k): 1.0 + 1.0 * k for rows in (1, 8) for k in range(4)}


def feed(policy, rates, steps=600, rows=4, batches=1):
    """Play `steps` steps whose drafts are accepted at `rates` in a fixed pattern, of batches in
    turn; the K that were chosen."""
    chosen = []
    error = [0.0] * len(rates)
    made = [0] * batches
    for step in range(steps):
        depths = policy.choose(rows)
        fresh = made[step % batches]
        accepted = []
        for _ in range(rows):
            count = 0
            while count < min(depths, fresh):
                error[count] += rates[count]
                if error[count] < 1:
                    break
                error[count] -= 1
                count += 1
            accepted.append(count)
        policy.observe(accepted, [min(depths, fresh)] * rows)
        chosen.append(depths)
        made[step % batches] = depths
    return chosen


@pytest.mark.parametrize(
    ("times", "rates", "best"),
    [
        (CHEAP, [0.9, 0.9, 0.9], 3),
        (CHEAP, [0.9, 0.0, 0.0], 1),
        (CHEAP, [0.02, 0, 0], 0),
        (DEAR, [0.9, 0.9, 0.9], 0),
    ],
)
def test_settles_on_the_fastest(times, rates, best):
    chosen = feed(AdaptiveSpeculation(times), rates)
    assert chosen[-100:].count(best) >= 97


def test_costs_at_most_three_percent_where_drafts_do_not_pay():
    policy = AdaptiveSpeculation(DEAR)
    chosen = feed(policy, [0.1, 0.1, 0.1], steps=4000)
    settled = chosen[200:]
    assert sum(DEAR[8, k] for k in settled) <= 1.03 * len(settled) and any(settled)


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_notices_that_drafts_became_good(batches):
    """Of several batches, too: a probe lasts until one of them has seen drafts of its own."""
    policy = AdaptiveSpeculation(CHEAP, batches)
    assert feed(policy, [0.0, 0.0, 0.0], 600 * batches, batches=batches)[-1] == 0
    chosen = feed(policy, [0.95, 0.95, 0.95], 3000 * batches, batches=batches)
    assert chosen[-100:].count(3) > 90


@pytest.mark.parametrize(("before", "best"), [([0.9, 0.0, 0.0], 1), ([0.9, 0.9, 0.0], 2)])
def test_notices_that_deeper_drafts_became_good(before, best):
    """While fewer are verified and pay."""
    policy = AdaptiveSpeculation(CHEAP)
    assert feed(policy, before, steps=3000)[-300:].count(best) > 290
    chosen = feed(policy, [0.95, 0.95, 0.95], steps=6000)
    assert chosen[-100:].count(3) > 90


def test_looking_deeper_costs_little():
    policy = AdaptiveSpeculation(DEAR | {(rows, 1): 1.1 for rows in (1, 8)})
    settled = feed(policy, [0.9, 0.1, 0.1], steps=4000)[200:]
    assert (
        sum(DEAR[8, k] if k > 1 else 1.1 for k in settled) <= 1.03 * 1.1 * len(settled)
        and 3 in settled
    )


def test_notices_a_small_gain_too():
    """Steps that verify no drafts, before and after a probe, must not count as rejections."""
    policy = AdaptiveSpeculation({(8, 0): 1.0, (8, 1): 1.5})
    assert feed(policy, [0.0], steps=600)[-1] == 0
    assert feed(policy, [0.9], steps=6000)[-100:].count(1) > 90


def test_rows_whose_drafts_were_not_made_for_the_step_say_nothing():
    """Neither those that verified no fresh draft, nor of depths beyond those that they had
    fresh."""
    mixed = AdaptiveSpeculation(CHEAP)
    plain = AdaptiveSpeculation(CHEAP)
    for _ in range(20):
        mixed.observe([0, 0, 3, 2, 0], [0, 0, 3, 3, 0])
        plain.observe([3, 2], [3, 3])
    assert mixed.rates == plain.rates and plain.rates[0] > 0.97
    shallow = AdaptiveSpeculation(CHEAP)
    shallow.observe([1, 0, 3], [1, 1, 3])
    assert shallow.rates == pytest.approx(
        [(0.99 * 2.8 + 2) / (0.99 * 4 + 3), *[(0.99 * 2.8 + 1) / (0.99 * 4 + 1)] * 2]
    )


def test_the_engine_reports_what_was_verified(monkeypatch):
    """A step of fewer drafts than the last one made says nothing of the deeper ones."""
    llm = make_llm(tiny_model(), "auto")
    order = iter([2, 2, 1, 0, 2, 1] * 20)
    seen = []
    llm.engine.speculation.choose = lambda rows: next(order)
    launched = []
    launch = llm.engine.executor.launch
    monkeypatch.setattr(
        llm.engine.executor, "launch", lambda plan: launched.append(plan) or launch(plan)
    )
    llm.engine.speculation.observe = lambda accepted, fresh, rates: seen.extend(fresh)
    generate(llm, make_prompts((4,)), greedy())
    drafted = [plan.num_speculative_tokens for plan in launched]
    assert seen == [min(pair) for pair in itertools.pairwise(drafted)] and 0 in seen and 2 in seen


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("order", [[3], [0, 0, 0, 3, 3], [1, 3], [1, 2, 3], [3, 0]])
def test_acceptance_is_that_of_drafts_made_for_the_step(order, ahead):
    """Every draft is right; those left from earlier steps, which a larger K verifies, are not
    counted."""
    model = HashModel()
    engine = fake_engine(
        model, drafts="always", num_speculative_tokens=3, num_blocks=400, async_scheduling=ahead
    )
    inner = engine.executor.drafter

    class Fewer:
        def draft(self, hidden, batch, verdict) -> Drafts:
            return Drafts(
                inner.draft(hidden, batch, verdict).token_ids[
                    :, : batch.shape.num_speculative_tokens
                ]
            )

    engine.executor.drafter, turns = Fewer(), itertools.cycle(order)
    engine.speculation.choose = lambda rows: next(turns)
    engine.add_request([1, 2], SamplingParams(temperature=0, max_tokens=150, ignore_eos=True), "a")
    assert run(engine)["a"].outputs[0].token_ids == model.decode(
        [1, 2], SamplingParams(temperature=0, max_tokens=150)
    )
    stats = engine.stats().acceptance
    made = [3, *order * 3]  # the prompt's step makes three
    deepest = max(map(min, itertools.pairwise(made)))
    assert stats.conditional_acceptance == [float(depth < deepest) for depth in range(3)]


@pytest.mark.parametrize("ahead", [False, True])
def test_k_is_chosen_for_the_rows_that_decode(ahead):
    """Not for those whose prompts are computed yet, nor for those that surely end with the step
    under way."""
    engine = fake_engine(
        HashModel(),
        num_speculative_tokens=2,
        max_num_batched_tokens=12,
        async_scheduling=ahead,
        num_blocks=400,
    )
    chosen = []
    decoded = []
    launch = engine.executor.launch
    engine.speculation.choose = lambda rows: chosen.append(rows) or 2
    engine.executor.launch = lambda plan: decoded.append(plan.num_decode_rows) or launch(plan)
    for length, max_tokens in ((2, 20), (30, 9), (3, 9), (2, 1)):
        engine.add_request(
            [1] * length, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        )
    run(engine)
    assert chosen == [rows for rows in decoded if rows] and {1, 3} <= set(chosen)


@pytest.mark.parametrize("patience", [2.0, 0.01])
def test_the_engine_measures_every_size_and_k(monkeypatch, patience):
    """K follows from the step times of the step's own batch size."""
    times = {
        (rows, k): 1.0 + (patience if rows > 2 else 0.01) * k for rows in range(9) for k in range(3)
    }
    monkeypatch.setattr(
        Executor, "time_step", lambda self, shape, repeats: times[shape.decode_rows, shape.drafts]
    )
    llm = make_llm(tiny_model(), "auto", max_num_seqs=6)
    speculation = llm.engine.speculation
    assert speculation.step_times == {
        (rows, k): times[rows, k] for rows in (1, 2, 4, 6) for k in range(3)
    }
    assert [speculation.choose(rows) for rows in (1, 2, 3, 6)] == (
        [2, 2, 0, 0] if patience > 1 else [2] * 4
    )


def test_a_step_is_timed_as_it_was_asked_for(monkeypatch):
    llm = make_llm(tiny_model(), 2, max_num_seqs=6)
    seen = []
    execute = llm.engine.executor.execute

    def watch(batch):
        seen.append(
            (batch.shape.decode_rows, batch.shape.num_speculative_tokens, len(batch.token_ids))
        )
        return execute(batch)

    monkeypatch.setattr(llm.engine.executor, "execute", watch)
    assert llm.engine.executor.time_step(StepShape.decoding(4, 1), 3) > 0
    assert set(seen) == {(4, 1, 8)} and len(seen) == 4


@pytest.mark.parametrize("length", [600, 12])
def test_a_timed_step_finds_rings_as_full_as_in_the_middle_of_decoding(monkeypatch, length):
    """But with no more entries than there are positions."""
    llm = make_llm(tiny_model(), 2, max_num_seqs=40, max_model_len=length)
    state = llm.engine.executor.state
    (ring,) = [one for one in state.committed.counts if isinstance(one, Ring)]
    seen = []
    execute = llm.engine.executor.execute

    def watch(batch):
        seen.append(
            (batch.inputs.context_lens[:40].tolist(), state.committed.counts[ring].tolist())
        )
        return execute(batch)

    monkeypatch.setattr(llm.engine.executor, "execute", watch)
    llm.engine.executor.time_step(StepShape.decoding(40, 2), 2)
    position = min(256, length // 2)
    assert len(seen) == 3
    for positions, entries in seen:
        assert set(positions) == {position}
        assert set(entries) == set(range(1 + min(position, ring_capacity(ring.length))))


TREE = TokenTree((-1, 0, 0, 1, 1, 2, 2))
WITH_TREE = {
    (1, 0): 1.0,
    (1, 1): 1.1,
    (1, 2): 1.2,
    (1, TREE): 1.3,
    (8, 0): 1.0,
    (8, 1): 1.2,
    (8, 2): 1.5,
    (8, TREE): 2.5,
}


def play(policy, first, second, rows=1, steps=2000, seed=1):
    """Play steps in which each first candidate is right at a rate of `first`, and where it is wrong
    the second one at a rate of `second`; the last 100 choices."""
    draws = random.Random(seed)
    chosen = []
    before = 0
    for _ in range(steps):
        drafts = policy.choose(rows)
        depths = 2 if drafts is TREE else drafts
        ranks = []
        for _ in range(rows):
            row = [
                0 if draws.random() < first else 1 if draws.random() < second else -1
                for _ in range(depths)
            ]
            end = next((depth for depth, rank in enumerate(row) if rank < 0), depths)
            ranks.append([rank if depth <= end else -2 for depth, rank in enumerate(row)])
        if drafts is TREE:
            policy.observe_trees(ranks if before is TREE else [])
        else:
            fresh = min(1 if before is TREE else before, depths)
            right = (
                next((depth for depth, rank in enumerate(row) if rank), depths) for row in ranks
            )
            policy.observe([min(fresh, count) for count in right], [fresh] * rows)
        chosen.append(drafts)
        before = drafts
    return chosen[-100:]


@pytest.mark.parametrize(
    ("first", "second", "rows", "best"),
    [
        (0.6, 0.4, 1, TREE),
        (0.95, 0.1, 1, 2),
        (0.05, 0.0, 1, 0),
        (0.6, 0.4, 8, 1),
        (0.05, 0.0, 8, 0),
    ],
)
def test_the_tree_is_chosen_where_it_pays(first, second, rows, best):
    """Not where first candidates are right anyhow, none is, or a step of trees takes long."""
    assert play(AdaptiveSpeculation(WITH_TREE), first, second, rows).count(best) >= 97


def test_notices_that_a_tree_began_to_pay_and_ceased_to():
    policy = AdaptiveSpeculation(WITH_TREE)
    for first, second, best in ((0.95, 0.0, 2), (0.6, 0.6, TREE), (0.1, 0.1, 0), (0.6, 0.6, TREE)):
        assert play(policy, first, second, steps=4000).count(best) >= 90


def test_a_tree_tells_of_the_chain_of_first_candidates():
    tree = AdaptiveSpeculation(WITH_TREE)
    chain = AdaptiveSpeculation(WITH_TREE)
    for _ in range(30):
        tree.observe_trees([[0, 0], [0, -1], [1, 0], [0, -2], [-1, -2]])
        chain.observe([2, 1, 0, 1, 0], [2, 2, 1, 1, 1])
    assert tree.rates == chain.rates
    assert tree.expected_length(TREE) == pytest.approx(1 + 4 / 5 * (1 + 2 / 4), abs=0.05)
    assert tree.expected_length(2) == pytest.approx(1 + 3 / 5 * (1 + 1 / 2), abs=0.05)


def test_rates_that_no_step_tells_of_stay_and_one_step_does_not_undo_them():
    """After any number of chains, what was assumed of trees weighs as much as a tree step of four
    rows."""
    policy = AdaptiveSpeculation(WITH_TREE)
    before = policy.expected_length(TREE)
    for _ in range(2000):
        policy.observe([1], [2])
    assert policy.expected_length(TREE) == pytest.approx(before)
    policy.observe_trees([[-1, -2]] * 4)
    assert policy.expected_length(TREE) - 1 == pytest.approx((before - 1) / 2, rel=0.02)


def test_no_probe_where_the_tree_is_best():
    assert set(play(AdaptiveSpeculation(WITH_TREE | {(1, TREE): 1.0}), 0.6, 0.4)) == {TREE}


def test_expected_length_is_that_of_drafts_in_a_row():
    policy = AdaptiveSpeculation(CHEAP)
    assert [policy.expected_length(k) for k in range(4)] == pytest.approx(
        [1, 1.7, 1.7 + 0.49, 1.7 + 0.49 + 0.343]
    )


def test_nothing_is_probed_at_first_and_a_hair_is_no_gain():
    """The first probe comes when its turn is, and K stays where a larger one promises less than a
    hundredth more."""
    dear = {(1, k): 1.0 + 10 * k for k in range(3)}
    policy = AdaptiveSpeculation(dear)
    assert [policy.choose(1) for _ in range(300)] == [0] * 255 + [1, 1] + [0] * 43
    hair = 1.7 / 1.005  # K = 1 is faster by half a percent
    assert AdaptiveSpeculation({(1, 0): 1.0, (1, 1): hair}).choose(1) == 0
    assert AdaptiveSpeculation({(1, 0): 1.0, (1, 1): hair / 1.01}).choose(1) == 1


def test_batch_sizes_are_apart():
    policy = AdaptiveSpeculation({(1, 0): 1.0, (1, 1): 1.1, (8, 0): 1.0, (8, 1): 3.0})
    assert (policy.choose(1), policy.choose(2), policy.choose(8), policy.choose(99)) == (1, 0, 0, 0)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("heads", "mtp_pattern", "most"),
    [("repeated", "*-", 2), ("distinct", "*-", 3), ("repeated", "M-", 2), ("distinct", "M-", 3)],
)
def test_auto_decodes_the_same_tokens_while_k_changes(heads, mtp_pattern, most, ahead):
    model = tiny_model(heads, mtp_pattern=mtp_pattern)
    prompts = make_prompts()
    llm = make_llm(model, "auto", async_scheduling=ahead)
    assert llm.engine.config.num_speculative_tokens == most and isinstance(
        llm.engine.speculation, AdaptiveSpeculation
    )
    order = itertools.cycle(min(k, most) for k in (0, 3, 2, 1, 0, 0, 1, 3, 3, 0, 2))
    llm.engine.speculation.choose = lambda rows: next(order)
    guide(llm, prompts)
    assert generate(llm, prompts, greedy()) == [decode(model, p, 20) for p in prompts]
    assert llm.stats().acceptance.accepted


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize(
    ("heads", "mtp_pattern"), [("repeated", "*-"), ("distinct", "*-"), ("distinct", "M*")]
)
def test_drafts_are_those_without_caches_while_k_changes(heads, mtp_pattern, rollback):
    """Steps of few or no drafts keep the caches of all depths true for the later ones."""
    model = tiny_model(heads, mtp_pattern=mtp_pattern)
    prompts = make_prompts((1, 2, 4, 9))
    llm = make_llm(model, "auto", max_num_batched_tokens=13, state_rollback=rollback)
    order = itertools.cycle(
        min(k, llm.engine.config.num_speculative_tokens) for k in (0, 3, 1, 2, 0, 0, 3, 1)
    )
    llm.engine.speculation.choose = lambda rows: next(order)
    drafts = record_drafts(llm, prompts, 12)
    assert {len(made) for made in drafts.values()} == set(
        range(llm.engine.config.num_speculative_tokens + 1)
    )
    for known, made in drafts.items():
        assert made == (teacher_forced_drafts(model, known, len(made)) if made else [])


def test_auto_is_the_one_word_for_k():
    with pytest.raises(UserError, match="is 'atuo', must be a whole number or 'auto'"):
        make_llm(tiny_model(), "atuo")


def test_auto_needs_heads():
    model = build_model(toy_config(mtp_pattern="", mtp_num_depths=0), device="cpu")
    with pytest.raises(
        UserError,
        match="num_speculative_tokens is 'auto', but the model has no MTP heads: train some",
    ):
        make_llm(model, "auto")


def test_auto_and_sampled_drafts_exclude_each_other():
    with pytest.raises(
        UserError, match=r"draft_sampling is True, must be False: num_speculative_tokens .auto."
    ):
        make_llm(tiny_model(), "auto", draft_sampling=True)
