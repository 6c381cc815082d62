"""The prompt tokens of a step follow what decoding requests can wait for."""

import random

import pytest

from mtpkit.engine import EngineConfig, SamplingParams
from mtpkit.engine.scheduling.pacing import Pacing, pacing_for
from mtpkit.engine.steps.plan import Plan, Row
from tests.engine.fakes import HashModel, check_batches, fake_engine, run
from tests.shared import each

MODEL = HashModel()


def plan(decoding: int = 0, *chunks: int) -> Plan:
    rows = [Row(None, 0, 4, samples=True)] * decoding + [
        Row(None, 0, length, samples=False) for length in chunks
    ]
    return Plan(tuple(rows), decoding, decoding, 3)


def timed(pacing: Pacing, decode: float = 0.01, token: float = 1e-4, rows: int = 16) -> Pacing:
    """Decoding takes `decode` seconds, a prompt token `token`."""
    for _ in range(60):
        pacing.observe([plan(rows)], decode)
        pacing.observe([plan(rows), plan(0, 400, 100)], decode + 500 * token)
    return pacing


def test_nothing_is_bounded_while_no_request_decodes():
    assert timed(Pacing(0.02)).most_tokens(8192, 0, 1) == 8192


def test_prompts_take_what_the_bound_leaves():
    assert timed(Pacing(0.03)).most_tokens(8192, 16, 1) == pytest.approx(200, abs=1)
    assert timed(Pacing(0.03)).most_tokens(50, 16, 1) == 50


def test_the_default_is_in_proportion_to_decoding():
    slow, fast = (timed(Pacing(None), decode).most_tokens(8192, 16, 1) for decode in (0.02, 0.01))
    assert slow == pytest.approx(2 * fast, abs=2) and fast == pytest.approx(175, abs=2)


def test_prompts_are_not_starved_by_a_bound_that_decoding_alone_exceeds():
    assert timed(Pacing(0.001)).most_tokens(8192, 16, 1) >= 16


def test_times_follow_the_number_of_requests():
    pacing = timed(timed(Pacing(None), 0.01, rows=16), 0.03, rows=128)
    assert pacing.most_tokens(8192, 100, 1) == pytest.approx(525, abs=6)
    assert pacing.most_tokens(8192, 20, 1) == pytest.approx(175, abs=2)


def test_requests_that_are_nearly_twice_as_many_have_a_time_of_their_own():
    pacing = timed(timed(Pacing(None), 0.009, rows=70), 0.012, rows=125)
    assert [pacing.most_tokens(8192, rows, 1) for rows in (70, 125)] == pytest.approx(
        [157, 210], abs=3
    )


def test_a_step_without_rows_says_nothing_of_one_request():
    pacing = timed(Pacing(None), rows=1)
    before = pacing.most_tokens(8192, 1, 1)
    pacing.observe([plan(0)], 10.0)
    assert pacing.most_tokens(8192, 1, 1) == before


def test_a_time_that_says_nothing_of_a_token_is_not_taken_up():
    pacing = timed(Pacing(None))
    before = pacing.most_tokens(8192, 16, 1)
    pacing.observe([plan(16, 8)], 10.0)
    assert pacing.most_tokens(8192, 16, 1) == before
    pacing.observe([plan(0, 512)], 10.0)  # one of nine measurements
    assert pacing.most_tokens(8192, 16, 1) == before


@pytest.mark.parametrize("tokens", [16, 1750])
def test_results_that_come_together_do_not_stop_prompts(tokens):
    """A late host reads two results at once, and the second one seems to have taken no time."""
    pacing = timed(Pacing(None))
    before = pacing.most_tokens(8192, 16, 1)
    for _ in range(2):
        pacing.observe([plan(16, tokens)], 1e-4)
        assert pacing.most_tokens(8192, 16, 1) == before
    for _ in range(40):
        chunk = pacing.most_tokens(8192, 16, 1)
        assert chunk == before
        pacing.observe([plan(16, chunk)], 0.01 + chunk * 1e-4)
        pacing.observe([plan(16)], 0.01)


