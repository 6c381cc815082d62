"""The asynchronous engine: in a thread, in a process and in several; requests that come and go at
any time, and engines that die."""

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from mtpkit import SamplingParams
from mtpkit.checkpoint import save_hf_model
from mtpkit.engine import (
    LLM,
    AsyncLLM,
    EngineDead,
    LLMOptions,
    RequestOutputKind,
    StructuredOutputsParams,
    async_llm,
)
from mtpkit.engine.async_llm import _ABORTED, _Stream
from mtpkit.engine.requests.request import CompletionOutput, PromptError
from mtpkit.engine.worker import Progress
from mtpkit.errors import UserError
from mtpkit.model import build_model
from tests.engine.rank_cases import config
from tests.engine.tiny import make_prompts, tiny_config, tiny_model
from tests.engine.tokenizers import byte_level
from tests.ranks import preload, run_ranks

PROMPTS = make_prompts((5, 9, 1, 17, 3, 8, 2, 6))
SMALL = dict(num_blocks=60, block_size=8, max_num_seqs=4, warm_up=False)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
WANTED = StructuredOutputsParams(regex="[a-z]{1,9}")


def params_of(index: int, **settings) -> SamplingParams:
    """Greedy or drawn, short or long."""
    drawn = dict(temperature=1.0, seed=index) if index % 2 else dict(temperature=0)
    return SamplingParams(max_tokens=4 + 6 * index, ignore_eos=True, **drawn, **settings)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    preload("mtpkit.engine.processes")
    path = tmp_path_factory.mktemp("model")
    save_hf_model(build_model(config("mamba2"), device="cpu", seed=1), path)
    return path


def in_thread(k: int = 2, **settings) -> AsyncLLM:
    """An engine in a thread of this process."""
    return AsyncLLM(tiny_model(), k, **SMALL | {"tokenizer": byte_level()} | settings)


def nothing_left(llm: LLM) -> bool:
    """Whether an engine holds no request, no block and no slot, and its parts agree on that."""
    scheduler = llm.engine.scheduler
    scheduler.check_integrity()
    free = [pool.num_free == pool.size for pool in (scheduler.blocks, scheduler.slots)]
    return not scheduler.has_unfinished and all(free)


async def all_clear(llm: AsyncLLM) -> None:
    """Wait until the engine holds nothing."""
    for _ in range(200):
        if all(await llm._ask(nothing_left)):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the engine still holds something")


async def last(stream):
    """The last output, which all others lead to."""
    async for output in stream:
        found = output
    return found


async def pieces(stream) -> list:
    return [output async for output in stream]


async def together(llm: AsyncLLM, **settings) -> list:
    """The last outputs of all prompts, decoded at once."""
    streams = [
        llm.generate({"prompt_token_ids": prompt}, params_of(index, **settings))
        for index, prompt in enumerate(PROMPTS)
    ]
    return await asyncio.gather(*map(last, streams))


def test_outputs_are_those_of_an_llm_whatever_the_kind():
    want = LLM(tiny_model(), 2, **SMALL, tokenizer=byte_level()).generate(
        PROMPTS, [params_of(index) for index in range(len(PROMPTS))]
    )

    async def decode() -> None:
        async with in_thread() as llm:
            for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY):
                outputs = await together(llm, output_kind=kind)
                assert [one.outputs for one in outputs] == [one.outputs for one in want]
                assert [one.prompt_token_ids for one in outputs] == PROMPTS
                assert [one.stats.accepted for one in outputs] == [
                    one.stats.accepted for one in want
                ]
                assert all(one.finished and one.metrics.finished_time for one in outputs)
            for index, prompt in enumerate(PROMPTS):
                delta = params_of(index, output_kind=RequestOutputKind.DELTA)
                parts = [one.outputs[0] for one in await pieces(llm.generate(prompt, delta))]
                tokens = [token for part in parts for token in part.token_ids]
                assert tokens == want[index].outputs[0].token_ids
                assert "".join(part.text for part in parts) == want[index].outputs[0].text
            await all_clear(llm)

    asyncio.run(decode())


