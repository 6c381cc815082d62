"""Scheduling over a hash model: long random histories, and the cases that broke others."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from mtpkit.engine import SamplingParams
from mtpkit.engine.requests.stats import AcceptanceStats
from mtpkit.engine.scheduling.decision import Decision
from mtpkit.errors import UserError
from tests.engine.fakes import HashModel, check_batches, fake_engine, run
from tests.shared import examples

MODEL = HashModel()
GREEDY = SamplingParams(temperature=0, max_tokens=12)

requests = st.lists(
    st.tuples(
        st.integers(0, 40),  # step of arrival
        st.lists(st.integers(0, MODEL.vocab_size - 1), min_size=1, max_size=14),
        st.builds(
            SamplingParams,
            max_tokens=st.integers(1, 14),
            temperature=st.sampled_from([0.0, 0.7, 1.5]),
            seed=st.integers(0, 99),
            stop_token_ids=st.sampled_from([(), (3,), (3, 4)]),
            ignore_eos=st.booleans(),
            repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 1.7]),
            frequency_penalty=st.sampled_from([0.0, 0.0, 0.0, 0.9]),
        ),
    ),
    min_size=1,
    max_size=9,
)
engines = st.fixed_dictionaries(
    {
        "num_speculative_tokens": st.sampled_from([0, 1, 2, 3, 5]),
        "block_size": st.sampled_from([1, 2, 3, 4, 16]),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(6, 40),
        "drafts": st.sampled_from(["never", "sometimes", "always"]),
        "async_scheduling": st.booleans(),
        "num_batches": st.integers(1, 3),
    }
)
"""`K` of each step in turn; empty: always the same."""
varying = st.one_of(st.just([]), st.lists(st.integers(0, 5), min_size=2, max_size=8))


@hypothesis_settings(max_examples=examples(150))
@given(requests, engines, varying, st.integers(0, 30), st.integers(-1, 30))
def test_random_histories(arrivals, settings, depths, spare_blocks, abort_at):
    """Every request gets the oracle's tokens, is returned once a step at most and, whatever ran
    beside it, has the same acceptance; nothing leaks."""
    largest = max(len(prompt) + params.max_tokens for _, prompt, params in arrivals)
    lookahead = max(1, 2 * settings["num_speculative_tokens"])
    num_blocks = -(-(largest + lookahead) // settings["block_size"]) + spare_blocks
    engine = fake_engine(MODEL, num_blocks=num_blocks, eos=(0,), **settings)
    scheduler = engine.scheduler
    finished = {}
    aborted = None
    check_batches(scheduler)
    if depths:
        turns = itertools.cycle(min(k, settings["num_speculative_tokens"]) for k in depths)
        engine.speculation.choose = lambda rows: next(turns)
    step = 0
    while engine.has_unfinished or step <= 40:
        for index, (arrival, prompt, params) in enumerate(arrivals):
            if arrival == step:
                engine.add_request(prompt, params, request_id=str(index))
        if step == abort_at and (live := scheduler.running + scheduler.waiting):
            aborted = live[-1].request_id
            engine.abort(aborted)
        if engine.has_unfinished:
            outputs = engine.step()
            assert len({output.request_id for output in outputs}) == len(outputs)
            assert not {output.request_id for output in outputs} & set(finished)
            finished |= {output.request_id: output for output in outputs if output.finished}
        scheduler.check_integrity()
        engine.executor.runner.forget(scheduler.blocks.free_ids, scheduler.slots.free_ids)
        step += 1
    assert (
        scheduler.blocks.num_free == num_blocks
        and scheduler.slots.num_free == settings["max_num_seqs"]
    )
    assert set(finished) == {str(index) for index in range(len(arrivals))} - {aborted}
    for request_id, output in finished.items():
        _, prompt, params = arrivals[int(request_id)]
        MODEL.check(prompt, output.outputs[0].token_ids, params, () if params.ignore_eos else (0,))
        if depths:
            continue
        alone = fake_engine(
            MODEL, num_blocks=200, eos=(0,), **settings | {"async_scheduling": False}
        )
        alone.add_request(prompt, params, request_id=request_id)
        stats = run(alone)[request_id].stats
        assert (stats.steps, stats.accepted_per_depth, stats.reached_per_depth) == (
            output.stats.steps,
            output.stats.accepted_per_depth,
            output.stats.reached_per_depth,
        )


@pytest.mark.parametrize(("length", "k"), [(8, 0), (7, 1), (4, 2)])
def test_a_prompt_that_fills_the_cache_is_served_or_refused(length, k):
    """Also where a single token is asked for: the prompt itself must find room."""
    params = SamplingParams(temperature=0, max_tokens=1)
    for prompt in ([1] * length, [1] * (length + 1)):
        engine = fake_engine(MODEL, num_blocks=2, block_size=4, num_speculative_tokens=k)
        try:
            engine.add_request(prompt, params, "a")
        except UserError as error:
            assert "lower max_tokens or raise num_blocks" in str(error)
        else:
            for _ in range(6):
                engine.step()
            assert not engine.has_unfinished


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_preempted_requests_resume_with_the_same_output(k, ahead):
    engine = fake_engine(
        MODEL, num_blocks=14, block_size=2, num_speculative_tokens=k, async_scheduling=ahead
    )
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1]]
    ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    finished = run(engine)
    assert engine.stats().preemptions > 0
    assert sum(finished[i].stats.preemptions for i in ids) == engine.stats().preemptions
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert finished[request_id].outputs[0].token_ids == MODEL.decode(prompt, GREEDY)


@pytest.mark.parametrize("k", [0, 3])
def test_preempted_requests_count_each_token_once_for_penalties(k):
    """The newest token is fed again after a preemption, and must not weigh twice."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, frequency_penalty=1.5)
    engine = fake_engine(MODEL, num_blocks=14, block_size=2, num_speculative_tokens=k)
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1]]
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    finished = run(engine)
    assert engine.stats().preemptions > 0
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert finished[request_id].outputs[0].token_ids == MODEL.decode(prompt, params)