def load(
    pacing: Pacing, steps: int = 300, late: dict[int, float] | None = None, every: int = 1
) -> list[int]:
    """Prompt tokens of each step of a load in which decoding takes 8 ms and a token 27 us, and
    prompts wait in all but each `every`-th step; `late`: step -> seconds that the host lost
    then."""
    chosen = []
    for step in range(steps):
        prompts = every == 1 or step % every
        chosen.append(pacing.most_tokens(8192, 64, 1) if prompts else 0)
        seconds = 0.008 + 27e-6 * chosen[-1] + (late or {}).get(step, 0.0)
        pacing.observe([plan(64, *[chosen[-1]] * bool(prompts))], seconds)
    return chosen


SIZES = [
    16,
    32,
    64,
    128,
    192,
    256,
    320,
    384,
    448,
    512,
    640,
    768,
    896,
    1024,
    1280,
    1536,
    2048,
    4096,
    8192,
]


def warmed(bound: float | None) -> Pacing:
    pacing = Pacing(bound, SIZES, SIZES)
    for tokens in (0, 512, 0, 512, 0, 512):
        pacing.observe([plan(64, *[tokens] * bool(tokens))], 0.008 + 27e-6 * tokens)
    return pacing


@pytest.mark.parametrize("bound", [None, 0.03, 0.012])
@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("lost", [0.1, 0.3, 3.0])
def test_a_late_step_changes_nothing(bound, every, lost):
    """Whether prompts wait in every step or not: three of nine measurements do not move a
    median."""
    steady = load(warmed(bound), every=every)
    assert load(warmed(bound), every=every, late={40: lost, 41: lost, 90: lost}) == steady


def mixed_steps(
    pacing: Pacing,
    steps: int,
    waiting: int = 1,
    late: int = 0,
    most_mixed: int = 512,
    token: float = 16e-6,
    crowded: bool = False,
) -> list[tuple[int, float]]:
    """Prompt tokens and seconds of steps. Up to `most_mixed` tokens of prompts share a pass with 16
    decode rows, and take `token` seconds each; more have one of their own, 2 ms and 23 us each;
    decoding takes 6.5 ms. The first `late` ones last 0.3 s more.
    """
    taken = []
    for step in range(steps):
        tokens = pacing.most_tokens(8192, 16, waiting, crowded)
        plans = [plan(16, tokens)] if tokens <= most_mixed else [plan(16), plan(0, tokens)]
        seconds = 6.5e-3 + (token * tokens if tokens <= most_mixed else 2e-3 + 23e-6 * tokens)
        pacing.observe(plans, seconds + 0.3 * (step < late))
        pacing.observe([plan(16)], 6.5e-3)
        taken.append((tokens, seconds))
    return taken


def begun(bound: float | None) -> Pacing:
    """A prompt of 2,048 tokens has been computed alone, and requests have decoded since."""
    pacing = Pacing(bound, SIZES, SIZES, most_mixed=512)
    pacing.observe([plan(0, 2048)], 2e-3 + 2048 * 23e-6)
    pacing.observe([plan(16)], 6.5e-3)
    return pacing


def are_trials(others: list[int], best: list[int]) -> bool:
    """Whether each of some steps may be a trial, which comes after 48 times as many tokens of the
    other kind; the first one may come after tokens that the lists do not have."""
    return 48 * sum(others) <= sum(best) + 48 * max(others, default=0)


def only_trials_beside(tokens: int, taken: list[int]) -> bool:
    """Whether all steps of other numbers of prompt tokens may be trials."""
    best = [chosen for chosen in taken if chosen == tokens]
    return are_trials([chosen for chosen in taken if chosen != tokens], best)


@pytest.mark.parametrize(
    ("bound", "tokens", "first"),
    [
        (None, 512, 1),
        (0.012, 320, 9),  # steps of 192 tokens count for less, and are measured nine times
        (0.02, 512, 0),
        (0.025, 512, 0),
        (0.03, 512, 0),
    ],
)
def test_tokens_that_share_a_pass_have_a_time_of_their_own(bound, tokens, first):
    """Seconds of a token in one kind of steps do not lead to steps of the other kind that take too
    long: only the first trial of the other kind may, since its time is not known before."""
    taken = mixed_steps(begun(bound), 5000)
    most = 2.75 * 6.5e-3 if bound is None else bound
    assert sum(seconds > most for _, seconds in taken) <= 1
    assert only_trials_beside(tokens, [chosen for chosen, _ in taken[first:]])


