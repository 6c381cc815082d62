"""Runs of the speedup report, their order and their evaluation; the model is real or a fake with
its own clock."""

from itertools import groupby
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from mtpkit.bench import speedup
from mtpkit.bench.settings import SpeedupConfig
from mtpkit.bench.speedup import measure_speedup
from mtpkit.engine import SamplingParams
from mtpkit.engine.device.executor import Executor
from mtpkit.engine.requests.stats import AcceptanceStats, EngineStats
from mtpkit.errors import UserError
from tests.engine.tiny import make_prompts, tiny_model
from tests.toy_config import toy_config

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_a_real_model_is_measured_at_every_batch_size_and_k():
    model = tiny_model()
    prompts = make_prompts((3, 9, 4, 6, 1))
    config = SpeedupConfig(
        num_speculative_tokens=(3, 1), batch_size=(4, 1), repeats=2, sampling=GREEDY
    )
    report = measure_speedup(model, prompts, config)
    assert [(row.batch_size, row.k) for row in report.rows] == [
        (1, 0),
        (1, 1),
        (1, 3),
        (4, 0),
        (4, 1),
        (4, 3),
    ]
    assert (report.dtype, report.model) == ("float32", "HybridModel")
    for row in report.rows:
        assert (
            row.identical == 1 and row.tokens_per_s > 0 and len(row.conditional_acceptance) == row.k
        )
        assert (row.speedup == 1) or row.k
    # A request's drafts do not depend on the batch.
    alone = report.rows[2]
    together = report.rows[5]
    assert alone.acceptance_length == together.acceptance_length > 1
    assert report.settings is not None and report.settings["prompts"] == 5


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(temperature=0, max_tokens=2), SamplingParams(seed=1)]
)
def test_no_batch_size_is_first_met_while_timing(k, sampling, monkeypatch):
    """The place where a CUDA graph would be captured."""
    met = {}
    late = set()
    launch = Executor.launch
    timed = speedup._Contender.run

    def noted(executor, plan):
        key = (len(plan.rows), plan.num_speculative_tokens)
        if plan.num_decode_rows and key not in met.setdefault(id(executor), set()):
            met[id(executor)].add(key)
            late.update({key} if noted.timing else ())
        return launch(executor, plan)

    def run(contender, start, end):
        noted.timing = True
        timed(contender, start, end)

    noted.timing = False
    monkeypatch.setattr(Executor, "launch", noted)
    monkeypatch.setattr(speedup._Contender, "run", run)
    prompts = make_prompts((30, 3, 9, 14, 6, 1, 22))
    config = SpeedupConfig(
        num_speculative_tokens=(k,), batch_size=(5,), repeats=1, sampling=sampling
    )
    measure_speedup(tiny_model(), prompts, config)
    assert noted.timing and not late
    assert {rows for sizes in met.values() for rows, _ in sizes} == {1, 2, 3, 4, 5}


def test_a_tree_is_measured_beside_k_0():
    settings = dict(batch_size=(2,), repeats=1, sampling=GREEDY)
    report = measure_speedup(
        tiny_model(),
        make_prompts((2, 5)),
        SpeedupConfig(engine={"speculative_token_tree": [3, 1]}, **settings),
    )
    plain, tree = report.rows
    assert (plain.k, tree.k, tree.identical) == (0, 2, 1.0) and plain.candidate_shares is None
    assert [len(shares) for shares in tree.candidate_shares] == [3, 3]
    assert [sum(shares) for shares in tree.candidate_shares] == pytest.approx(
        tree.conditional_acceptance
    )


def test_sampling_with_a_seed_gives_the_same_tokens_too():
    sampling = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=12, seed=5)
    config = SpeedupConfig(
        num_speculative_tokens=(2,), batch_size=(2,), repeats=2, sampling=sampling
    )
    assert all(
        row.identical == 1
        for row in measure_speedup(tiny_model(), make_prompts((3, 9, 4)), config).rows
    )


