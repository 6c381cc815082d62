"""Random histories of whole engines in which all that no step may read is NaN before each step.

Each is played twice, the second time untouched: all that can be seen must be the same, the drafts
and counts, too.
"""

import random
from dataclasses import dataclass, replace

import pytest

from mtpkit.engine import SamplingParams
from mtpkit.engine.device.executor import Executor
from mtpkit.engine.requests.tree import DraftShape
from mtpkit.engine.scheduling import adaptive as adaptive_module
from mtpkit.engine.scheduling.budget import BudgetedSpeculation
from mtpkit.model import build, build_model
from tests.engine.poison import poison
from tests.engine.rank_cases import config, split_model
from tests.engine.replayed import replay_on_cpu
from tests.engine.test_llm import Words
from tests.engine.test_stages import halves
from tests.engine.test_trees import tree_llm, watched
from tests.engine.tiny import decode, greedy, make_prompts, penalised, tiny_model
from tests.ranks import run_ranks
from tests.shared import look_at_new_objects

MODELS = [
    ("repeated", "M-*M-", "*-", 3),
    ("repeated", "M*M-", "M*", 3),
    ("repeated", "G-*G-", "G*", 3),
    ("repeated", "+-M+", "+-", 3),
    ("distinct", "M-*M-", "*-", 4),
    ("distinct", "M*M-", "M*", 4),
    ("distinct", "G*G-", "G*", 3),
]
DRAFTS = [
    dict(num_speculative_tokens=0),
    dict(num_speculative_tokens=1),
    dict(num_speculative_tokens=3),
    dict(speculative_token_tree=[2, 2, 1]),
    dict(speculative_token_tree="[7,1,1]"),
    dict(num_speculative_tokens=3, speculative_eagle_topk=2, speculative_num_draft_tokens=6),
    dict(num_speculative_tokens=3, speculative_eagle_topk=8, speculative_num_draft_tokens=20),
    dict(speculative_token_tree=[3, 2], draft_sampling=True),
]
ADAPTIVE = [
    dict(num_speculative_tokens="auto"),
    dict(num_speculative_tokens="auto", speculative_token_tree=[2, 2, 1]),
    dict(num_speculative_tokens="auto", speculative_eagle_topk=2, speculative_num_draft_tokens=6),
    dict(num_speculative_tokens=3, speculative_budget="auto"),
    dict(num_speculative_tokens="auto", speculative_budget="auto"),
    dict(num_speculative_tokens=3, speculative_budget="auto", draft_sampling=True),
]
LENGTHS = (1, 1, 2, 3, 5, 9, 14)
MOST = 12
OTHERS = [
    penalised(MOST),
    SamplingParams(seed=3, max_tokens=MOST, ignore_eos=True),
    SamplingParams(
        seed=4, temperature=0.7, top_k=5, presence_penalty=0.9, max_tokens=MOST, ignore_eos=True
    ),
]
"""Parameters with which outputs are compared with those of the untouched engine alone."""


@dataclass(frozen=True)
class Kind:
    """What a history is about."""

    graphs: bool = False
    cached: bool = False
    """With a prefix cache, and prompts that go on from other requests."""
    auto: bool = False
    """With drafts that the engine chooses by its step times."""


def asked(rng: random.Random, model, kind: Kind) -> list[tuple[list[int], list[int]]]:
    """Prompts, each with its greedy output by decoding without an engine."""
    prompts = make_prompts(LENGTHS)
    if kind.cached:
        prompts += [
            [*one, *decode(model, one, MOST)[: rng.randint(1, MOST)], 5] for one in prompts[1:]
        ]
        prompts += [[*prompts[-1], *decode(model, prompts[-1], MOST)], prompts[-1][:-3]]
    return [(prompt, decode(model, prompt, MOST)) for prompt in prompts]


