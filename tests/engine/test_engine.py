"""Ids of requests, and requests that are queued later than they were made."""

import numpy as np
import pytest

from mtpkit.engine import SamplingParams
from mtpkit.errors import UserError
from tests.engine.fakes import HashModel, fake_engine, run

MODEL = HashModel()
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def test_an_id_is_of_one_live_request_at_a_time():
    engine = fake_engine(MODEL, num_speculative_tokens=2)
    engine.add_request([1, 2], GREEDY, "x")
    for _ in range(2):  # waiting, then running
        with pytest.raises(
            UserError, match="request x: an unfinished request has this id, choose another id"
        ):
            engine.add_request([3, 4], GREEDY, "x")
        engine.step()
    assert run(engine)["x"].outputs[0].token_ids == MODEL.decode([1, 2], GREEDY)
    engine.add_request([3, 4], GREEDY, "x")
    engine.abort("x")
    engine.add_request([5], GREEDY, "x")
    assert run(engine)["x"].outputs[0].token_ids == MODEL.decode([5], GREEDY)


def test_of_two_requests_of_an_id_the_second_is_not_queued():
    engine = fake_engine(MODEL, num_speculative_tokens=2)
    first, second = (engine.intake.make(prompt, GREEDY, "x") for prompt in ([1, 2], [3, 4]))
    engine.scheduler.add(first)
    with pytest.raises(UserError, match="request x: an unfinished request has this id"):
        engine.scheduler.add(second)
    assert run(engine)["x"].outputs[0].token_ids == MODEL.decode([1, 2], GREEDY)


@pytest.mark.parametrize("given", ["0", "1", "7", "x"])
def test_numbers_never_meet_an_id_that_was_given(given):
    """Neither of a request that is there nor of one that is finished: results may be kept by id."""
    engine = fake_engine(MODEL, num_speculative_tokens=2)
    unqueued = engine.intake.make([9], GREEDY, "3")
    ids = [engine.add_request([1], GREEDY, given)]
    run(engine)
    ids += [engine.add_request(prompt, GREEDY) for prompt in ([2], [3], [4])]
    engine.scheduler.add(unqueued)
    assert len({*ids, "3"}) == 5
    outputs = run(engine)
    assert [outputs[i].prompt_token_ids for i in ids[1:]] == [[2], [3], [4]]


@pytest.mark.parametrize("request_id", [5, b"x", ("a",)])
def test_an_id_is_a_text(request_id):
    with pytest.raises(
        UserError, match=r"request_id is .*, must be a text: leave it out to have requests numbered"
    ):
        fake_engine(MODEL).add_request([1], GREEDY, request_id)


@pytest.mark.parametrize("params", [None, {"max_tokens": 3}])
def test_parameters_are_sampling_parameters(params):
    with pytest.raises(UserError, match=r"request 0: params is .*, give SamplingParams\(...\)"):
        fake_engine(MODEL).add_request([1], params)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([1, "2"], GREEDY, r"tokens \['2'\] are outside the vocabulary of 11"),
        ([1, True, 2.0], GREEDY, r"tokens \[True, 2.0\] are outside the vocabulary of 11"),
        (np.array([3, 40]), GREEDY, r"tokens \[.*40.*\] are outside the vocabulary of 11"),
        ([1, -1, 11], GREEDY, r"tokens \[-1, 11\] are outside the vocabulary of 11"),
    ],
)
def test_tokens_are_of_the_vocabulary(prompt, params, message):
    with pytest.raises(UserError, match=message):
        fake_engine(MODEL).intake.make(prompt, params)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_an_older_request_that_is_queued_late(steps, k, ahead):
    """The older request goes before younger ones that already run, and both are decoded as if
    alone."""
    engine = fake_engine(
        MODEL, num_speculative_tokens=k, async_scheduling=ahead, max_num_batched_tokens=6
    )
    old = engine.intake.make([1, 2, 3, 4, 5, 6, 7, 8], GREEDY)
    new = engine.add_request([9, 10, 1, 2, 3, 4, 5, 6], GREEDY)
    for _ in range(steps):
        engine.step()
    engine.scheduler.add(old)
    outputs = run(engine)
    assert outputs[old.request_id].outputs[0].token_ids == MODEL.decode(
        old.prompt_token_ids, GREEDY
    )
    assert outputs[new].outputs[0].token_ids == MODEL.decode([9, 10, 1, 2, 3, 4, 5, 6], GREEDY)
    engine.scheduler.check_integrity()


def test_stop_tokens_beyond_the_vocabulary_are_warned_of(caplog):
    engine = fake_engine(HashModel(), num_blocks=40)
    engine.add_request(
        [1, 2], SamplingParams(temperature=0, max_tokens=5, stop_token_ids=[11]), "a"
    )
    assert "stop_token_ids [11] have no effect: the vocabulary has 11 tokens" in caplog.text
    assert len(run(engine)["a"].outputs[0].token_ids) == 5


def test_an_id_of_very_many_digits_is_an_id_like_any_other():
    engine = fake_engine(HashModel(), num_blocks=40)
    assert engine.add_request([1], SamplingParams(), "9" * 5000) == "9" * 5000
    assert engine.add_request([1], SamplingParams()) == "0"
