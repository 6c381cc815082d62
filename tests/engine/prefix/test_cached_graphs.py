"""A prefix cache under CUDA graphs, and where the steps of graphs run on a CPU: the tokens of plain
decoding."""

import pytest

from mtpkit.engine import SamplingParams
from tests.engine.replayed import replay_on_cpu
from tests.engine.tiny import generate, greedy, make_llm, make_prompts, tiny_model


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """The device of a model; on a CPU steps are run again where a GPU replays them."""
    if request.param == "cpu":
        replay_on_cpu(monkeypatch)
    return request.param


@pytest.mark.parametrize(
    ("heads", "k", "pattern", "mtp_pattern", "rollback"),
    [
        ("repeated", 3, "M-*M-", "*-", "replay"),
        ("distinct", 3, "G-*G-", "*-", "replay"),
        ("repeated", 0, "+-M-+-", "+-", "replay"),
        ("repeated", 2, "G-*M-", "*-", "snapshot"),
        ("repeated", 2, "M-*M-", "M*", "replay"),
        ("distinct", 2, "M-*M-", "*G", "replay"),
    ],
)
def test_conversations_in_graphs(device, heads, k, pattern, mtp_pattern, rollback):
    """Side by side, with rows that end while the next step is under way."""
    model = tiny_model(heads, pattern, mtp_pattern, device=device)
    settings = dict(max_num_seqs=3, state_rollback=rollback, max_num_batched_tokens=24)
    llms = [
        make_llm(model, k, enable_prefix_caching=cached, **settings) for cached in (False, True)
    ]
    assert llms[1].engine.executor.graphs and llms[1].engine.config.async_scheduling
    histories = make_prompts((21, 4, 9))
    for turn in range(3):
        off, on = (generate(llm, histories, greedy(7)) for llm in llms)
        assert on == off
        histories = [
            history + output + [turn, 5] for history, output in zip(histories, off, strict=True)
        ]
    stats = llms[1].stats()
    assert stats.cached_tokens == sum(21 + 4 + 9 + 9 * 3 * turn - 3 * 3 for turn in (1, 2))
    sampled = SamplingParams(temperature=0.8, seed=4, max_tokens=6, ignore_eos=True)
    off, on = (generate(llm, [histories[0], histories[0][:-1]], sampled) for llm in llms)
    assert on == off


def test_graphs_and_the_cache_are_warmed_up_together(device):
    """And what was run for it leaves nothing behind."""
    model = tiny_model(device=device)
    settings = dict(max_num_seqs=2, max_num_batched_tokens=16, warm_up=True)
    llms = [
        make_llm(model, 2, enable_prefix_caching=cached, **settings) for cached in (False, True)
    ]
    prompts = make_prompts((17, 17))
    for _ in range(2):
        off, on = (generate(llm, prompts, greedy(6)) for llm in llms)
        assert on == off
    assert llms[1].stats().cached_tokens == 34


def test_auto_beside_the_cache(device):
    """Timing steps on free slots ends no request."""
    model = tiny_model(device=device)
    llm = make_llm(
        model,
        "auto",
        warm_up=True,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        enable_prefix_caching=True,
    )
    plain = make_llm(model, 0)
    for _ in range(2):
        prompts = make_prompts((9, 12))
        assert generate(llm, prompts, greedy(12)) == generate(plain, prompts, greedy(12))
    assert llm.stats().cached_tokens == 21