def history(
    rng: random.Random, model, pairs: list[tuple[list[int], list[int]]], kind: Kind
) -> None:
    """Requests that come and go, in an engine whose free memory is poisoned and in one that is left
    alone.

    Args:
        pairs: see `asked`.
    """
    block_size = rng.choice([1, 2, 4, 16])
    settings = rng.choice(ADAPTIVE if kind.auto else DRAFTS) | dict(
        block_size=block_size,
        num_blocks=rng.choice([-(-(90 if kind.cached else 70) // block_size), 400]),
        max_num_seqs=rng.choice([3, 5] if kind.auto else [1, 3, 5]),
        max_num_batched_tokens=rng.choice([26, 64]),
        max_mixed_tokens=rng.choice([0, 12]),
        state_rollback=rng.choice(["replay", "snapshot"]),
        async_scheduling=rng.random() < 0.5,
        enforce_eager=not kind.graphs,
    )
    if kind.cached:
        settings |= dict(enable_prefix_caching=True, prefix_cache_interval=rng.choice([4, 2048]))
        settings |= dict(prefix_cache_bytes=rng.choice([40_000, 400_000]))
    seed = rng.random()
    played = []
    for poisoned in (True, False):
        llm = tree_llm(model, settings, tokenizer=Words(), seed=1)
        if not kind.graphs and llm.engine.config.num_speculative_tokens:
            watched(llm, [prompt + tokens for prompt, tokens in pairs])
        assert (llm.engine.executor.graphs is not None) == kind.graphs
        played.append(
            play(llm, pairs, random.Random(seed), poisoned, requests=12 if kind.cached else 5)
        )
    assert played[0] == played[1]
    assert not kind.cached or llm.stats().cached_tokens
    assert not kind.auto or len(played[0]["shapes"]) > 1


def play(llm, pairs, rng: random.Random, poisoned: bool, requests: int) -> dict:
    """All that can be seen of an engine's history: outputs and drafts of each step, the shapes of
    drafts, and totals. Greedy requests get the tokens of decoding without an engine.

    Args:
        poisoned: whether what no step may read is NaN before each step.
        requests: number of requests, each of one of the prompts.
    """
    engine = llm.engine
    if engine.pacing:  # plans must not depend on measured times
        observe = engine.pacing.observe
        engine.pacing.observe = lambda plans, seconds: observe(plans, 0.01)
    waiting = [(str(number), *rng.choice(pairs)) for number in range(requests)]
    greedy_outputs: dict[str, list[int]] = {}
    live: list[str] = []
    steps: list[list] = []
    shapes: set[tuple[DraftShape, bool]] = set()
    plan = engine.scheduler.plan

    def noted(decision):
        plans = plan(decision)
        if any(one.num_decode_rows for one in plans):
            shapes.add((decision.drafts, any(one.short[0] for one in plans)))
        return plans

    engine.scheduler.plan = noted
    while waiting or engine.has_unfinished:
        if waiting and (not engine.has_unfinished or rng.random() < 0.4):
            name, prompt, want = waiting.pop(0)
            params = greedy(MOST) if rng.random() < 0.7 else rng.choice(OTHERS)
            if params == greedy(MOST):
                greedy_outputs[name] = want
            live.append(name)
            engine.add_request(prompt, params, name)
        if rng.random() < 0.02 and live:
            engine.abort(live.pop(rng.randrange(len(live))))
        if not engine.has_unfinished:
            continue
        if poisoned:
            poison(engine)
        outputs = engine.step()
        for one in (output for output in outputs if output.finished):
            assert one.error is None
            assert one.outputs[0].token_ids == greedy_outputs.get(
                one.request_id, one.outputs[0].token_ids
            )
            live.remove(one.request_id)
        engine.scheduler.check_integrity()
        steps.append(
            [
                (output.request_id, output.outputs[0].text, vars(output.stats).copy())
                for output in outputs
            ]
        )
        steps.append(_drafts(engine))
    engine.scheduler.plan = plan
    totals = replace(llm.stats(), seconds=0.0, returned_bytes=0.0)
    return dict(steps=steps, shapes=shapes, totals=totals)


def _drafts(engine) -> list[tuple]:
    """The newest token of each request that decodes, with the drafts after it, as the device knows
    them."""
    state = engine.executor.state
    trees = state.tokens if state.parents is None else state.parents
    slots = [request.slot for request in engine.scheduler.running if request.decoding]
    return [(slot, state.tokens[slot].tolist(), trees[slot].tolist()) for slot in slots]


def try_others(patch: pytest.MonkeyPatch) -> None:
    """Where the engine chooses the drafts of each step, it tries others in every second step, and
    its choice does not depend on measured times. Where it has a budget, some requests verify fewer
    drafts in most steps."""
    time_step = Executor.time_step

    def timed(self, shape, repeats):
        time_step(self, shape, repeats=1)
        return 1 + shape.tokens / 4

    patch.setattr(Executor, "time_step", timed)
    patch.setattr(adaptive_module, "_PROBE_INTERVAL", 4)
    decide = BudgetedSpeculation.decide

    def split(self, requests):
        drafts, short = decide(self, requests)
        chance = random.Random(self._steps)
        self._steps += self._fixed
        if not drafts or chance.random() < 0.3:
            return drafts, short
        return drafts, (chance.randint(0, len(requests)), chance.randrange(drafts))

    patch.setattr(BudgetedSpeculation, "decide", split)


@pytest.fixture(autouse=True)
def probes(monkeypatch):
    try_others(monkeypatch)


def random_history(seed: int, device: str = "cpu", **kind) -> None:
    rng = random.Random(seed)
    wanted = Kind(**kind)
    *layers, distinct = rng.choice(MODELS)
    model = tiny_model(*layers, device=device, distinct=distinct)
    history(rng, model, asked(rng, model, wanted), wanted)


@pytest.mark.parametrize("seed", range(8))
def test_eagerly(seed):
    random_history(seed)


@pytest.mark.parametrize("seed", range(200, 208))
def test_with_a_prefix_cache(seed):
    random_history(seed, cached=True)


@pytest.mark.parametrize("seed", range(300, 304))
def test_with_drafts_that_the_engine_chooses(seed):
    random_history(seed, cached=seed % 2 == 0, auto=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", range(100, 106))
def test_in_graphs(seed, device, monkeypatch):
    """With null rows; on a CPU steps are run again where a GPU replays them."""
    if device == "cpu":
        replay_on_cpu(monkeypatch)
    random_history(seed, device, graphs=True, cached=seed % 3 == 1, auto=seed % 3 == 2)


ON_RANKS = [
    ("mamba2", Kind()),
    ("distinct heads", Kind(cached=True)),
    ("attention", Kind(cached=True, auto=True)),
]


def on_rank(rank: int, stages: int, pairs: list) -> None:
    """The histories of `ON_RANKS` on one of two ranks, which also compares what it sees itself."""
    look_at_new_objects()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "stage_patterns", halves)
        try_others(patch)
        for seed, ((base, kind), known) in enumerate(zip(ON_RANKS, pairs, strict=True)):
            model = split_model(config(base), ranks=2 // stages, stages=stages)
            history(random.Random(seed), model, known, kind)


@pytest.mark.parametrize("stages", [1, 2], ids=["tensor-parallel", "stages"])
def test_on_two_ranks(stages):
    models = [build_model(config(base), device="cpu", seed=1) for base, _ in ON_RANKS]
    pairs = [
        asked(random.Random(1), model, kind)
        for model, (_, kind) in zip(models, ON_RANKS, strict=True)
    ]
    run_ranks(on_rank, stages, pairs)