def test_statistics_begin_anew_after_a_reset():
    engine = fake_engine(MODEL, num_blocks=14, block_size=2, num_speculative_tokens=3)
    new = engine.stats()
    assert (new.preemptions, new.generated_tokens, new.seconds) == (0, 0, 0)
    # what an engine counts is its own object
    new = replace(new, acceptance=AcceptanceStats.for_depths(3))
    for _ in range(2):
        for length in (3, 2, 4, 1):
            engine.add_request([1] * length, GREEDY)
        run(engine)
        stats = engine.stats()
        assert (
            stats.preemptions
            and stats.generated_tokens == 48
            and stats.seconds
            and stats.acceptance.steps
        )
        assert stats.prompt_tokens == 10 <= stats.prefilled_tokens
        engine.reset_stats()
        assert engine.stats() == new


def test_the_oldest_request_is_never_preempted():
    engine = fake_engine(MODEL, num_blocks=12, block_size=2, num_speculative_tokens=3)
    ids = [engine.add_request([1, 2, 3], GREEDY) for _ in range(4)]
    assert run(engine)[ids[0]].stats.preemptions == 0


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_commit_releases_every_block_that_a_rewind_emptied(block_size):
    engine = fake_engine(MODEL, drafts="never", block_size=block_size, num_speculative_tokens=5)
    engine.add_request([1, 2, 3, 4], GREEDY)
    while engine.has_unfinished:
        engine.step()
        for request in engine.scheduler.running:
            assert len(request.block_table) == -(-request.num_computed // block_size)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_rows_that_sample_have_room_for_what_the_drafts_write(k, ahead):
    """Depths 2 .. K write at the K - 1 positions after a step's last: after a prompt's end, too."""
    engine = fake_engine(
        MODEL,
        num_blocks=60,
        block_size=2,
        num_speculative_tokens=k,
        max_num_batched_tokens=9,
        async_scheduling=ahead,
    )
    launch = engine.executor.launch
    seen = []

    def watch(plan):
        for row in plan.rows:
            steps_before = row.request.in_flight - row.emits if plan.num_decode_rows else 0
            written = (
                row.start + steps_before * (1 + k) + row.length + (k - 1 if row.samples else 0)
            )
            assert len(row.request.block_table) * 2 >= written
            seen.append((row.samples, plan.num_decode_rows > 0))
        return launch(plan)

    engine.executor.launch = watch
    for length in (1, 2, 5, 12):
        engine.add_request([1] * length, GREEDY)
    run(engine)
    assert {(True, True), (True, False), (False, False)} <= set(seen)


@pytest.mark.parametrize(("k", "budget"), [(0, 5), (2, 7), (2, 12), (3, 9)])
def test_a_step_has_at_most_the_tokens_of_the_budget(k, budget):
    """Counted over decode rows, chunks that go on and chunks that begin; and it is used up."""
    engine = fake_engine(
        MODEL, num_blocks=200, num_speculative_tokens=k, max_num_batched_tokens=budget
    )
    plan = engine.scheduler.plan
    sizes = []

    def watch(decision):
        plans = plan(decision)
        sizes.append(sum(row.length for one in plans for row in one.rows))
        return plans

    engine.scheduler.plan = watch
    for length in (3, 11, 1, 2, 2, 6, 1, 9):
        engine.add_request([1] * length, GREEDY)
    run(engine)
    assert max(sizes) == budget


@pytest.mark.parametrize("mixed", [0, 1, 3, 4, 7])
def test_chunks_follow_the_budget_and_decode_rows_come_first(mixed):
    engine = fake_engine(
        MODEL, num_speculative_tokens=2, max_num_batched_tokens=7, max_mixed_tokens=mixed
    )
    engine.add_request([1, 2], SamplingParams(temperature=0, max_tokens=30))
    engine.step()
    engine.add_request(list(range(1, 10)), GREEDY)
    shapes = []
    for _ in range(3):
        plans = engine.scheduler.plan(Decision(2))
        decode = plans[0]
        chunks = plans[-1]
        assert decode.num_decode_rows == 1 and decode.rows[0].length == 3
        assert (decode is chunks) == (chunks.num_chunk_tokens <= mixed)
        assert decode is chunks or not chunks.num_decode_rows
        shapes.append([(row.start, row.length, row.samples) for row in chunks.chunks])
        for plan in plans:
            engine.scheduler.commit(plan, engine.executor.launch(plan).wait())
    assert shapes == [[(0, 4, False)], [(4, 4, False)], [(8, 1, True)]]


def test_a_step_runs_before_the_results_of_the_last_are_known():
    """One step of lead, no more; what it computed for a request that had ended is dropped."""
    engine = fake_engine(MODEL, drafts="always", num_speculative_tokens=2, async_scheduling=True)
    tokens = MODEL.decode([1, 2], SamplingParams(temperature=0, max_tokens=12))
    params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[tokens[3]])
    engine.add_request([1, 2], params, "a")
    launched = []
    launch = engine.executor.launch
    engine.executor.launch = lambda plan: launched.append(plan) or launch(plan)
    assert engine.step() == [] and len(launched) == 1
    counts = []
    while engine.has_unfinished:
        outputs = engine.step()
        counts.append((len(launched), len(outputs[0].outputs[0].token_ids)))
    cut = tokens.index(tokens[3]) + 1
    # the third step was launched before the second's stop token was seen
    assert counts == [(2, 1), (3, cut)]
    assert outputs[0].outputs[0].token_ids == tokens[:cut]
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("k", [0, 2])
def test_no_step_is_launched_for_a_request_that_is_sure_to_end(k):
    """The steps under way bring its last token, whatever becomes of their drafts."""
    engine = fake_engine(MODEL, drafts="never", num_speculative_tokens=k, async_scheduling=True)
    engine.add_request([1, 2], SamplingParams(temperature=0, max_tokens=7, ignore_eos=True))
    launched = []
    launch = engine.executor.launch
    engine.executor.launch = lambda plan: launched.append(plan.num_decode_rows) or launch(plan)
    run(engine)
    assert sum(launched) == 6  # the first token is prefill's


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_max_tokens_cuts_accepted_drafts(max_tokens):
    engine = fake_engine(MODEL, drafts="always", num_speculative_tokens=5)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    engine.add_request([1, 2], params, "a")
    output = run(engine)["a"]
    assert output.outputs[0].token_ids == MODEL.decode([1, 2], params)
    assert output.outputs[0].finish_reason == "length"
    # The first token is prefill's, then steps of 6: five verdicts and a bonus.
    full, rest = divmod(max_tokens - 1, 6)
    assert output.stats.steps == full + bool(rest)
    assert output.stats.accepted_per_depth == [full + (depth < rest) for depth in range(5)]
    assert output.stats.reached_per_depth == output.stats.accepted_per_depth


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("k", [0, 5])
@pytest.mark.parametrize(("max_tokens", "count"), [(None, 8), (30, 8), (8, 8), (7, 7), (1, 1)])
def test_max_model_len_ends_an_output_as_max_tokens_does(max_tokens, count, k, ahead):
    """As in vLLM: prompt and output together have at most that many tokens."""
    engine = fake_engine(
        MODEL, "always", num_speculative_tokens=k, max_model_len=10, async_scheduling=ahead
    )
    engine.add_request([1, 2], SamplingParams(temperature=0, max_tokens=max_tokens), "a")
    output = run(engine)["a"].outputs[0]
    assert output.token_ids == MODEL.decode([1, 2], SamplingParams(temperature=0, max_tokens=count))
    assert output.finish_reason == "length"


