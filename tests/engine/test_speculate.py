"""Requests that do not speculate get one token per step, whatever the drafts are, and change
nothing for those beside them."""

import json
import math
from pathlib import Path

import pytest
import torch

from mtpkit import LLM, SamplingParams
from mtpkit.checkpoint import save_hf_model
from mtpkit.engine.requests.tree import DynamicTree, parse_tree
from mtpkit.engine.scheduling.adaptive import AdaptiveSpeculation
from mtpkit.model import build_model
from tests.engine.fakes import HashModel, fake_engine, run
from tests.engine.rank_cases import config
from tests.engine.replayed import replay_on_cpu
from tests.engine.tiny import guide, make_llm, make_prompts, tiny_config, tiny_model
from tests.ranks import run_ranks

MODEL = HashModel(vocab_size=13)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 1, 2], [3, 1], [2] * 9, [7, 7, 1, 4]]
TREES = ({"tree": parse_tree([2, 2, 1])}, {"tree": DynamicTree(3, 2, 6)})


def asked(index: int, **settings) -> SamplingParams:
    """Two of three do not speculate; one of two is greedy."""
    drawn = dict(temperature=0.9, seed=index) if index % 2 else dict(temperature=0)
    known = dict(max_tokens=12 + index, ignore_eos=True, speculate=index % 3 == 0)
    return SamplingParams(**known | drawn | settings)


def check_stats(output, params: SamplingParams) -> None:
    """Compare the counts of a request with what it asked for."""
    stats = output.stats
    tokens = len(output.outputs[0].token_ids)
    if params.speculate:
        assert stats.steps < tokens - 1 and stats.accepted
        return
    # The first token is that of the prompt.
    assert stats.steps == tokens - 1 and stats.acceptance_length == 1
    assert stats.drafted == stats.accepted == sum(stats.reached_per_depth) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async_scheduling": True},
        {"num_blocks": 14, "async_scheduling": True},
        {"max_num_batched_tokens": 9},
        {"enable_prefix_caching": True, "num_checkpoints": 4, "async_scheduling": True},
        {"before": 1},
        *TREES,
        TREES[0] | {"async_scheduling": True, "num_blocks": 16},
        TREES[1] | {"enable_prefix_caching": True, "num_checkpoints": 4},
    ],
    ids=str,
)
def test_tokens_stay_and_counts_are_those_of_requests_that_speculate(settings):
    engine = fake_engine(MODEL, "always", num_speculative_tokens=3, **settings)
    params = [asked(index) for index in range(len(PROMPTS))]
    preempted = 0
    for _ in range(2):
        engine.reset_stats()
        names = [
            engine.add_request(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)
        ]
        outputs = run(engine)
        engine.scheduler.check_integrity()
        for name, prompt, one in zip(names, PROMPTS, params, strict=True):
            assert outputs[name].outputs[0].token_ids == MODEL.decode(prompt, one)
            check_stats(outputs[name], one)
        counted = [outputs[name].stats for name, one in zip(names, params, strict=True)]
        counted = [stats for stats, one in zip(counted, params, strict=True) if one.speculate]
        total = engine.stats().acceptance
        assert total.steps == sum(stats.steps for stats in counted)
        assert total.drafted == sum(stats.drafted for stats in counted) > 0
        depths = zip(*(stats.accepted_per_depth for stats in counted), strict=True)
        assert total.accepted_per_depth == [sum(depth) for depth in depths]
        preempted += engine.stats().preemptions
    assert bool(preempted) == (settings.get("num_blocks", 64) < 20)


@pytest.mark.parametrize("settings", [{}, *TREES], ids=str)
def test_steps_without_a_row_that_speculates_have_no_drafts(settings):
    """Once the last one that speculates has ended; those that come after it have theirs again."""
    engine = fake_engine(MODEL, "always", num_speculative_tokens=3, **settings)
    plans = []
    launch = engine.executor.launch

    def noted(plan):
        plans.append(plan)
        return launch(plan)

    engine.executor.launch = noted
    off = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, speculate=False)
    on = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine.add_request([1], off)
    first = engine.add_request([2], on)
    outputs = {}
    while first not in outputs:
        outputs |= {one.request_id: one for one in engine.step() if one.finished}
    for _ in range(5):
        engine.step()
    second = engine.add_request([2], on)
    outputs |= run(engine)
    widths = [plan.num_speculative_tokens for plan in plans if plan.num_decode_rows]
    speculating = [
        any(row.request.params.speculate for row in plan.decode_rows)
        for plan in plans
        if plan.num_decode_rows
    ]
    assert True in speculating and False in speculating
    # Beside a chunk, a step has the width that its graph was captured for.
    beside = [bool(plan.chunks) for plan in plans if plan.num_decode_rows]
    for width, wanted, chunk in zip(widths, speculating, beside, strict=True):
        assert width == (3 if wanted or chunk else 0)
    one, other = outputs[first], outputs[second]
    assert one.outputs[0].token_ids == other.outputs[0].token_ids == MODEL.decode([2], on)
    assert vars(one.stats) == vars(other.stats)