@pytest.mark.parametrize(("bound", "waiting", "tokens"), [(0.25, 1, 8192), (None, 1000, 2048)])
def test_long_chunks_are_chosen_where_they_compute_more(bound, waiting, tokens):
    assert mixed_steps(begun(bound), 300, waiting=waiting)[-1][0] == tokens


@pytest.mark.parametrize(
    ("token", "crowded", "tokens"), [(16e-6, False, 2048), (16e-6, True, 512), (30e-6, True, 2048)]
)
def test_while_requests_wait_for_others_to_end_the_cheaper_tokens_are_chosen(
    token, crowded, tokens
):
    """Those of long chunks take 24 us, and a second computes more of them than of any that share a
    pass."""
    taken = mixed_steps(begun(None), 300, waiting=1000, token=token, crowded=crowded)
    # the first three steps measure the kind that was never timed
    assert only_trials_beside(tokens, [chosen for chosen, _ in taken[3:]])


def test_kinds_are_compared_at_what_a_step_may_have():
    """1,024 tokens take 32 ms in a pass of their own, 512 that share one 14.7."""
    pacing = begun(0.25)
    for _ in range(3):
        pacing.observe([plan(16, 512)], 6.5e-3 + 512 * 16e-6)
    assert pacing.most_tokens(1024, 16, 1) == 512 and pacing.most_tokens(2048, 16, 1) == 2048


def test_mixed_steps_have_their_most_tokens_too():
    pacing = Pacing(None, most_mixed=8192)
    timed(pacing, decode=1.0)
    assert pacing.most_tokens(8192, 16, 1000, crowded=True) == 4096


@pytest.mark.parametrize(("late", "until"), [(1, 0), (4, 0), (10, 15)])
def test_a_kind_of_step_that_was_late_is_chosen_again(late, until):
    """Four late steps of nine change nothing. After ten, five that are not late do, which the
    steps that were made shorter measure."""
    pacing = Pacing(0.25, SIZES, SIZES, most_mixed=512)
    mixed_steps(pacing, 50)
    taken = [chosen for chosen, _ in mixed_steps(pacing, 60, late=late)]
    assert only_trials_beside(8192, taken[until:])


def crowded_steps(
    pacing: Pacing,
    steps: int,
    late: float = 0.0,
    decode: float = 12.3e-3,
    token: float = 12.4e-6,
    seed: int = 0,
    late_steps: int = 10**9,
) -> list[int]:
    """Prompt tokens of steps with 128 decode rows, while prompts always wait. Up to 512 tokens
    share the pass of the decode rows, and take `token` seconds each; more have one of their own,
    22.6 us each. Times vary by 2 %. In each of the first `late_steps` steps, the host is late with
    probability `late`: the step seems to last longer, and the next one shorter by as much.
    """
    rng = random.Random(seed)
    taken = []
    lateness = 0.0
    for step in range(steps):
        tokens = pacing.most_tokens(8192, 128, 400, True)
        taken.append(tokens)
        seconds = decode + tokens * (token if tokens <= 512 else 22.6e-6)
        plans = (
            [plan(128, *[tokens] * (tokens > 0))] if tokens <= 512 else [plan(128), plan(0, tokens)]
        )
        before = lateness
        lateness = (
            rng.uniform(0.2, 0.9) * seconds if step < late_steps and rng.random() < late else 0.0
        )
        pacing.observe(plans, max(1e-4, seconds * rng.gauss(1, 0.02) + lateness - before))
    return taken


def filled() -> Pacing:
    """128 prompts have been computed alone, and their requests have decoded since."""
    pacing = Pacing(None, SIZES, SIZES, most_mixed=512)
    for seconds in (0.185, 0.2, 0.185):
        pacing.observe([plan(0, 8192)], seconds)
    for _ in range(3):
        pacing.observe([plan(128)], 12.3e-3)
    return pacing


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("late", "late_steps"), [(0.0, 0), (0.05, 10**9), (0.1, 10**9), (0.5, 20)])
@pytest.mark.parametrize(("token", "best"), [(12.4e-6, 512), (30e-6, 4096)])
def test_a_late_host_does_not_change_the_kind_of_steps(token, best, late, late_steps, seed):
    """But for trials, also while little has been measured."""
    taken = crowded_steps(filled(), 500, late, token=token, seed=seed, late_steps=late_steps)
    for part in (taken[:250], taken[250:]):
        others = [tokens for tokens in part if tokens not in (0, best)]
        # one trial and 2 % of the tokens as without lateness, and another 1 %: a trial is as long
        # as the times at hand allow, and shorter ones come sooner
        assert sum(others) - max(others, default=0) <= 0.03 * sum(part)