class FakeLLM:
    """Takes `1 / (1 + k)` seconds a prompt, `slow` times that in its second repeat; `wrong[k]`
    prompts differ."""

    calls: ClassVar[list[tuple[int, int, int]]] = []
    clock = 0.0
    slow = 1.0
    steps = 0
    has_chat_template = False
    wrong: ClassVar[dict[int, int]] = {}

    def __init__(
        self,
        model,
        num_speculative_tokens=0,
        max_num_seqs=1,
        max_model_len=None,
        tokenizer=None,
        **_,
    ):
        self.k = num_speculative_tokens
        self.batch_size = max_num_seqs
        self.seen = 0
        self.model = SimpleNamespace(
            mtpkit_config=toy_config(),
            parameters=lambda: iter([torch.zeros(1)]),
            modules=lambda: iter(()),
        )
        self.tokenizer = tokenizer
        config = SimpleNamespace(max_model_len=100)
        self.engine = SimpleNamespace(
            config=config,
            intake=SimpleNamespace(make=lambda prompt, params, place: None),
        )
        assert max_model_len is None or max_model_len == 4 + 12  # the longest prompt and its output

    def generate(self, prompts, params, use_tqdm):
        FakeLLM.calls.append((self.batch_size, self.k, len(prompts)))
        repeat = self.seen // 6
        FakeLLM.clock += len(prompts) / (1 + self.k) * (self.slow if repeat else 1)
        self.seen += len(prompts) if params[0].max_tokens == 12 else 0
        wrong = [index < self.wrong.get(self.k, 0) for index in range(len(prompts))]
        stats = AcceptanceStats(
            steps=self.steps // 12, accepted_per_depth=[self.steps // 24] * self.k
        )
        return [
            SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=[bad] * 12)], error=None, stats=stats
            )
            for bad in wrong
        ]

    def reset_stats(self):
        pass

    def stats(self):
        drafts = AcceptanceStats(
            self.steps, self.steps * self.k, [self.steps // 2] * self.k, [self.steps] * self.k
        )
        return EngineStats(drafts, *[0] * 6)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(speedup, "LLM", FakeLLM)
    monkeypatch.setattr(speedup, "config_of", lambda model: toy_config())
    monkeypatch.setattr(speedup.time, "perf_counter", lambda: FakeLLM.clock)
    monkeypatch.setattr(FakeLLM, "calls", [])
    return FakeLLM


PROMPTS = [[1, 2, 3, 4], [5], [6], [7], [8], [9]]


def test_all_k_take_turns_after_a_warm_up(fake):
    measure_speedup(
        "dir",
        PROMPTS,
        SpeedupConfig(num_speculative_tokens=(1,), batch_size=(1, 2), repeats=1, sampling=GREEDY),
    )
    warm_up = fake.calls[:-6]
    measured = fake.calls[-6:]
    assert [calls for calls, _ in groupby(warm_up)] == [
        *((1, 0, 1), (1, 1, 1)),
        *((2, 0, 2), (2, 0, 1), (2, 1, 2), (2, 1, 1)),
    ]
    assert measured == [(1, 0, 4), (1, 1, 4), (1, 0, 2), (1, 1, 2), (2, 0, 6), (2, 1, 6)]


def test_the_median_repeat_counts(fake, monkeypatch):
    monkeypatch.setattr(fake, "slow", 3.0)
    config = SpeedupConfig(num_speculative_tokens=(1,), batch_size=(1,), repeats=2, sampling=GREEDY)
    plain, drafted = measure_speedup("dir", PROMPTS, config).rows
    assert plain.tokens_per_s == pytest.approx(72 / 12)  # repeats of 6 and 18 seconds
    assert drafted.speedup == pytest.approx(2)


def test_a_prompt_whose_tokens_differ_is_counted(fake, monkeypatch):
    monkeypatch.setattr(fake, "wrong", {2: 1})
    config = SpeedupConfig(num_speculative_tokens=(1, 2), batch_size=(8,), sampling=GREEDY)
    assert [row.identical for row in measure_speedup("dir", PROMPTS, config).rows] == [
        1,
        1,
        pytest.approx(5 / 6),
    ]


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (
            0,
            (
                "6 prompts with 0 decode steps and 3.0 s are a small sample: at batch 1 and K = 1"
                " the speedup is 2.00"
            ),
        ),
        (180, "6 prompts with 90 decode steps and 3.0 s are a small sample: "),
        (4000, ""),
    ],
)
def test_a_small_sample_is_said_to_be_small(fake, caplog, monkeypatch, steps, says):
    monkeypatch.setattr(fake, "steps", steps)
    measure_speedup(
        "dir",
        PROMPTS,
        SpeedupConfig(num_speculative_tokens=(1,), batch_size=(1,), repeats=2, sampling=GREEDY),
    )
    assert len(caplog.messages) == bool(says) and all(says in line for line in caplog.messages)
    assert all(
        line.endswith("take more prompts or a larger --max-tokens") for line in caplog.messages
    )
    caplog.clear()
    measure_speedup(
        "dir",
        PROMPTS,
        SpeedupConfig(num_speculative_tokens=(0,), batch_size=(1,), repeats=2, sampling=GREEDY),
    )
    assert not caplog.messages


