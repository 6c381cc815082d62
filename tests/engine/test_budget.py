"""Steps in which some rows verify fewer drafts than others change no token and no draft, and how it
is decided which."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mtpkit.engine import SamplingParams
from mtpkit.engine.requests.stats import AcceptanceHistory
from mtpkit.engine.scheduling import scheduler
from mtpkit.engine.scheduling.budget import (
    BudgetedSpeculation,
    SplitTimes,
    by_acceptance,
    long_rows,
)
from mtpkit.errors import UserError
from tests.engine.replayed import replay_on_cpu
from tests.engine.test_distribution import SEEDS, decoded, fit, table_engine
from tests.engine.tiny import (
    decode,
    generate,
    greedy,
    guide,
    make_llm,
    make_prompts,
    penalised,
    record_drafts,
    teacher_forced_drafts,
    tiny_model,
)

PROMPTS = make_prompts((1, 4, 8, 9, 21, 3, 33))
KINDS = [
    ("repeated", "M-*M-", "*-"),
    ("repeated", "G-*G-", "*M"),
    ("repeated", "+-M-+-", "+-"),
    ("repeated", "MEM*E", "*E"),
    ("distinct", "M-*M-", "*-"),
    ("distinct", "M-*M-", "M*"),
    ("distinct", "G-*G-", "G*"),
]
SEVERAL = {"max_num_seqs": 5, "max_num_batched_tokens": 60}


def split(llm, seed: int = 0, drafts: int | None = None):
    """Decide by chance which rows verify fewer drafts; returns the numbers of rows of the plans
    that were launched, and how many of them were short."""
    rng = random.Random(seed)
    most = llm.engine.config.num_speculative_tokens

    def decide(requests):
        k = drafts or rng.randint(1, most)
        return k, (rng.randint(0, len(requests)), rng.randrange(k))

    llm.engine.speculation.decide = decide
    seen = []
    launch = llm.engine.executor.launch

    def noted(plan):
        seen.append((plan.num_decode_rows, plan.short[0]))
        widths = [row.length for row in plan.decode_rows]
        count, fewer = plan.short
        assert widths == sorted(widths, reverse=True)
        assert widths[len(widths) - count :] == [1 + fewer] * count
        return launch(plan)

    llm.engine.executor.launch = noted
    return seen


def mixed(seen) -> int:
    """How many plans had rows of both kinds."""
    return sum(0 < short < rows for rows, short in seen)


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize(("heads", "pattern", "mtp_pattern"), KINDS)
def test_short_rows_change_no_token(heads, pattern, mtp_pattern, rollback):
    """With prompts in chunks and preemption, a step ahead of the host and not."""
    model = tiny_model(heads, pattern, mtp_pattern)
    want = [decode(model, prompt, 20) for prompt in PROMPTS]
    preemptions = 0
    for ahead in (False, True):
        settings = dict(num_blocks=16, state_rollback=rollback, async_scheduling=ahead)
        llm = make_llm(model, 3, **SEVERAL | settings)
        seen = split(llm)
        assert generate(guide(llm, PROMPTS), PROMPTS) == want
        assert mixed(seen) > 5
        preemptions += llm.stats().preemptions
    assert preemptions


@pytest.mark.parametrize("heads", ["repeated", "distinct"])
def test_short_rows_change_no_draft(heads):
    """The heads' caches and states are those of whole sequences, whatever a row verified."""
    model = tiny_model(heads)
    llm = make_llm(model, 3, **SEVERAL)
    seen = split(llm, drafts=3)
    drafts = record_drafts(llm, PROMPTS, 14)
    assert mixed(seen) > 5 and len(drafts) > 30
    for known, found in drafts.items():
        assert found == teacher_forced_drafts(model, known, 3)


@pytest.mark.parametrize("heads", ["repeated", "distinct"])
def test_short_rows_in_graphs(heads, monkeypatch):
    """Null rows stand among the short ones."""
    replay_on_cpu(monkeypatch)
    model = tiny_model(heads)
    runs = []
    for settings in ({"enforce_eager": True}, {}):
        llm = make_llm(model, 3, async_scheduling=False, **SEVERAL | settings)
        seen = split(llm, 1)
        assert bool(llm.engine.executor.graphs) == (not settings)
        runs.append(generate(llm, PROMPTS, poison=False))
        assert mixed(seen) > 5
    assert runs[0] == runs[1] == [decode(model, prompt, 20) for prompt in PROMPTS]


CHOICES = {
    "drawn": SamplingParams(temperature=0.8, seed=4, top_k=30, max_tokens=14, ignore_eos=True),
    "penalised": penalised(14),
    "ruled": SamplingParams(
        temperature=0, max_tokens=14, min_tokens=9, bad_words=None, logit_bias={5: 3.0}
    ),
    "drawn and penalised": SamplingParams(
        temperature=0.9, seed=7, presence_penalty=0.7, max_tokens=14, ignore_eos=True
    ),
}