@pytest.mark.parametrize(
    ("wrong", "plans"), [(0.06, [plan(128, 512)]), (0.4, [plan(128), plan(0, 4096)])]
)
@pytest.mark.parametrize(("token", "best"), [(12.4e-6, 512), (30e-6, 4096)])
def test_a_kind_whose_times_were_all_wrong_is_chosen_again(token, best, wrong, plans):
    """Nine steps of one kind seemed to take 60 or 400 ms."""
    pacing = filled()
    crowded_steps(pacing, 200, token=token)
    for _ in range(9):
        pacing.observe(plans, wrong)
    # Nine right ones come after nine steps where the kind is still chosen, if for fewer tokens.
    # Otherwise two trials outvote the wrong ones, each after 48 times its tokens of the other kind.
    crowded_steps(pacing, 13 if best == 512 else 280, token=token)
    taken = crowded_steps(pacing, 200, token=token)
    assert only_trials_beside(best, [tokens for tokens in taken if tokens])


@pytest.mark.parametrize("seen", [3e-3, 12.3e-3, 30e-3])
def test_the_time_of_decoding_is_measured_again_while_prompts_always_wait(seen):
    """It was measured once, together with the result before it, rightly, or late; later decoding
    takes twice as long. Few steps have no prompts for that."""
    pacing = Pacing(0.03, SIZES, SIZES, most_mixed=512)
    pacing.observe([plan(0, 8192)], 0.185)
    pacing.observe([plan(128)], seen)
    for decode, tokens in ((12.3e-3, 512), (24.6e-3, 384)):
        taken = crowded_steps(pacing, 420, decode=decode, token=13e-6)
        # times vary, so that single steps have the next size
        assert pacing._token_seconds(True) == pytest.approx(13e-6, rel=0.1)
        assert sorted(taken[-50:])[25] == tokens
        # After 8 steps twice, while fewer than three are measured, then after 128; of the second
        # load three times in 420 steps.
        assert taken.count(0) == (5 if decode == 12.3e-3 else 3)


def test_prompts_do_not_wait_for_measurements():
    """Beside a request that has decoded alone, prompts are in each of the next hundred steps."""
    pacing = Pacing(None, SIZES, SIZES, most_mixed=512)
    pacing.observe([plan(0, 2048)], 2e-3 + 2048 * 23e-6)
    for _ in range(3):
        pacing.observe([plan(1)], 6e-3)
    for _ in range(100):
        chosen = pacing.most_tokens(8192, 1, 1)
        assert chosen
        pacing.observe([plan(1, chosen)], 6e-3 + 16e-6 * chosen)


def test_a_number_of_requests_that_never_decoded_alone_costs_one_step():
    """Results arrive after the next two steps were planned."""
    pacing = timed(Pacing(None), rows=1)
    assert pacing.most_tokens(8192, 100, 1)
    pacing.observe([plan(100, 100)], 0.03)
    assert [bool(pacing.most_tokens(8192, 100, 1)) for _ in range(3)] == [False, True, True]
    pacing.observe([plan(100)], 0.02)
    assert pacing.most_tokens(8192, 100, 1) == pytest.approx(350, abs=2)


