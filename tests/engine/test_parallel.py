"""Several outputs of one prompt: the prompt is computed once, each output is that of a request of
its own, and any of them may wait, be preempted, end or be dropped."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mtpkit import SamplingParams
from mtpkit.engine import AsyncLLM, RequestOutputKind
from mtpkit.errors import UserError
from mtpkit.model import build_model
from tests.engine.fakes import HashModel, fake_engine
from tests.engine.prefix import fuzz
from tests.engine.rank_cases import config, split_model
from tests.engine.tiny import VOCAB_SIZE, make_llm, make_prompts, tiny_model
from tests.engine.tokenizers import byte_level
from tests.ranks import run_ranks

MODEL = HashModel()
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 3, 5]
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CACHED = dict(enable_prefix_caching=True, num_checkpoints=8)


def cached_engine(k: int = 3, **settings):
    return fake_engine(MODEL, num_speculative_tokens=k, **CACHED | settings)


def tokens_of(params: SamplingParams, prompt=PROMPT) -> list[list[int]]:
    """What a request of its own would get for each output."""
    seeds = [(params.seed or 0) + index for index in range(params.n)]
    return [MODEL.decode(prompt, replace(params, n=1, seed=seed)) for seed in seeds]


def decoded(engine) -> dict[str, list[list[int]]]:
    """The tokens of all outputs of each prompt; what nobody holds is forgotten after each step."""
    found: dict[str, dict[int, list[int]]] = {}
    scheduler = engine.scheduler
    while engine.has_unfinished:
        for output in engine.step():
            for one in output.outputs:
                found.setdefault(output.request_id, {})[one.index] = one.token_ids
        scheduler.check_integrity()
        engine.executor.runner.forget(scheduler.blocks.free_ids, scheduler.slots.free_ids)
    assert scheduler.blocks.num_free == scheduler.blocks.size
    return {name: [some[index] for index in sorted(some)] for name, some in found.items()}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("budget", [8, 100])
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("k", [0, 3])
def test_the_prompt_is_computed_once(k, batches, budget, ahead):
    """By the first output, in one step or in several; the others wait that long."""
    engine = cached_engine(
        k, max_num_batched_tokens=budget, async_scheduling=ahead, num_batches=batches
    )
    params = replace(SAMPLED, n=4)
    engine.add_request(PROMPT, params, "a")
    assert decoded(engine) == {"a": tokens_of(params)}
    stats = engine.stats()
    assert stats.prefilled_tokens == len(PROMPT)
    assert (stats.prompt_tokens, stats.cached_tokens) == (4 * len(PROMPT), 3 * len(PROMPT))


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("settings", [{"enable_prefix_caching": False}, {"num_checkpoints": 0}])
def test_without_a_cache_each_output_computes_it(k, settings):
    engine = cached_engine(k, **settings)
    params = replace(SAMPLED, n=4)
    engine.add_request(PROMPT, params, "a")
    assert decoded(engine) == {"a": tokens_of(params)}
    assert engine.stats().prefilled_tokens == 4 * len(PROMPT)


def test_others_do_not_wait_for_siblings():
    """All prompts begin in the first step, and nobody computes one of them again."""
    engine = cached_engine(max_num_seqs=6, max_num_batched_tokens=100)
    prompts = {name: [*PROMPT, place] for place, name in enumerate("abc")}
    params = replace(SAMPLED, n=2)
    for name, prompt in prompts.items():
        engine.add_request(prompt, params, name)
    engine.step()
    assert [request.index for request in engine.scheduler.running] == [0, 0, 0]
    engine.step()
    assert len(engine.scheduler.running) == 6
    assert decoded(engine) == {name: tokens_of(params, prompt) for name, prompt in prompts.items()}
    assert engine.stats().prefilled_tokens <= 3 * len(prompts["a"])


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("blocks", [9, 10])
def test_an_output_is_preempted_alone(k, blocks):
    engine = cached_engine(k, num_blocks=blocks, async_scheduling=True)
    params = replace(SAMPLED, n=3)
    engine.add_request(PROMPT, params, "a")
    assert decoded(engine) == {"a": tokens_of(params)}
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_all_outputs_end_with_an_abort(steps):
    """Before the prompt is computed, meanwhile, and after; the others are not affected."""
    engine = cached_engine(max_num_batched_tokens=8, async_scheduling=True)
    engine.add_request(PROMPT, replace(SAMPLED, n=3), "a")
    for _ in range(steps):
        engine.step()
    engine.add_request([7, 7], GREEDY, "b")
    engine.abort("a")
    found = decoded(engine)
    assert found == {"b": [MODEL.decode([7, 7], GREEDY)]}
    engine.add_request([4], replace(GREEDY, n=2), "a")
    assert decoded(engine) == {"a": [MODEL.decode([4], GREEDY)] * 2}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_an_output_is_aborted_alone(steps, k, ahead):
    """Whether it waits, computes the prompt or decodes: it keeps its tokens, and the others have
    all of theirs, in blocks that are too few for them at once."""
    engine = cached_engine(k, max_num_batched_tokens=8, num_blocks=10, async_scheduling=ahead)
    params = replace(SAMPLED, n=3)
    whole = tokens_of(params)
    for index in range(3):
        engine.add_request(PROMPT, params, "a")
        for _ in range(steps):
            engine.step()
        engine.abort("a", index)
        engine.abort("a", 3)
        engine.abort("b", 0)
        found = {}
        while engine.has_unfinished:
            outputs = engine.step()
            found |= {one.index: one for output in outputs for one in output.outputs}
            engine.scheduler.check_integrity()
        assert outputs[-1].finished
        reasons = [found[place].finish_reason for place in range(3)]
        assert reasons == ["abort" if place == index else "length" for place in range(3)]
        aborted = found.pop(index).token_ids
        assert aborted == whole[index][: len(aborted)] and len(aborted) < len(whole[index])
        assert [one.token_ids for _, one in sorted(found.items())] == [
            tokens for place, tokens in enumerate(whole) if place != index
        ]
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.size


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_outputs_that_are_aborted_one_after_another(kind):
    """The last one ends the request, although nothing is left to decode; its id is free then."""
    engine = cached_engine(async_scheduling=True)
    params = replace(SAMPLED, n=2, output_kind=kind)
    engine.add_request(PROMPT, params, "a")
    for _ in range(3):
        engine.step()
    engine.abort("a", 1)
    outputs = engine.step()
    told = [one.index for output in outputs for one in output.outputs if one.finish_reason]
    assert told == ([] if kind == RequestOutputKind.FINAL_ONLY else [1])
    engine.abort("a", 0)
    (output,) = engine.step()
    assert output.finished and not engine.has_unfinished
    ends = {one.index: one.finish_reason for one in output.outputs}
    assert ends == ({0: "abort", 1: "abort"} if not told else {0: "abort"})
    engine.add_request([4], replace(GREEDY, n=2), "a")
    engine.abort("a", 0)
    engine.abort("a")
    assert not engine.has_unfinished


def test_outputs_that_end_at_once_let_the_others_begin():
    engine = cached_engine(max_num_seqs=2, async_scheduling=True)
    params = replace(SAMPLED, n=2, max_tokens=1)
    for name in "abcd":
        engine.add_request(PROMPT, params, name)
    assert decoded(engine) == dict.fromkeys("abcd", tokens_of(params))


class Siblings(fuzz.History):
    """Random histories in which prompts have one to four outputs, of which some are aborted."""

    alone = 0
    """Outputs that were aborted alone."""

    def num_outputs(self) -> int:
        return self.rng.randint(1, self.engine.config.max_num_seqs)

    def abort(self) -> None:
        if self.live and self.rng.random() < 0.7:
            name, (_, params) = self.rng.choice([*self.live.items()])
            self.engine.abort(name, self.rng.randrange(params.n))
            self.alone += 1
        else:
            super().abort()

    def counts(self) -> Counter[str]:
        return super().counts() + Counter({"aborted alone": self.alone})


@pytest.mark.parametrize("seed", range(12))
def test_random_histories(seed):
    """Preemptions, aborts of prompts and of single outputs, evicted checkpoints and blocks, several
    batches, trees: each output is that of a request of its own, and nothing leaks."""
    counts = fuzz.run(500, f"siblings {seed}", Siblings)
    assert counts["requests"] > 20 and counts["aborted alone"] > 3


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("heads", [("repeated", "*-"), ("distinct", "M-")])
def test_outputs_of_a_model_are_those_of_single_requests(heads, k, cached, device):
    """Also where the heads have recurrent states, which need the token after the checkpoint, and in
    the graphs of a GPU."""
    model = tiny_model(heads[0], mtp_pattern=heads[1], device=device)
    alone = make_llm(model, k)
    llm = make_llm(model, k, enable_prefix_caching=cached)
    prompts = make_prompts((5, 17, 1))
    params = replace(SAMPLED, n=4)
    outputs = llm.generate(prompts, params)
    again = llm.generate(prompts, params)
    for prompt, output, second in zip(prompts, outputs, again, strict=True):
        assert [one.index for one in output.outputs] == list(range(4))
        singles = alone.generate(
            [prompt] * 4, [replace(SAMPLED, seed=5 + index) for index in range(4)]
        )
        tokens = [one.token_ids for one in output.outputs]
        assert tokens == [one.outputs[0].token_ids for one in singles]
        assert tokens == [one.token_ids for one in second.outputs]
        assert len(set(map(tuple, tokens))) > 1
        assert output.stats.steps == sum(one.stats.steps for one in singles)
        assert output.num_cached_tokens == 0 and output.finished
    greedy = llm.generate(prompts, replace(GREEDY, n=4))
    assert all(len({tuple(one.token_ids) for one in output.outputs}) == 1 for output in greedy)


def test_only_the_end_of_a_prompt_is_computed_again_for_heads_with_states():
    llm = make_llm(tiny_model("distinct", mtp_pattern="M-"), 3, enable_prefix_caching=True)
    prompt = make_prompts((17,))[0]
    llm.generate(prompt, replace(SAMPLED, n=4))
    assert llm.engine.scheduler.prefix.successors
    assert llm.stats().prefilled_tokens == len(prompt) + 3


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_log_probabilities_are_those_of_single_requests(kind):
    """Those of the prompt, which the first output computes, come once for all."""
    llm = make_llm(tiny_model(), 3, enable_prefix_caching=True)
    params = replace(SAMPLED, n=3, logprobs=1, prompt_logprobs=1, output_kind=kind)
    prompt = make_prompts((17,))[0]
    outputs = list(llm.stream(prompt, params))
    found = [output.prompt_logprobs for output in outputs if output.prompt_logprobs]
    assert llm.stats().prefilled_tokens == len(prompt)
    for index in range(3):
        single = replace(params, n=1, seed=5 + index, output_kind=RequestOutputKind.CUMULATIVE)
        (alone,) = make_llm(tiny_model(), 3).generate(prompt, single)
        pieces = parts(outputs)[index]
        if kind == RequestOutputKind.DELTA:
            log_probs = [one for piece in pieces for one in piece.logprobs]
        else:
            log_probs = pieces[-1].logprobs
        assert close(log_probs, alone.outputs[0].logprobs)
        assert pieces[-1].cumulative_logprob == pytest.approx(
            alone.outputs[0].cumulative_logprob, abs=1e-4
        )
        assert all(close(one, alone.prompt_logprobs) for one in found) and found
    assert len(found) == 1 or kind == RequestOutputKind.CUMULATIVE


def close(some, others) -> bool:
    """Whether two lists of log-probabilities are the same but for rounding."""
    values = [
        [[(token, one.logprob) for token, one in (entry or {}).items()] for entry in entries]
        for entries in (some, others)
    ]
    flat = [[pair for entry in entries for pair in entry] for entries in values]
    return len(flat[0]) == len(flat[1]) and all(
        token == other and value == pytest.approx(known, abs=1e-4)
        for (token, value), (other, known) in zip(*flat, strict=True)
    )


def parts(outputs) -> list[list]:
    """The pieces of each output of one prompt."""
    found: dict[int, list] = {}
    for output in outputs:
        assert [one.index for one in output.outputs] == sorted(one.index for one in output.outputs)
        for one in output.outputs:
            found.setdefault(one.index, []).append(one)
    return [found[index] for index in range(len(found))]


@pytest.mark.parametrize("k", [0, 3])
def test_streams_hold_the_outputs_with_something_new(k):
    llm = make_llm(tiny_model(), k, enable_prefix_caching=True, tokenizer=byte_level())
    params = replace(SAMPLED, n=3, max_tokens=30)
    prompt = make_prompts((9,))[0]
    whole = llm.generate(prompt, params)[0]
    texts = [one.text for one in whole.outputs]

    streamed = list(llm.stream(prompt, replace(params, output_kind=RequestOutputKind.DELTA)))
    assert [output.finished for output in streamed] == [False] * (len(streamed) - 1) + [True]
    for pieces, one in zip(parts(streamed), whole.outputs, strict=True):
        assert [token for piece in pieces for token in piece.token_ids] == one.token_ids
        assert "".join(piece.text for piece in pieces) == one.text
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == "length"

    streamed = list(llm.stream(prompt, params))
    assert [pieces[-1] for pieces in parts(streamed)] == whole.outputs
    assert [pieces[-1].text for pieces in parts(streamed)] == texts

    streamed = list(llm.stream(prompt, replace(params, output_kind=RequestOutputKind.FINAL_ONLY)))
    assert [output.outputs for output in streamed] == [whole.outputs]


def test_outputs_may_end_at_different_times():
    llm = make_llm(tiny_model(), 2, enable_prefix_caching=True)
    stops = list(range(0, VOCAB_SIZE, 6))
    params = replace(SAMPLED, n=4, max_tokens=40, stop_token_ids=stops)
    streamed = list(llm.stream(make_prompts((9,))[0], params))
    lengths = {len(pieces[-1].token_ids) for pieces in parts(streamed)}
    assert len(lengths) > 1
    assert not any(output.finished for output in streamed[:-1]) and streamed[-1].finished
    ends = [one for output in streamed for one in output.outputs if one.finish_reason]
    assert sorted(one.index for one in ends) == [0, 1, 2, 3]


def test_an_asynchronous_engine_returns_the_same():
    llm = make_llm(tiny_model(), 2, enable_prefix_caching=True, tokenizer=byte_level())
    params = replace(SAMPLED, n=3, max_tokens=30)
    prompt = make_prompts((9,))[0]
    whole = llm.generate(prompt, params)[0].outputs
    small = dict(num_blocks=60, block_size=8, max_num_seqs=4, warm_up=False)

    async def check() -> None:
        async with AsyncLLM(tiny_model(), 2, **small, tokenizer=byte_level()) as engine:
            for kind in RequestOutputKind:
                asked = replace(params, output_kind=kind)
                outputs = [output async for output in engine.generate(prompt, asked)]
                assert outputs[-1].finished and outputs[-1].stats.steps > 0
                pieces = parts(outputs)
                if kind == RequestOutputKind.DELTA:
                    tokens = [[i for one in some for i in one.token_ids] for some in pieces]
                    assert tokens == [one.token_ids for one in whole]
                else:
                    assert [some[-1] for some in pieces] == whole
                assert kind != RequestOutputKind.FINAL_ONLY or len(outputs) == 1

            stream = engine.generate(prompt, replace(params, max_tokens=110), "mine")
            await anext(stream)
            await engine.abort("mine")
            outputs = [output async for output in stream]
            ends = [one.finish_reason for one in outputs[-1].outputs]
            assert ends == ["abort"] * 3 and all(one.token_ids for one in outputs[-1].outputs)

            stream = engine.generate(prompt, replace(params, max_tokens=110), "mine")
            await anext(stream)
            await engine.abort("mine", 1)
            outputs = [output async for output in stream]
            assert outputs[-1].finished
            assert [some[-1].finish_reason for some in parts(outputs)] == [
                "length",
                "abort",
                "length",
            ]

            # The engine does not know it yet.
            stream = engine.generate(prompt, replace(params, max_tokens=110), "mine")
            first = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            await engine.abort("mine", 1)
            await first
            outputs = [output async for output in stream]
            assert len(outputs[-1].outputs) < 3 and outputs[-1].finished
            ended = {one.index: one for output in outputs for one in output.outputs}
            assert len(ended[0].token_ids) == len(ended[2].token_ids) == 110
            assert 1 not in ended or len(ended[1].token_ids) < 20

            with pytest.raises(UserError, match="n is 5, but at most 4 requests run at once"):
                await anext(engine.generate(prompt, replace(params, n=5)))

    asyncio.run(check())


def on_ranks(rank: int, path: str, ranks: int, stages: int) -> None:
    llm = make_llm(split_model(config("mamba2"), ranks=ranks, stages=stages), 2, **SPLIT)
    outputs = llm.generate(make_prompts((9, 5)), replace(SAMPLED, n=3))
    tokens = [[one.token_ids for one in output.outputs] for output in outputs]
    Path(path, f"{rank}.json").write_text(json.dumps([tokens, llm.stats().prefilled_tokens]))


SPLIT = dict(enable_prefix_caching=True, num_blocks=60)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (1, 2)])
def test_ranks_that_split_a_model_hold_siblings_back_alike(ranks, stages, tmp_path):
    llm = make_llm(build_model(config("mamba2"), device="cpu", seed=1), 2, **SPLIT)
    want = llm.generate(make_prompts((9, 5)), replace(SAMPLED, n=3))
    run_ranks(on_ranks, str(tmp_path), ranks, stages)
    for rank in range(2):
        tokens, prefilled = json.loads((tmp_path / f"{rank}.json").read_text())
        assert tokens == [[one.token_ids for one in output.outputs] for output in want]
        assert prefilled == 14


def test_more_outputs_than_slots_are_refused_and_so_is_a_prompt_as_one():
    llm = make_llm(tiny_model(), 2, max_num_seqs=3)
    with pytest.raises(UserError, match="the prompt: n is 4, but at most 3 requests run at once"):
        llm.generate([1, 2], replace(SAMPLED, n=4))
    refused, served = llm.generate([[VOCAB_SIZE], [1]], replace(SAMPLED, n=3))
    assert refused.error and len(refused.outputs) == 1 and refused.finished
    assert len(served.outputs) == 3 and served.error is None
    for n in (0, -1, 1.0, True, None):
        with pytest.raises(UserError, match="n is"):
            SamplingParams(n=n)