DRAWN = [
    (2, {"draft_sampling": True}),
    (3, {"draft_sampling": True, "async_scheduling": True, "enable_prefix_caching": True}),
    (None, {"speculative_token_tree": [3, 2], "draft_sampling": True}),
    (2, {"draft_sampling": True, "num_blocks": 18, "block_size": 4}),
]


@pytest.mark.parametrize(("k", "settings"), DRAWN, ids=str)
def test_drawn_drafts_do_not_change_the_tokens_of_k_0(k, settings):
    """Whether rows that speculate are beside or not."""
    prompts = make_prompts()
    model = tiny_model()
    drawn = dict(temperature=1.3, max_tokens=14, ignore_eos=True)
    off = [SamplingParams(seed=i, speculate=False, **drawn) for i in range(len(prompts))]
    want = tokens(make_llm(model, 0).generate(prompts, off, use_tqdm=False))
    llm = make_llm(model, k, **settings)
    assert tokens(llm.generate(prompts, off, use_tqdm=False)) == want

    on = SamplingParams(seed=5, **drawn)
    outputs = llm.generate([*prompts, *prompts], [*off, *[on] * len(prompts)], use_tqdm=False)
    assert tokens(outputs[: len(prompts)]) == want
    assert all(output.stats.drafted == 0 for output in outputs[: len(prompts)])
    alone = make_llm(model, k, **settings).generate(prompts, on, use_tqdm=False)
    assert tokens(outputs[len(prompts) :]) == tokens(alone)
    assert sum(output.stats.accepted for output in alone)


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_heads_that_are_not_finite_do_not_matter():
    model = build_model(tiny_config(), device="cpu", seed=1)
    with torch.no_grad():
        model.mtp.layers[0].eh_proj.weight.fill_(math.nan)
    llm = make_llm(model, 2)
    on = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    off = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, speculate=False)
    broken, fine = llm.generate([[1, 2], [1, 2]], [on, off], use_tqdm=False)
    assert broken.outputs[0].finish_reason == "error"
    assert fine.outputs[0].finish_reason == "length"
    want = make_llm(tiny_model(), 0).generate([[1, 2]], off, use_tqdm=False)
    assert tokens([fine]) == tokens(want)


@pytest.mark.parametrize("tree", [None, parse_tree([2, 2])], ids=["chain", "tree"])
def test_acceptance_is_learnt_from_the_others_alone(tree):
    def rates(*params: SamplingParams) -> list[float]:
        shapes = [0, 1, 2, *([tree] if tree else [])]
        # The last one is the fastest per token.
        times = {(4, shape): 1.0 - 0.1 * place for place, shape in enumerate(shapes)}
        engine = fake_engine(MODEL, num_speculative_tokens=2, tree=tree)
        engine.speculation = AdaptiveSpeculation(times)
        for index, one in enumerate(params):
            engine.add_request([index], one)
        run(engine)
        return engine.speculation.rates

    on = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
    off = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True, speculate=False)
    assert rates(off, off) == [0.7, 0.7]
    assert rates(on, off) == pytest.approx(rates(on), abs=0.02) != [0.7, 0.7]


SIZES = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]
RANK_WAYS = [
    (2, {}),
    (2, {"draft_sampling": True}),
    (None, {"speculative_token_tree": [2, 2]}),
    (None, {"speculative_token_tree": [2, 2], "draft_sampling": True, "async_scheduling": True}),
]