@pytest.mark.parametrize("count", [1, 2])
def test_processes_decode_what_one_engine_does(model_dir, count):
    options = LLMOptions(model_dir, 2, **SMALL)
    want = LLM(**vars(options)).generate(
        PROMPTS, [params_of(index) for index in range(len(PROMPTS))]
    )

    async def decode() -> None:
        async with AsyncLLM.with_replicas(options, count) as llm:
            outputs = await together(llm)
            assert [one.outputs for one in outputs] == [one.outputs for one in want]
            totals = [one.generated_tokens for one in await llm._ask(LLM.stats)]
            assert len(totals) == count and all(totals)
            tokens = sum(len(one.outputs[0].token_ids) for one in want)
            assert (await llm.stats()).generated_tokens == sum(totals) == tokens
            assert await llm.reset_prefix_cache() is True
            await llm.reset_stats()
            assert (await llm.stats()).generated_tokens == 0
            await all_clear(llm)
        assert not llm.is_running and llm.errored

    asyncio.run(decode())


def test_a_slow_reader_gets_all_in_fewer_outputs():
    async def decode() -> None:
        async with in_thread() as llm:
            quick = params_of(7, output_kind=RequestOutputKind.DELTA)
            want = await pieces(llm.generate(PROMPTS[0], quick))
            stream = llm.generate(PROMPTS[0], quick)
            slow = [await anext(stream)]
            while (await llm._ask(nothing_left)) == [False]:
                await asyncio.sleep(0.01)
            slow += [output async for output in stream]
            assert 2 <= len(slow) < len(want)
            joined = [
                (
                    [token for one in outputs for token in one.outputs[0].token_ids],
                    "".join(one.outputs[0].text for one in outputs),
                    outputs[-1].outputs[0].finish_reason,
                )
                for outputs in (slow, want)
            ]
            assert joined[0] == joined[1]

    asyncio.run(decode())


def test_requests_dropped_at_any_time_leave_nothing_behind():
    """While their prompt is encoded, while they wait, in prefill, in decoding, at their end; closed
    or cancelled."""
    rng = random.Random(3)

    async def drop(llm: AsyncLLM, index: int) -> None:
        prompt = PROMPTS[index % len(PROMPTS)] * rng.choice((1, 3))
        reads = rng.choice((0, 0, 1, 2, 5))
        stream = llm.generate(prompt, replace(LONG, max_tokens=rng.choice((1, 3, 60))))
        await asyncio.sleep(rng.random() / 20)
        task = asyncio.ensure_future(anext(stream))
        if not reads:
            await asyncio.sleep(rng.random() / 50)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await stream.aclose()
            return
        await task
        async with aclosing(stream):
            async for _ in stream:
                reads -= 1
                if not reads:
                    return

    async def drop_all() -> None:
        async with in_thread() as llm:
            kept = asyncio.ensure_future(together(llm))
            await asyncio.gather(*(drop(llm, index) for index in range(120)))
            await kept
            await all_clear(llm)
            assert llm._streams == {}
            # Whatever was dropped, outputs are as before.
            again = await together(llm)
            assert [one.outputs for one in again] == [one.outputs for one in kept.result()]

    asyncio.run(drop_all())


def test_a_dropped_request_is_not_decoded_on():
    async def drop() -> None:
        async with in_thread() as llm:
            stream = llm.generate(PROMPTS[0], LONG)
            await anext(stream)
            await stream.aclose()
            await all_clear(llm)
            # It could have 123.
            assert (await llm.stats()).generated_tokens < 60

    asyncio.run(drop())


def test_nothing_follows_an_abort():
    """Results of steps that ran when the abort came."""
    more = Progress("1", [CompletionOutput([3], "3")], False, 0, None, None, None)

    async def abort() -> None:
        stream = _Stream("1", 0, asyncio.get_running_loop())
        for told in (more, _ABORTED, more, more._replace(finished=True)):
            stream.put(told)
        assert await stream.next() == _ABORTED._replace(
            completions=more.completions, num_cached_tokens=0
        )
        assert not stream.ended, "the engine must be told"

    asyncio.run(abort())


