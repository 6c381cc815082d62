"""Measure vLLM under the load of `mtpkit bench load --workload long-agent`: sessions that each have
a long prefix in the prefix cache and one request under way.

Needs vLLM, a GPU, and a config directory from write_config.py. Weights are random, and so are all
tokens; acceptance is synthetic. mtpkit is not needed. A session's first request is not counted.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from peer import fail, percentiles_ms, print_rows, require, vllm_arguments

_SEVEN = (1.0, 1.0, 0.687, 0.0, 0.0, 0.0, 0.0)
_RATES = (0.7825, 0.7825, 0.7825, 0.6797, 0.6797, 0.7049, 0.7049)
"""The rates of `mtpkit bench load --workload long-agent` for seven drafts, and for other numbers of
drafts."""


@dataclass(frozen=True)
class Row:
    """All sessions."""

    sessions: int
    k: int
    start_seconds: float
    tokens_per_s: float
    """Output tokens of the counted requests, from the arrival of the first to the end of the
    last."""
    user_tokens_per_s: float
    ttft_ms: list[float] | None
    """p50 and p99 of the counted requests."""
    itl_ms: list[float] | None
    cached_share: float | None
    """Share of the counted prompts' tokens that the cache had; None: vLLM does not say."""
    seconds: float


@dataclass(frozen=True)
class Load:
    """The lengths of a session's requests, in tokens."""

    prefix_length: int
    fresh_length: int
    output_length: int
    session_requests: int
    vocab_size: int

    @property
    def longest(self) -> int:
        """Tokens of a request with its output."""
        return self.prefix_length + self.fresh_length + self.output_length


@dataclass(frozen=True)
class Request:
    """What a client saw of one request."""

    arrival: float
    times: list[float]
    """Time of each output."""
    tokens: int
    cached: int | None


def main(
    model: Annotated[Path, typer.Option(help="Config directory from write_config.py.")],
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Sessions at once; repeat for several. By default 1 4 12 16 20 32."
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option(min=0, max=7, help="K, drafts per step.")
    ] = 0,
    prefix_length: Annotated[int, typer.Option(min=1, help="Tokens of a prefix.")] = 58982,
    fresh_length: Annotated[int, typer.Option(min=1, help="New tokens of a prompt.")] = 6554,
    output_length: Annotated[int, typer.Option(min=2, help="Tokens of an output.")] = 400,
    session_requests: Annotated[int, typer.Option(min=2, help="Requests of a session.")] = 5,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a step.")
    ] = 8192,
    quantization: Annotated[
        str | None, typer.Option(help="vLLM's argument of this name, such as fp8.")
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(min=1, help="Tokens that prompts are drawn from.")
    ] = 131072,
) -> None:
    """Serve every number of sessions with one engine, and print one JSON object as the last
    line."""
    sizes = concurrency or [1, 4, 12, 16, 20, 32]
    load = Load(prefix_length, fresh_length, output_length, session_requests, vocab_size)
    rates = _SEVEN if num_speculative_tokens == 7 else _RATES[:num_speculative_tokens]
    arguments = vllm_arguments(
        model, num_speculative_tokens, rates, load.longest, max(sizes), max_num_batched_tokens
    )
    arguments |= {"enable_prefix_caching": True, "quantization": quantization}
    vllm = require("vllm", "vllm==0.24.0")
    rows = asyncio.run(_serve(arguments, load, sizes, num_speculative_tokens))
    print_rows("vllm_agent", vllm, rows, {**vars(load), "acceptance": rates, **arguments})


async def _serve(arguments: dict[str, Any], load: Load, sizes: list[int], k: int) -> list[Row]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    began = time.perf_counter()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, disable_log_stats=True))
    start = time.perf_counter() - began
    try:
        return [await _measure(engine, load, size, k, start) for size in sizes]
    finally:
        engine.shutdown()


async def _measure(engine: Any, load: Load, size: int, k: int, start: float) -> Row:
    """Compute the prefixes, then run all sessions at once."""
    # Other tokens for every number of sessions, whose prefixes would be in the cache.
    draw = random.Random(size)
    drawn = [list(_prompts(load, draw)) for _ in range(size)]
    prefixes = [prompts[0] for prompts in drawn]
    sessions = [prompts[1:] for prompts in drawn]
    for number, prefix in enumerate(prefixes):
        await _request(engine, prefix, 1, f"{size} {number} prefix")

    async def session(number: int, prompts: list[list[int]]) -> list[Request]:
        return [
            await _request(engine, prompt, load.output_length, f"{size} {number} {place}")
            for place, prompt in enumerate(prompts)
        ]

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(session(number, prompts)) for number, prompts in enumerate(sessions)
        ]
    counted = [one for task in tasks for one in task.result()[1:]]
    wrong = sum(one.tokens != load.output_length for one in counted)
    if wrong:
        fail(f"{wrong} of {len(counted)} outputs have another length than was asked for")

    seconds = max(one.times[-1] for one in counted) - min(one.arrival for one in counted)
    rate = sum(one.tokens for one in counted) / seconds
    known = [one.cached for one in counted if one.cached is not None]
    prompt = load.prefix_length + load.fresh_length
    return Row(
        sessions=size,
        k=k,
        start_seconds=start,
        tokens_per_s=rate,
        user_tokens_per_s=rate / size,
        ttft_ms=percentiles_ms([one.times[0] - one.arrival for one in counted]),
        itl_ms=percentiles_ms([b - a for one in counted for a, b in pairwise(one.times)]),
        cached_share=sum(known) / len(known) / prompt if known else None,
        seconds=seconds,
    )


def _prompts(load: Load, draw: random.Random) -> Iterator[list[int]]:
    """A session's prefix, then its prompts."""
    prefix = draw.choices(range(load.vocab_size), k=load.prefix_length)
    yield prefix
    for _ in range(load.session_requests):
        yield prefix + draw.choices(range(load.vocab_size), k=load.fresh_length)


async def _request(engine: Any, prompt: list[int], tokens: int, name: str) -> Request:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    arrival = time.perf_counter()
    times = list[float]()
    count = 0
    cached = None
    given = {"prompt_token_ids": prompt}
    async for output in engine.generate(given, params, request_id=name):
        if fresh := len(output.outputs[0].token_ids):
            times.append(time.perf_counter())
            count += fresh
            cached = getattr(output, "num_cached_tokens", None)
    return Request(arrival, times, count, cached)


if __name__ == "__main__":
    typer.run(main)