def test_intervals_hold_the_spread_of_prompts_and_repeats(fake, caplog, monkeypatch):
    """Repeats that differ in time widen the speedup, prompts that differ in steps both; the warning
    says both."""
    monkeypatch.setattr(fake, "steps", 4000)
    config = SpeedupConfig(num_speculative_tokens=(1,), batch_size=(1,), repeats=3, sampling=GREEDY)
    plain, drafted = measure_speedup("dir", PROMPTS, config).rows
    assert plain.speedup_interval is plain.acceptance_length_interval is None
    assert drafted.speedup_interval == pytest.approx((2, 2))
    assert drafted.acceptance_length_interval == pytest.approx((1 + 166 / 333, 1 + 166 / 333))
    assert not caplog.messages

    generate = fake.generate

    def uneven(llm, prompts, params, use_tqdm):
        """The time of drafting in the second of three repeats is four times as long, as on a shared
        machine."""
        before = fake.clock
        repeat = llm.seen // 6
        outputs = generate(llm, prompts, params, use_tqdm)
        fake.clock += 3 * (fake.clock - before) * (llm.k > 0 and repeat == 1)
        return outputs

    monkeypatch.setattr(fake, "generate", uneven)
    _, drafted = measure_speedup("dir", PROMPTS, config).rows
    low, high = drafted.speedup_interval
    assert drafted.speedup == pytest.approx(2) and high == pytest.approx(2)
    assert low == pytest.approx(0.274, abs=5e-4), (
        "0.5 is the lowest; few prompts widen the interval"
    )
    (message,) = caplog.messages
    assert "the speedup is 2.00 (0.27-2.00), the acceptance length 1.50 (1.50-1.50); " in message


def test_two_unlike_prompts_have_wide_intervals():
    config = SpeedupConfig(num_speculative_tokens=(3,), batch_size=(1,), repeats=1, sampling=GREEDY)
    row = measure_speedup(tiny_model(), make_prompts((3, 9, 4, 6, 1)), config).rows[1]
    for value, (low, high) in (
        (row.speedup, row.speedup_interval),
        (row.acceptance_length, row.acceptance_length_interval),
    ):
        assert low < value < high
    alone = measure_speedup(tiny_model(), make_prompts((3,)), config).rows[1]
    assert alone.speedup_interval is alone.acceptance_length_interval is None
    assert "speedup_interval" not in alone.to_dict() and len(row.to_dict()["speedup_interval"]) == 2


def test_a_batch_is_no_larger_than_there_are_prompts(fake, caplog, monkeypatch):
    """And no row says that it was."""
    monkeypatch.setattr(fake, "steps", 4000)
    config = SpeedupConfig(
        num_speculative_tokens=(1,), batch_size=(2, 8, 64), repeats=1, sampling=GREEDY
    )
    report = measure_speedup("dir", PROMPTS, config)
    assert [(row.batch_size, row.k) for row in report.rows] == [(2, 0), (2, 1), (6, 0), (6, 1)]
    assert report.settings["batch_size"] == (2, 6)
    assert caplog.messages == ["there are 6 prompts, too few for a batch of 8, 64: measured at 6"]


def test_settings_that_cannot_be_measured_are_all_named():
    wrong = (
        r"num_speculative_tokens is \(2, -1\), must .*; batch_size is \(0,\), must .*; repeats is"
        r" 0, must"
    )
    with pytest.raises(UserError, match=wrong):
        SpeedupConfig(num_speculative_tokens=(2, -1), batch_size=(0,), repeats=0)
    with pytest.raises(
        UserError, match=r"batch_size is \(\), must be a list of one or more whole numbers"
    ):
        SpeedupConfig(batch_size=())


def test_text_prompts_need_a_tokenizer():
    with pytest.raises(
        UserError,
        match=r"prompts\[1\] is a text, which needs a tokenizer: put one beside the model",
    ):
        measure_speedup(tiny_model(), [[1], "text"], SpeedupConfig(sampling=GREEDY))