@pytest.mark.parametrize("params", CHOICES)
def test_a_seed_keeps_its_tokens(params):
    """Log-probabilities, too."""
    params = replace(CHOICES[params], logprobs=2)
    outputs = []
    for k in (0, 3):
        llm = make_llm(tiny_model(), k, **SEVERAL)
        seen = split(llm, 2) if k else []
        found = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], params)
        outputs.append([one.outputs[0] for one in found])
        assert mixed(seen) > 5 or not k
    for plain, fast in zip(*outputs, strict=True):
        assert plain.token_ids == fast.token_ids
        for mine, theirs in zip(plain.logprobs, fast.logprobs, strict=True):
            assert mine.keys() == theirs.keys()
            for token in mine:
                assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-5)


def test_requests_that_do_not_speculate_stand_among_the_others():
    model = tiny_model()
    want = [decode(model, prompt, 20) for prompt in PROMPTS]
    llm = make_llm(model, 3, **SEVERAL)
    seen = split(llm, 3)
    guide(llm, PROMPTS)
    params = [replace(greedy(), speculate=index % 2 == 0) for index in range(len(PROMPTS))]
    found = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], params)
    assert [one.outputs[0].token_ids for one in found] == want and mixed(seen) > 5


def test_a_prefix_cache_beside_short_rows():
    """Later turns go on from checkpoints of rows that ended in short steps."""
    model = tiny_model()
    llm = make_llm(model, 3, enable_prefix_caching=True, **SEVERAL)
    seen = split(llm, 4)
    histories = [list(prompt) for prompt in PROMPTS[:5]]
    for _ in range(3):
        want = [decode(model, history, 9) for history in histories]
        assert generate(llm, histories, greedy(9)) == want
        histories = [a + b + [7, 3] for a, b in zip(histories, want, strict=True)]
    assert mixed(seen) > 3 and llm.stats().cached_tokens