def test_an_aborted_request_ends_with_what_it_has():
    async def abort() -> None:
        async with in_thread() as llm:
            stream = llm.generate(PROMPTS[0], LONG, "mine")
            first = await anext(stream)
            other = asyncio.ensure_future(last(llm.generate(PROMPTS[1], params_of(1), "other")))
            await llm.abort(["mine", "unknown"])
            outputs = await pieces(stream)
            assert outputs[-1].finished and outputs[-1].request_id == "mine"
            completion = outputs[-1].outputs[0]
            assert completion.finish_reason == "abort"
            assert completion.token_ids[: len(first.outputs[0].token_ids)] == (
                first.outputs[0].token_ids
            )
            assert (await other).outputs[0].finish_reason == "length"
            # The id is free again; an abort may come before the prompt is encoded.
            waiting = asyncio.ensure_future(pieces(llm.generate(PROMPTS[0], LONG, "mine")))
            await asyncio.sleep(0)
            await llm.abort("mine")
            assert (await waiting)[-1].outputs[0].finish_reason == "abort"
            await all_clear(llm)

    asyncio.run(abort())


def test_requests_that_cannot_be_served_raise_and_cost_the_others_nothing():
    async def refuse() -> None:
        async with in_thread(max_model_len=100) as llm:
            kept = asyncio.ensure_future(together(llm))
            with pytest.raises(PromptError, match="request long: 100 prompt tokens leave no room"):
                await last(llm.generate([1] * 100, LONG, "long"))
            with pytest.raises(PromptError, match=r"mine: tokens .* are outside the vocabulary"):
                await last(llm.generate({"prompt_token_ids": [10**6], "name": "mine"}, LONG))
            with pytest.raises(UserError, match="sampling_params is 3: give SamplingParams"):
                await last(llm.generate([1], 3))
            stream = llm.generate([1], LONG, "twice")
            await anext(stream)
            with pytest.raises(UserError, match="request twice: an unfinished request has this id"):
                await last(llm.generate([1], LONG, "twice"))
            await stream.aclose()
            assert len(await kept) == len(PROMPTS)
            await all_clear(llm)

    asyncio.run(refuse())


def test_texts_are_encoded_and_there_may_be_no_tokenizer():
    async def decode() -> None:
        async with in_thread() as llm:
            output = await last(llm.generate("12 34", params_of(1)))
            assert output.prompt == "12 34"
            assert output.prompt_token_ids == (await llm.get_tokenizer()).encode("12 34")
        async with in_thread(tokenizer=None) as llm:
            with pytest.raises(UserError, match="is a text, which needs a tokenizer"):
                await last(llm.generate("12 34", params_of(1)))
            assert await llm.get_tokenizer() is None

    asyncio.run(decode())


@pytest.mark.parametrize("slow", ["prompt", "grammar"])
def test_what_takes_long_before_decoding_holds_up_no_other_stream(slow, monkeypatch):
    """A long text that is encoded, or a large grammar that is checked. New prompts wait for the
    first, since a tokenizer serves one thread at a time, but not for the second."""
    blocked = threading.Event()
    gate = threading.Event()

    def slowly[**P, R](function: Callable[P, R]) -> Callable[P, R]:
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if args[0] in ("long", WANTED):
                blocked.set()
                gate.wait(60)
            return function(*args, **kwargs)

        return call

    async def decode() -> None:
        async with AsyncLLM(model, 2, **SMALL, tokenizer=byte_level()) as llm:
            monkeypatch.setattr(llm.tokenizer, "encode", slowly(llm.tokenizer.encode))
            running = llm.generate(PROMPTS[0], LONG)
            await anext(running)
            params = params_of(1, structured_outputs=WANTED if slow == "grammar" else None)
            late = asyncio.ensure_future(last(llm.generate("long", params)))
            await asyncio.to_thread(blocked.wait, 60)
            assert (await last(running)).finished
            if slow == "grammar":
                assert (await last(llm.generate("12", params_of(2)))).finished
            assert not late.done()
            gate.set()
            assert (await late).finished

    if slow == "grammar":
        monkeypatch.setattr(async_llm, "grammar_of", slowly(async_llm.grammar_of))
    model = build_model(tiny_config().replace(vocab_size=300), device="cpu", seed=1)
    try:
        asyncio.run(decode())
    finally:
        gate.set()


