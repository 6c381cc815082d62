"""The benchmark of sessions with long prefixes: which requests arrive and count, what the cache has
of them, the acceptance that goes with the number of drafts, and the limits."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from mtpkit.bench.drawn import draw_model
from mtpkit.bench.load import agent, measure_load
from mtpkit.bench.load.serving import Stream
from mtpkit.bench.roofline import Roofline, expected_length, length_deviation
from mtpkit.bench.settings import AgentConfig, LoadConfig
from mtpkit.bench.shapes import open_model
from mtpkit.bench.sizes import NEMOTRON_3_TINY
from mtpkit.engine.requests.options import EngineOptions
from mtpkit.errors import MtpkitError, UserError

CONFIG = LoadConfig(num_speculative_tokens=(0, 3), trace=False, engine={"block_size": 8})
RULE = AgentConfig(
    concurrency=(1, 3), prefix_length=61, fresh_length=13, output_length=20, session_requests=4
)


@pytest.fixture(scope="module")
def model():
    return open_model("nemotron-3-tiny", torch.device("cpu"), "float32", "*E")


@pytest.fixture
def served(monkeypatch):
    """The requests of each loop that a benchmark serves, with those that follow."""
    loops: list[list[Stream]] = []
    serve = agent.serve

    def recorded(engine, streams, clock, follow=None):
        own = list(streams)
        loops.append(own)

        def next_one(ended, now):
            following = follow(ended, now)
            own.extend([following] if following else [])
            return following

        return serve(engine, streams, clock, follow and next_one)

    monkeypatch.setattr(agent, "serve", recorded)
    return loops


def test_prefixes_are_in_the_cache_and_first_requests_do_not_count(model, served):
    result = measure_load(model, replace(CONFIG, acceptance=(0.7,)), RULE)
    assert [(row.sessions, row.k) for row in result.rows] == [(1, 0), (1, 3), (3, 0), (3, 3)]
    for row, (warm, load, again) in zip(
        result.rows, (served[i : i + 3] for i in range(0, 12, 3)), strict=True
    ):
        count = row.sessions
        assert [len(loop) for loop in (warm, load, again)] == [count, 4 * count, count]
        assert all(len(one.prompt) == 61 and one.max_tokens == 1 for one in warm)
        prompts = [tuple(one.prompt) for one in load]
        assert len({*prompts}) == 4 * count and {len(one) for one in prompts} == {61 + 13}
        assert {one[:61] for one in prompts} == {tuple(one.prompt) for one in warm}
        assert {tuple(one.prompt) for one in again} <= {*prompts}

        # All of the prefixes, and nothing else that could be known.
        assert row.hit_share == pytest.approx(61 / 74)
        counted = [one for one in load if one.arrival > 0]
        assert len(counted) == 3 * count
        seconds = max(one.times[-1] for one in counted) - min(one.arrival for one in counted)
        assert row.seconds == pytest.approx(seconds)
        assert row.tokens_per_s == pytest.approx(3 * count * 20 / seconds)
        assert row.user_tokens_per_s == pytest.approx(row.tokens_per_s / count)
        assert row.ttft_p50_ms <= row.ttft_p99_ms and row.step_ms > row.step_limit_ms > 0
    assert result.rows[1].acceptance_length > 1.5


def test_a_session_has_one_request_at_a_time(model, served):
    measure_load(model, replace(CONFIG, num_speculative_tokens=(3,)), RULE)
    load = served[-2]
    by_prefix: dict[tuple[int, ...], list[Stream]] = {}
    for one in load:
        by_prefix.setdefault(tuple(one.prompt[:61]), []).append(one)
    for session in by_prefix.values():
        for before, after in pairwise(session):
            assert before.times[-1] <= after.arrival


def test_acceptance_goes_with_the_number_of_drafts(model):
    lengths = {3: 2.874, 5: 3.421, 7: 3.687}
    for k, length in lengths.items():
        assert expected_length(RULE.rates(k, k)) == pytest.approx(length, abs=1e-3)
    # With seven, two are always accepted and never four: the least variance of this length.
    assert length_deviation(RULE.rates(7, 7)) == pytest.approx((0.687 * 0.313) ** 0.5)
    assert expected_length(RULE.rates("auto", 7)) == pytest.approx(3.687, abs=1e-3)
    assert length_deviation(RULE.rates("auto", 7)) > 2


@pytest.mark.parametrize("k", [3, 7])
def test_the_engine_accepts_what_goes_with_the_number_of_drafts(k):
    """With seven drafts, two or three of them in every step that the end does not cut."""
    config = NEMOTRON_3_TINY.replace(mtp_pattern="*E", mtp_num_depths=7)
    deep = draw_model(config, torch.float32, torch.device("cpu"))
    rule = replace(RULE, output_length=200, concurrency=(4,), session_requests=2)
    result = measure_load(deep, replace(CONFIG, num_speculative_tokens=(k,)), rule)
    rates = rule.rates(k, k)
    assert result.settings["acceptance"] == {str(k): rates}
    # Four standard errors of 8 x 200 tokens, of which the last step of each output may be cut.
    error = 4 * length_deviation(rates) / (1600 / expected_length(rates)) ** 0.5
    assert result.rows[0].acceptance_length == pytest.approx(expected_length(rates), abs=error)
    usual = expected_length([0.85] * k)
    assert abs(result.rows[0].acceptance_length - usual) > error / 2


def test_a_cache_without_room_is_refused(model):
    config = replace(CONFIG, engine=EngineOptions(block_size=8, prefix_cache_bytes=0))
    with pytest.raises(UserError, match="prefix_cache_bytes is 0, but the workload long-agent"):
        measure_load(model, config, RULE)
    # Room for the requests alone: what a request leaves is evicted by the next.
    one = -(-(RULE.longest + 8) // 8)
    config = replace(CONFIG, engine=EngineOptions(block_size=8, num_blocks=one))
    with pytest.raises(MtpkitError, match=r"K = 3: the prefix cache had .* too little"):
        measure_load(model, replace(config, num_speculative_tokens=(3,)), RULE)


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(UserError, match="lower prefix_length, fresh_length or concurrency"):
        AgentConfig(concurrency=(4000,), prefix_length=100_000)
    with pytest.raises(UserError, match="session_requests is 1, must be at least 2"):
        AgentConfig(session_requests=1)


def test_cached_tokens_cost_their_attention_alone(model):
    """New tokens attend to the cached ones, which are read once and go through no matrix."""
    roofline = Roofline.of(model, EngineOptions())
    alone = roofline.prefill(2, 100)
    after = roofline.prefill(2, 100, cached_len=900)
    whole = roofline.prefill(2, 1000)

    def work(cost, name):
        (found,) = (one for one in cost.works if one.name == name)
        return found

    assert work(alone, "matrices") == work(after, "matrices")
    assert work(alone, "state") == work(after, "state")
    assert work(after, "attention").bytes == work(whole, "attention").bytes
    # 100 tokens see 950 others in the mean, where they saw 50.
    assert work(after, "attention").flops == pytest.approx(19 * work(alone, "attention").flops)