def drawn_by(order) -> float:
    """The p-value of 20,000 outputs with drawn drafts, half of whose requests verify none: the last
    ones in an order."""
    engine = table_engine(3, "good", draw=True)
    # Decode rows beside chunks all verify as many.
    engine.scheduler.config = replace(engine.config, max_mixed_tokens=0)
    engine.speculation.decide = lambda requests: (3, (len(requests) // 2, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "by_acceptance", lambda requests: order(engine, requests))
        tokens = decoded(engine, range(SEEDS), {"temperature": 0.9})
    return fit(tokens, SamplingParams(temperature=0.9))


def test_short_rows_leave_the_law_of_drawn_drafts_alone():
    """Whatever is known before the drafts are drawn may decide: here, the results of the requests'
    earlier steps, with much noise."""
    rng = random.Random(1)

    def earlier(engine, requests):
        noise = {one.arrival: rng.random() for one in requests}
        return sorted(requests, key=lambda one: one.history.accepted + noise[one.arrival])

    assert drawn_by(earlier) > 1e-3


@pytest.mark.parametrize("of_others", [False, True])
def test_a_decision_by_drawn_drafts_is_seen(of_others):
    """By the probability of the request's own draft, or by its rank among those of all."""

    def live(engine, requests):
        state = engine.executor.state
        slots = [one.slot for one in requests]
        drafts = state.tokens[slots, 1]
        probs = state.draft_probs[slots, 0].gather(1, drafts[:, None])[:, 0].tolist()
        worth = dict(zip([one.arrival for one in requests], probs, strict=True))
        if of_others:
            mean = sum(probs) / len(probs)
            return sorted(requests, key=lambda one: worth[one.arrival] < mean)
        return sorted(requests, key=lambda one: -worth[one.arrival])

    assert drawn_by(live) < 1e-3


# ---- decisions


def request(rate: float, arrival: int = 0, **params):
    """A request whose drafts were accepted at a rate for a long time."""
    history = AcceptanceHistory(1000.0, 1000.0 * rate)
    shown = SimpleNamespace(**{"speculate": True, "speculative_budget": True} | params)
    worth = rate
    if not shown.speculative_budget:
        worth = float("inf")
    if not shown.speculate:
        worth = -float("inf")
    return SimpleNamespace(history=history, params=shown, draft_worth=worth, arrival=arrival)


def policy(rows: int, per_token: float, fixed: float = 1.0, draft: float = 0.02, most: int = 4):
    """A policy for steps that take `fixed` and so much per verified token and per draft."""

    def seconds(tokens: float, drafts: int) -> float:
        return fixed + per_token * tokens + draft * drafts

    times = {(rows, k): seconds(rows * (1 + k), k) for k in range(most + 1)}
    half = rows // 2
    splits = {
        rows: SplitTimes(
            seconds(rows, most),
            [seconds((rows - half) * (1 + k) + half, k) for k in range(1, 1 + most)],
        )
    }
    return BudgetedSpeculation(times, splits)


def learn(found: BudgetedSpeculation, rates: list[float], steps: int = 400) -> None:
    """Show a policy steps of requests with these rates."""
    rng = random.Random(0)
    for _ in range(steps):
        accepted = []
        for rate in rates:
            count = 0
            while count < found.max_depth and rng.random() < rate:
                count += 1
            accepted.append(count)
        found.observe(accepted, [found.max_depth] * len(rates), rates)


def test_rarely_right_drafts_are_not_verified_where_tokens_cost_time():
    rates = [0.95] * 32 + [0.3] * 32
    requests = [request(rate, index) for index, rate in enumerate(rates)]
    found = policy(64, per_token=0.02)
    learn(found, rates)
    drafts, (short, fewer) = found.decide(requests)
    assert drafts >= 3 and short == 32 and fewer == 0
    worst = by_acceptance(requests)[-short:]
    assert all(one.history.rate < 0.5 for one in worst)


@pytest.mark.parametrize(
    ("rates", "per_token"),
    [([0.95] * 32 + [0.3] * 32, 1e-5), ([0.8] * 64, 0.01), ([0.8] * 64, 1e-5)],
    ids=["tokens are free", "all alike", "neither"],
)
def test_nothing_is_split_where_it_does_not_pay(rates, per_token):
    requests = [request(rate, index) for index, rate in enumerate(rates)]
    found = policy(64, per_token)
    learn(found, rates)
    assert found.decide(requests)[1] == (0, 0)


def test_rows_of_two_kinds_take_what_they_were_measured_to_take():
    """Where kernels pad rows to a power of two of tokens, all rows with 4 drafts take as long as
    with 5, and as many tokens in rows of two kinds take less."""
    rows, most, draft = 64, 5, 0.02

    def seconds(tokens: float, drafts: int) -> float:
        return 1.0 + 0.01 * tokens + draft * drafts

    times = {
        (rows, k): seconds(rows * (1 << k.bit_length() if k else 1), k) for k in range(1 + most)
    }
    halves = [seconds(rows / 2 * (2 + k), k) for k in range(1, 1 + most)]
    splits = {rows: SplitTimes(seconds(rows, most), halves)}
    found = BudgetedSpeculation(times, splits)
    rates = [0.99] * 32 + [0.3] * 32
    learn(found, rates)
    assert found.decide([request(rate, i) for i, rate in enumerate(rates)]) == (5, (32, 0))


def test_few_accepted_drafts_end_drafting():
    rates = [0.05] * 16
    found = policy(16, per_token=0.02, draft=0.1)
    learn(found, rates)
    assert found.decide([request(rate, i) for i, rate in enumerate(rates)]) == (0, (0, 0))


def test_one_request_is_never_split():
    found = policy(1, per_token=0.3)
    assert found.decide([request(0.9)])[1] == (0, 0)


def test_requests_outside_budgets_verify_all_and_others_that_do_not_speculate_none():
    requests = [
        request(0.9, 0),
        request(0.2, 1, speculative_budget=False),
        request(0.95, 2, speculate=False),
        request(0.9, 3),
    ]
    assert [one.arrival for one in by_acceptance(requests)] == [1, 0, 3, 2]


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 40, 64, 100, 256])
def test_long_rows_are_few_numbers_that_suffice(rows):
    found = {long_rows(rows, wanted) for wanted in range(rows + 1)}
    assert all(wanted <= long_rows(rows, wanted) <= rows for wanted in range(rows + 1))
    assert len(found) <= 10 and {0, rows} <= found


def test_a_history_forgets():
    history = AcceptanceHistory()
    assert history.rate == pytest.approx(0.7)
    for _ in range(40):
        history.observe(3, 3)
    assert history.rate > 0.9
    for _ in range(80):
        history.observe(0, 3)
    assert history.rate < 0.2
    # What is not verified is tried again.
    for _ in range(100):
        history.observe(0, 0)
    assert history.rate > 0.6


def test_an_engine_with_a_budget():
    """Which times it finds on a busy machine is left open; the tokens are the same."""
    model = tiny_model()
    want = [decode(model, prompt, 20) for prompt in PROMPTS]
    llm = make_llm(model, 3, speculative_budget="auto", **SEVERAL)
    assert isinstance(llm.engine.speculation, BudgetedSpeculation)
    assert generate(guide(llm, PROMPTS), PROMPTS) == want


@pytest.mark.parametrize(
    "settings", [{"speculative_token_tree": [2, 1]}, {"speculative_eagle_topk": 2}]
)
def test_trees_have_no_budget(settings):
    with pytest.raises(UserError, match="speculative_budget is 'auto', must be None"):
        make_llm(tiny_model(), None, speculative_budget="auto", **settings)