@each(
    ("bound", "waiting", "most", "tokens"),
    [(0.25, 1, 512, 8192), (None, 1000, 512, 2048), (0.03, 1, 512, 512), (0.012, 1, 300, 256)],
)
@each("seconds", [1e-4, 6.51e-3, 7e-3])
def test_a_first_time_that_is_too_short_says_little(bound, waiting, most, tokens, seconds):
    """Its result came together with the one before, since the host was late."""
    pacing = Pacing(bound, SIZES, SIZES, most_mixed=most)
    for _ in range(60):
        pacing.observe([plan(16)], 6.5e-3)
        pacing.observe(
            [plan(16, 512)] if bound != 0.012 else [plan(16), plan(0, 512)], 6.5e-3 + 512 * 16e-6
        )
    pacing.observe([plan(16), plan(0, 8192)] if bound != 0.012 else [plan(16, 300)], seconds)
    taken = mixed_steps(pacing, 100, waiting=waiting, most_mixed=most)
    assert taken[-1][0] == tokens
    assert max(chosen for chosen, _ in taken) <= max(2048, 2 * tokens)


@pytest.mark.parametrize("seconds", [1e-4, 6.51e-3])
def test_short_steps_that_seem_to_take_no_time_say_little_of_long_ones(seconds):
    pacing = Pacing(None, SIZES, SIZES, most_mixed=512)
    for _ in range(60):
        pacing.observe([plan(16)], 6.5e-3)
        pacing.observe([plan(16), plan(0, 1024)], 30e-3)
    apart = pacing._token_seconds(False)
    pacing.observe([plan(16, 16)], seconds)
    assert pacing._token_seconds(True) == apart
    for _ in range(1000):
        pacing.observe([plan(16)], 6.5e-3)
        pacing.observe([plan(16, 16)], 6.6e-3)
    assert pacing._token_seconds(False) == apart
    assert mixed_steps(pacing, 100)[-1][0] == 512


def test_slow_steps_of_one_kind_do_not_make_the_other_slow():
    pacing = begun(None)
    apart = pacing._token_seconds(False)
    for _ in range(100):
        pacing.observe([plan(16, 512)], 6.5e-3 + 512 * 40e-6)
    assert pacing._token_seconds(False) == apart
    assert pacing._token_seconds(True) == pytest.approx(40e-6)


@pytest.mark.parametrize("bound", [1e-20, 1e300])
@pytest.mark.parametrize("most_mixed", [0, 512])
def test_bounds_of_any_size(bound, most_mixed):
    pacing = Pacing(bound, most_mixed=most_mixed)
    timed(pacing)
    pacing.observe([plan(16, 512)], 0.07)
    for _ in range(5000):
        pacing.observe([plan(16, 8)], 0.010001)
    pacing.observe([plan(16)], 0.01)
    assert pacing.most_tokens(8192, 16, 1) == (16 if bound < 1 else most_mixed or 8192)


def test_mixed_steps_are_tried_where_longer_chunks_keep_to_the_bound():
    """Also if each prompt is so long that none of its chunks is short."""
    chosen = [tokens for tokens, _ in mixed_steps(begun(0.03), 5)]
    assert chosen == [512] * 5
    pacing = begun(0.25)
    assert [tokens for tokens, _ in mixed_steps(pacing, 5)] == [512, 512, 512, 8192, 8192]
    short = Pacing(0.03, SIZES, SIZES, most_mixed=128)  # too short to be timed
    short.observe([plan(0, 2048)], 2e-3 + 2048 * 23e-6)
    short.observe([plan(16)], 6.5e-3)
    assert [tokens for tokens, _ in mixed_steps(short, 2, most_mixed=128)] == [896, 896]


@pytest.mark.parametrize("most_mixed", [0, 512])
def test_a_step_without_decode_rows_beside_other_batches_is_one_of_its_own(most_mixed):
    pacing = Pacing(0.03, SIZES, SIZES, most_mixed=most_mixed)
    for _ in range(3):
        pacing.observe([plan(16)], 0.01)
        pacing.observe([plan(0, 400)], 0.02)
        pacing.observe([plan(16, 300)], 0.03)
    assert pacing.most_tokens(8192, 0, 1, False, 16) == 384
    assert pacing.most_tokens(8192, 16, 1) == (256 if most_mixed else 384)


@pytest.mark.parametrize(("bound", "tokens"), [(None, 512), (0.03, 768), (0.25, 8192)])
def test_a_load_that_never_decodes_alone_is_paced_too(bound, tokens):
    """From the first step on prompts wait in every one: what decoding takes is what the prompts
    leave of the time."""
    pacing = Pacing(bound, SIZES, SIZES)
    pacing.observe([plan(0, 8192)], 27e-6 * 8192)
    assert load(pacing, steps=50)[-1] == tokens


