"""Random histories of whole engines in which all that no step may read is NaN before each step."""

import itertools
import random

import pytest

from tests.engine.poison import poison
from tests.engine.replayed import replay_on_cpu
from tests.engine.test_trees import tree_llm, watched
from tests.engine.tiny import decode, greedy, make_prompts, tiny_model

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
LENGTHS = (1, 1, 2, 3, 5, 9, 14)
MOST = 12


def history(rng: random.Random, device: str, graphs: bool) -> None:
    """Requests that come and go; each gets the tokens of decoding without an engine."""
    *kinds, distinct = rng.choice(MODELS)
    model = tiny_model(*kinds, device=device, distinct=distinct)
    prompts = make_prompts(LENGTHS)
    want = [decode(model, prompt, MOST) for prompt in prompts]
    block_size = rng.choice([1, 2, 4, 16])
    llm = tree_llm(
        model,
        rng.choice(DRAFTS),
        block_size=block_size,
        num_blocks=rng.choice([-(-70 // block_size), 400]),
        max_num_seqs=rng.choice([1, 3, 5]),
        max_num_batched_tokens=rng.choice([26, 64]),
        max_mixed_tokens=rng.choice([0, 12]),
        state_rollback=rng.choice(["replay", "snapshot"]),
        async_scheduling=rng.random() < 0.5,
        enforce_eager=not graphs,
    )
    engine, config = llm.engine, llm.engine.config
    assert (engine.executor.graphs is not None) == graphs
    behind = engine.executor.drafter.earlier[0]
    if config.num_speculative_tokens and not graphs:
        watched(llm, [prompt + tokens for prompt, tokens in zip(prompts, want, strict=True)])
    if rng.random() < 0.4 and not config.draft_sampling:  # as with "auto"
        shapes = [*range(config.num_speculative_tokens + 1), *([config.tree] * 3 if config.tree else [])]
        turns = itertools.cycle(rng.choices(shapes, k=9))
        engine.speculation.choose = lambda rows: next(turns)
    live = [(str(index), index) for index in rng.sample(range(len(prompts)), 5)]
    expected: dict[str, int] = {}
    while live or engine.has_unfinished:
        if live and (not engine.has_unfinished or rng.random() < 0.4):
            name, index = live.pop()
            expected[name] = index
            engine.add_request(prompts[index], greedy(MOST), name)
        if rng.random() < 0.02 and expected:
            engine.abort(dropped := rng.choice([*expected]))
            del expected[dropped]
        if not engine.has_unfinished:
            continue
        poison(engine, behind)
        for output in engine.step():
            if output.finished:
                assert output.error is None
                assert output.outputs[0].token_ids == want[expected.pop(output.request_id)]
        engine.scheduler.check_integrity()


@pytest.mark.parametrize("seed", range(12))
def test_eagerly(seed):
    history(random.Random(seed), "cpu", graphs=False)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", range(100, 106))
def test_in_graphs(seed, device, monkeypatch):
    """With null rows; on a CPU steps are run again where a GPU replays them."""
    if device == "cpu":
        replay_on_cpu(monkeypatch)
    history(random.Random(seed), device, graphs=True)