def test_stop_tokens_end_the_output_among_accepted_drafts():
    tokens = MODEL.decode([1, 2], SamplingParams(temperature=0, max_tokens=8))
    stop = tokens[3]
    cut = tokens[: tokens.index(stop) + 1]
    for eos, params in (
        ((stop,), SamplingParams(temperature=0, max_tokens=8)),
        ((), SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[stop])),
    ):
        engine = fake_engine(MODEL, drafts="always", eos=eos, num_speculative_tokens=5)
        engine.add_request([1, 2], params, "a")
        output = run(engine)["a"].outputs[0]
        assert (output.token_ids, output.finish_reason) == (cut, "stop")
    engine = fake_engine(MODEL, drafts="always", eos=(stop,), num_speculative_tokens=5)
    engine.add_request([1, 2], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), "a")
    assert run(engine)["a"].outputs[0].token_ids == tokens


@pytest.mark.parametrize(
    ("settings", "prompt", "max_tokens", "message"),
    [
        ({}, [], 4, "prompt is empty"),
        (
            {"max_model_len": 10},
            [1] * 10,
            4,
            "10 prompt tokens leave no room for output in max_model_len 10",
        ),
        ({"num_blocks": 4}, [1] * 8, 8, "need 5 blocks of 4, the cache has 4"),
        ({"num_blocks": 4}, [1] * 8, 7, "need 5 blocks of 4, the cache has 4"),
        ({}, [99], 4, r"tokens \[99\] are outside the vocabulary of 11"),
    ],
)
def test_requests_that_can_never_be_served_are_refused_at_once(
    settings, prompt, max_tokens, message
):
    engine = fake_engine(MODEL, num_speculative_tokens=2, **settings)
    with pytest.raises(UserError, match=message):
        engine.add_request(prompt, SamplingParams(max_tokens=max_tokens))
    assert not engine.has_unfinished


def test_a_request_that_just_fits_runs():
    engine = fake_engine(MODEL, num_speculative_tokens=2, num_blocks=4, drafts="always")
    engine.add_request([1] * 8, SamplingParams(temperature=0, max_tokens=6), "a")
    assert len(run(engine)["a"].outputs[0].token_ids) == 6


def test_only_finished_requests_on_request():
    """The others' texts are then not decoded at all."""

    class Counting:
        calls = 0

        def decode(self, token_ids, skip_special_tokens=True):
            self.calls += 1
            return " ".join(map(str, token_ids))

    tokenizer = Counting()
    engine = fake_engine(MODEL, num_speculative_tokens=2, tokenizer=tokenizer)
    for length in (9, 30):
        engine.add_request([1, 2], SamplingParams(temperature=0, max_tokens=length))
    outputs = []
    while engine.has_unfinished:
        if not outputs:
            assert tokenizer.calls == 0
        outputs.append(engine.step(finished_only=True))
        outputs = [one for one in outputs if one]
    assert [[output.request_id for output in one] for one in outputs] == [["0"], ["1"]]
    assert [len(one[0].outputs[0].token_ids) for one in outputs] == [9, 30]
    assert all(one[0].finished and one[0].outputs[0].text for one in outputs)