def test_many_waiting_requests_are_served_before_few_that_decode():
    pacing = timed(Pacing(None))
    one, many, most = (pacing.most_tokens(8192, 16, waiting) for waiting in (1, 9, 1000))
    assert one < many < most < 8 * one
    assert pacing.most_tokens(8192, 16, 1, crowded=True) == most
    # more would gain nothing
    assert timed(Pacing(None), decode=1.0).most_tokens(8192, 16, 1, crowded=True) == 4096
    bounded = timed(Pacing(0.03))
    assert bounded.most_tokens(8192, 16, 1000, crowded=True) == bounded.most_tokens(8192, 16, 1)


def test_before_any_time_is_known_chunks_are_of_middle_size():
    assert Pacing(0.03).most_tokens(8192, 4, 1) == 512 == Pacing(None).most_tokens(8192, 4, 1)


@pytest.mark.parametrize(("budget", "tokens"), [(10, 10), (16, 16), (100, 64), (8192, 128)])
def test_steps_are_filled_up_to_captured_sizes(budget, tokens):
    assert Pacing(0.03, (16, 64, 128)).most_tokens(budget, 0, 1) == tokens


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("bound", [None, 0.03])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_steps_on_a_gpu_are_paced_whether_or_not_graphs_run_them(on_gpu, bound, graphs):
    config = EngineConfig(64, 2, max_inter_token_latency=bound, graphs=graphs)
    pacing = pacing_for(config, on_gpu, *[SIZES, SIZES] * graphs)
    assert (pacing is None) == (not on_gpu and bound is None and not graphs)
    if pacing:
        assert pacing.bound == bound and pacing.most_mixed == config.max_mixed_tokens == 512
        assert timed(pacing).most_tokens(8192, 16, 1) < 8192


def test_each_batch_has_its_part_of_the_bound():
    config = EngineConfig(64, 2, max_inter_token_latency=0.06, num_batches=2)
    pacing = timed(pacing_for(config, on_gpu=False))
    assert pacing.most_tokens(8192, 16, 1) == pytest.approx(200, abs=1)


def test_requests_of_other_batches_wait_for_a_step_too():
    """Also where it decodes nothing itself; such a step is filled up to the sizes of chunks that
    run alone."""
    pacing = timed(Pacing(0.03, alone=(150,), beside=(120,)))
    assert [pacing.most_tokens(8192, *args) for args in ((16, 1), (0, 1, False, 16))] == [120, 150]
    assert timed(Pacing(0.03)).most_tokens(8192, 0, 1, False, 16) == pytest.approx(200, abs=1)