def test_one_engine_serves_one_event_loop_after_the_other():
    llm = in_thread()
    try:
        first = asyncio.run(last(llm.generate(PROMPTS[0], params_of(3))))

        async def leave() -> None:
            await anext(llm.generate(PROMPTS[1], LONG))

        asyncio.run(leave())
        again = asyncio.run(last(llm.generate(PROMPTS[0], params_of(3))))
        assert again.outputs == first.outputs
        asyncio.run(all_clear(llm))
    finally:
        llm.shutdown()


def test_a_killed_process_ends_every_stream_with_an_error(model_dir):
    async def kill() -> None:
        async with AsyncLLM.with_replicas(LLMOptions(model_dir, 2, **SMALL), 2) as llm:
            streams = [llm.generate(prompt, LONG) for prompt in PROMPTS]
            for stream in streams:
                await anext(stream)
            await llm.check_health()
            processes = list(llm._engines._processes)
            began = time.monotonic()
            os.kill(processes[1].pid, signal.SIGKILL)
            results = await asyncio.gather(*map(pieces, streams), return_exceptions=True)
            said = r"replica 1 \(process \d+\) has died by signal 9"
            for result in results:
                with pytest.raises(EngineDead, match=said):
                    raise result
            with pytest.raises(EngineDead, match=said):
                await llm.check_health()
            with pytest.raises(EngineDead, match=said):
                await last(llm.generate(PROMPTS[0], LONG))
            with pytest.raises(EngineDead, match=said):
                await llm.stats()
            assert llm.errored and not llm.is_running and str(llm.dead_error)
            assert time.monotonic() - began < 10
        # The other one ends too.
        assert all(process.exitcode is not None for process in processes)

    asyncio.run(kill())


def test_an_engine_that_fails_in_a_thread_says_why(monkeypatch, capsys):
    async def fail() -> None:
        async with in_thread() as llm:
            stream = llm.generate(PROMPTS[0], LONG)
            await anext(stream)
            monkeypatch.setattr(llm._engines.llm.engine, "step", lambda: 1 / 0)
            with pytest.raises(EngineDead, match="the engine failed: ZeroDivisionError"):
                await pieces(stream)

    asyncio.run(fail())
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("processes", [False, True])
def test_shutting_down_ends_what_runs(model_dir, processes):
    async def shut() -> None:
        llm = AsyncLLM(model_dir, 2, **SMALL) if processes else in_thread()
        stream = llm.generate(PROMPTS[0], LONG)
        await anext(stream)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineDead, match="the engine was shut down"):
            await pieces(stream)
        llm.shutdown()
        with pytest.raises(EngineDead, match="the engine was shut down"):
            await last(llm.generate(PROMPTS[0], LONG))

    asyncio.run(shut())


def ranks_decode(rank: int, model_dir: str, path: str, sizes: dict[str, int]) -> None:
    """Requests come to rank 0 at random times, some are dropped, and the engine is idle between;
    the other rank decodes along."""
    llm = AsyncLLM(model_dir, 2, **SMALL, **sizes)
    if rank:
        with pytest.raises(UserError, match="only rank 0 takes requests"):
            asyncio.run(last(llm.generate([1], LONG)))
        llm.wait()
        return

    async def serve() -> None:
        async with llm:
            first = await together(llm)
            dropped = llm.generate(PROMPTS[0], LONG)
            await anext(dropped)
            kept = asyncio.ensure_future(together(llm))
            await dropped.aclose()
            with pytest.raises(PromptError, match="outside the vocabulary"):
                await last(llm.generate([10**6], LONG))
            second = await kept
            await all_clear(llm)
            assert await llm.reset_prefix_cache()
            await asyncio.sleep(0.3)
            third = await together(llm)
        tokens = [
            [one.outputs[0].token_ids for one in outputs] for outputs in (first, second, third)
        ]
        Path(path).write_text(json.dumps(tokens))

    asyncio.run(serve())


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks_decode_along(model_dir, tmp_path, sizes):
    want = LLM(model_dir, 2, **SMALL).generate(
        PROMPTS, [params_of(index) for index in range(len(PROMPTS))]
    )
    path = tmp_path / "tokens.json"
    run_ranks(ranks_decode, str(model_dir), str(path), sizes)
    assert json.loads(path.read_text()) == [[one.outputs[0].token_ids for one in want]] * 3