def decoded(model, k: int | None, **settings) -> list[list[int]]:
    """Tokens of requests with and without drafts, and then of some without."""
    small = dict(num_blocks=60, block_size=4, max_num_seqs=3, warm_up=False)
    llm = LLM(model, k, **small | settings)
    prompts = [[index, 5, 9] for index in range(7)]
    params = [asked(index) for index in range(7)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    off = [SamplingParams(seed=index, max_tokens=9, speculate=False) for index in range(7)]
    outputs += llm.generate(prompts, off, use_tqdm=False)
    drafted = [output.stats.drafted > 0 for output in outputs]
    assert drafted == [one.speculate and k != 0 for one in (*params, *off)]
    return tokens(outputs)


def rank_decodes(rank: int, model_dir: str, path: str, sizes: dict) -> None:
    found = [decoded(model_dir, k, **sizes, **settings) for k, settings in RANK_WAYS]
    if rank == 0:
        Path(path).write_text(json.dumps(found))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ranks_decode_as_one_does(sizes, tmp_path):
    save_hf_model(build_model(config("mamba2"), device="cpu", seed=1), tmp_path / "model")
    path = tmp_path / "tokens.json"
    run_ranks(rank_decodes, str(tmp_path / "model"), str(path), sizes)
    want = [decoded(str(tmp_path / "model"), k, **settings) for k, settings in RANK_WAYS]
    assert json.loads(path.read_text()) == want
    plain = decoded(str(tmp_path / "model"), 0)
    assert want[0] == want[2] == plain
    for found in (want[1], want[3]):
        off = [index for index in range(14) if index >= 7 or not asked(index).speculate]
        assert [found[index] for index in off] == [plain[index] for index in off]


@pytest.mark.parametrize(
    ("k", "settings"),
    [
        (2, {}),
        (2, {"draft_sampling": True}),
        (None, {"speculative_token_tree": [2, 2]}),
        (None, {"speculative_token_tree": [2, 2], "draft_sampling": True}),
    ],
    ids=str,
)
def test_graphs_decode_as_eager_steps_do(device, k, settings, monkeypatch):
    if device == "cpu":
        replay_on_cpu(monkeypatch)
    model = build_model(tiny_config(), device=device, seed=1)
    want = decoded(model, k, enforce_eager=True, **settings)
    assert decoded(model, k, **settings) == want


def test_guided_drafts_are_accepted_beside():
    """Most drafts are right, which tells a row that takes them from one that does not."""
    prompts = make_prompts()
    llm = guide(make_llm(tiny_model(), 3), prompts)
    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, speculate=index % 2 == 0)
        for index in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    want = make_llm(tiny_model(), 0).generate(prompts, params, use_tqdm=False)
    assert tokens(outputs) == tokens(want)
    for output, one in zip(outputs, params, strict=True):
        check_stats(output, one)


@pytest.mark.parametrize("heads", [("repeated", "*-"), ("distinct", "*-"), ("distinct", "M-")])
@pytest.mark.parametrize("beside", [False, True])
def test_what_they_leave_in_the_prefix_cache_is_as_good(heads, beside):
    """Steps without drafts keep the heads' entries, too: a later request drafts as after a cold
    start."""
    model = tiny_model(heads[0], mtp_pattern=heads[1])
    prompt = make_prompts((17,))[0]
    settings = dict(enable_prefix_caching=True, async_scheduling=True)
    off = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, speculate=False)
    on = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    llm = make_llm(model, 3, **settings)
    others = [[5, 6]] if beside else []
    (first, *_) = llm.generate([prompt, *others], [off, *[on] * len(others)], use_tqdm=False)
    longer = prompt + first.outputs[0].token_ids
    (warm, drafts), (cold, wanted) = (drafted(one, longer, on) for one in (llm, make_llm(model, 3)))
    assert warm.num_cached_tokens >= len(prompt) - 1
    assert tokens([warm]) == tokens([cold])
    assert drafts == wanted and len({tuple(one) for one in drafts}) > 5


def drafted(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple:
    """The output of a prompt, and the drafts that its decode steps make."""
    drafter = llm.engine.executor.drafter
    made = []

    class Noting:
        span = drafter.span

        def draft(self, hidden, batch, verdict):
            drafts = drafter.draft(hidden, batch, verdict)
            if batch.shape.decode_rows:
                made.append(drafts.token_ids[0].tolist())
            return drafts

    llm.engine.executor.drafter = Noting()
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output, made