@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_the_scheduler_keeps_to_it(num_batches):
    """A long prompt beside a request that decodes, perhaps in another batch: chunks of the bound;
    alone it fills the step."""
    settings = dict(max_inter_token_latency=5.0 * num_batches, num_batches=num_batches)
    engine = fake_engine(MODEL, num_blocks=400, max_num_batched_tokens=200, **settings)
    engine.pacing.observe([plan(1)], 1.0)
    engine.pacing.observe([plan(0, 256)], 25.6)  # 40 tokens fit
    engine.pacing.observe = lambda plans, seconds: None
    seen = []
    plan_step = engine.scheduler.plan

    def noted(decision):
        plans = plan_step(decision)
        seen.append((sum(p.num_decode_rows for p in plans), sum(p.num_chunk_tokens for p in plans)))
        return plans

    engine.scheduler.plan = noted
    engine.add_request([1] * 300, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    while not engine.scheduler.num_decoding:
        engine.step()
    assert seen == [(0, 200), (0, 100)]
    engine.add_request([2] * 100, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    run(engine)
    assert [chunk for rows, chunk in seen[2:] if chunk] == [40, 40, 20]


def paced_engine(budget: int, max_num_seqs: int, **settings):
    """An engine whose steps take `budget` prompt tokens beside requests that decode, and the decode
    rows and prompt tokens of its steps."""
    engine = fake_engine(
        MODEL, num_blocks=4000, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **settings
    )
    pacing = Pacing(None)
    engine.pacing = pacing
    engine.scheduler.prompt_budget.pacing = pacing
    pacing.most_tokens = lambda most, *args: min(budget, most)
    pacing.observe = lambda plans, seconds: None
    steps = []
    plan_step = engine.scheduler.plan

    def noted(decision):
        plans = plan_step(decision)
        steps.append(
            (sum(p.num_decode_rows for p in plans), sum(p.num_chunk_tokens for p in plans))
        )
        return plans

    engine.scheduler.plan = noted
    return engine, steps


def test_prompts_gather_while_more_wait_than_there_are_slots():
    """They fill a step, or wait until one slot in eight is free. Who waits for no slot is not held
    up."""
    engine, steps = paced_engine(600, 32)
    plain = fake_engine(MODEL, num_blocks=4000, max_num_seqs=32, max_num_batched_tokens=600)
    for index in range(120):
        request = (
            [index % 7 + 1] * (40 + index % 50),
            SamplingParams(temperature=0, max_tokens=5 + index % 40),
        )
        for one in (engine, plain):
            one.add_request(*request)
    outputs = run(engine)
    assert {name: one.outputs[0].token_ids for name, one in outputs.items()} == {
        name: one.outputs[0].token_ids for name, one in run(plain).items()
    }
    beside = [tokens for rows, tokens in steps if rows and tokens]
    # some steps had none, for
    assert any(tokens == 0 for rows, tokens in steps[: len(steps) // 2] if rows)
    assert sorted(beside)[len(beside) // 2] > 150  # others had many


def test_a_prompt_that_has_a_slot_does_not_wait_for_others():
    engine, steps = paced_engine(600, 32)
    for _ in range(20):
        engine.add_request([1] * 20, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    engine.step()
    engine.add_request([2] * 9, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    engine.step()
    assert steps[-1][0] and steps[-1][1] == 9
    run(engine)


def test_prompts_do_not_gather_for_long():
    """One slot of 16 is free, and the prompt that it could take fills no step: it begins after 16
    steps all the same, and the last prompt, behind which none waits, at once."""
    engine, steps = paced_engine(600, 16)
    for max_tokens in (5, *[80] * 15, 9, 9, 9):
        engine.add_request(
            [1] * 40, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        )
    run(engine)
    gathered, last = [step for step, taken in enumerate(steps) if taken == (15, 40)]
    assert steps[gathered - 17 : gathered] == [(16, 0)] + [(15, 0)] * 16
    assert steps[last - 1] == (16, 0)


@pytest.mark.parametrize(("ended", "gathers"), [(1, True), (2, False)])
def test_each_batch_gathers_prompts_for_itself(ended, gathers):
    """As one batch of 16 slots does, until 16 steps have passed or two slots are free."""
    engine, steps = paced_engine(1000, 32, num_batches=2)
    batches = check_batches(engine.scheduler)
    for max_tokens in (*[5] * ended, *[80] * (32 - ended), 9, 9, 9, 9, 9):
        engine.add_request(
            [1] * 40, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        )
    run(engine)
    first = [taken for batch, taken in zip(batches, steps, strict=True) if batch == 0]
    left = 16 - ended
    begun = first.index((left, 40 * ended))
    waited = 16 if gathers else 0
    assert first[begun - waited - 1 : begun] == [(16, 0)] + [(left, 0)] * waited


@pytest.mark.parametrize("num_batches", [1, 2])
def test_one_prompt_is_one_prompt_however_many_requests_its_batch_lacks(num_batches):
    """The requests of one batch have ended, then a prompt comes: the others wait no longer than
    beside one batch."""
    engine, _ = paced_engine(4096, 20, num_batches=num_batches)
    for _ in range(20):
        engine.add_request([1] * 8, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    while engine.scheduler.num_decoding < 20:
        engine.step()
    for request in [one for one in engine.scheduler.running if one.slot % 2 == 0]:
        engine.abort(request.request_id)
    asked = []
    engine.pacing.most_tokens = lambda *args: asked.append(args) or args[0]
    engine.add_request([1] * 900, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    while engine.scheduler.waiting:
        engine.step()
    (taken,) = [args for args in asked if args[2]]
    _, decoding, waiting, crowded, elsewhere = taken
    assert waiting == 1 and not crowded and max(decoding, elsewhere) == 10
