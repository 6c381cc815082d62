"""Measure vLLM under the load of `mtpkit bench load`: the same requests, from the file of
`--save-requests`.

Needs vLLM (0.24.0 made the figures of docs/performance.md), a GPU, and a config directory from
write_config.py. Requests queued at once go through `vllm.LLM.generate`, as the published figures
were measured; requests that arrive one by one go through `AsyncLLM`, each as a stream. Weights are
random, acceptance is synthetic, prefix caching is off. mtpkit is not needed. The names of the
arguments were taken from vLLM 0.24.0's sources; this version of the script has not been run with
vLLM yet.
"""

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from peer import Request, fail, percentiles_ms, print_rows, read_requests, require, vllm_arguments


@dataclass(frozen=True)
class Row:
    """Results of all runs of one engine at one rate."""

    request_rate: float | str
    k: int
    start_seconds: float
    """Time to create the engine, weights included, until it is ready."""
    first_seconds: float
    """Time of the first run, from the first arrival to the last output."""
    seconds: float
    """Median time of the later runs; the first run's time if it is the only one."""
    tokens_per_s: float
    ttft_ms: list[float] | None
    """p50 and p99 over the later runs; None for requests queued at once, whose outputs come at the
    end."""
    itl_ms: list[float] | None
    tpot_ms: float | None
    run_seconds: list[float]


@dataclass(frozen=True)
class Run:
    """Times of one run: for each request its arrival, the time of each output, and its number of
    tokens by then."""

    seconds: float
    arrivals: list[float]
    times: list[list[float]]
    lengths: list[list[int]]


def main(
    model: Annotated[Path, typer.Option(help="Config directory from write_config.py.")],
    requests: Annotated[Path, typer.Option(help="File from mtpkit bench load --save-requests.")],
    num_speculative_tokens: Annotated[int, typer.Option(min=0, help="K, drafts per step.")] = 0,
    request_rate: Annotated[
        list[float] | None,
        typer.Option(help="Requests per second; repeat for several. By default all at once."),
    ] = None,
    acceptance: Annotated[
        float, typer.Option(min=0, max=1, help="Synthetic acceptance of each depth.")
    ] = 0.85,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most requests that run at once.")] = 128,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a step.")
    ] = 8192,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of the engine after its start.")] = 3,
) -> None:
    """Serve the requests, and print one JSON object as the last line."""
    rates = [rate for rate in request_rate or () if rate != math.inf]
    if rates and len(rates) != len(request_rate or ()):
        fail("--request-rate inf cannot be combined with finite rates: run them separately")
    if any(not rate > 0 for rate in rates):
        fail(f"--request-rate is {rates}, must be positive")
    load = read_requests(requests)
    longest = max(len(one.prompt_token_ids) + one.max_tokens for one in load)
    arguments = vllm_arguments(
        model,
        num_speculative_tokens,
        [acceptance] * num_speculative_tokens,
        longest,
        max_num_seqs,
        max_num_batched_tokens,
    )
    vllm = require("vllm", "vllm==0.24.0")
    began = time.perf_counter()
    if rates:
        rows = asyncio.run(_serve(arguments, load, rates, num_speculative_tokens, repeats))
    else:
        llm = vllm.LLM(**arguments)
        start = time.perf_counter() - began
        runs = [_generate(vllm, llm, load) for _ in range(repeats)]
        rows = [summarize("inf", num_speculative_tokens, start, load, runs)]
    print_rows(
        "vllm_load", vllm, rows, {"requests": str(requests), "acceptance": acceptance, **arguments}
    )


def summarize(
    rate: float | str, k: int, start: float, load: Sequence[Request], runs: Sequence[Run]
) -> Row:
    """Combine the runs at one rate into a row."""
    later = runs[1:] or runs
    seconds = statistics.median(run.seconds for run in later)
    streams = [
        one for run in later for one in zip(run.arrivals, run.times, run.lengths, strict=True)
    ]
    per_token = [
        (times[-1] - times[0]) / (lengths[-1] - 1)
        for _, times, lengths in streams
        if lengths[-1] > 1
    ]
    return Row(
        request_rate=rate,
        k=k,
        start_seconds=start,
        first_seconds=runs[0].seconds,
        seconds=seconds,
        tokens_per_s=sum(one.max_tokens for one in load) / seconds,
        ttft_ms=percentiles_ms([times[0] - arrival for arrival, times, _ in streams]),
        itl_ms=percentiles_ms([b - a for _, times, _ in streams for a, b in pairwise(times)]),
        tpot_ms=statistics.mean(per_token) * 1e3 if per_token else None,
        run_seconds=[run.seconds for run in runs],
    )


def _generate(vllm: Any, llm: Any, load: Sequence[Request]) -> Run:
    """Do one run with all requests queued at once."""
    params = [
        vllm.SamplingParams(
            temperature=0, max_tokens=one.max_tokens, ignore_eos=True, detokenize=False
        )
        for one in load
    ]
    prompts = [{"prompt_token_ids": one.prompt_token_ids} for one in load]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    check_lengths(load, [len(output.outputs[0].token_ids) for output in outputs])
    return Run(seconds, [], [], [])


async def _serve(
    arguments: dict[str, Any], load: Sequence[Request], rates: Sequence[float], k: int, repeats: int
) -> list[Row]:
    """Serve all rates with one engine, whose start time is in every row."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    began = time.perf_counter()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, disable_log_stats=True))
    start = time.perf_counter() - began
    try:
        rows = []
        for rate in rates:
            runs = [await _run(engine, load, rate, f"{rate} {number}") for number in range(repeats)]
            rows.append(summarize(rate, k, start, load, runs))
        return rows
    finally:
        engine.shutdown()


async def _run(engine: Any, load: Sequence[Request], rate: float, name: str) -> Run:
    """Do one run in which each request arrives at its time."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    began = time.perf_counter()

    async def stream(number: int, one: Request) -> tuple[list[float], list[int]]:
        params = SamplingParams(
            temperature=0,
            max_tokens=one.max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        times = list[float]()
        lengths = list[int]()
        prompt = {"prompt_token_ids": one.prompt_token_ids}
        async for output in engine.generate(prompt, params, request_id=f"{name} {number}"):
            if fresh := len(output.outputs[0].token_ids):
                times.append(time.perf_counter() - began)
                lengths.append(fresh + (lengths[-1] if lengths else 0))
        return times, lengths

    tasks = []
    async with asyncio.TaskGroup() as group:  # the first request that fails ends the run
        # one after the other: a host that stalls does not change their order
        for number, one in enumerate(load):
            await asyncio.sleep(max(0.0, began + one.arrival / rate - time.perf_counter()))
            tasks.append(group.create_task(stream(number, one)))
    streams = [task.result() for task in tasks]
    times = [one[0] for one in streams]
    lengths = [one[1] for one in streams]
    check_lengths(load, [one[-1] if one else 0 for one in lengths])
    return Run(max(one[-1] for one in times), [one.arrival / rate for one in load], times, lengths)


def check_lengths(load: Sequence[Request], lengths: Sequence[int]) -> None:
    """Fail if outputs have another length than was asked for."""
    wrong = sum(length != one.max_tokens for one, length in zip(load, lengths, strict=True))
    if wrong:
        fail(f"{wrong} of {len(load)} outputs have another length than was asked for")


if __name__ == "__main__":
    typer.run(main)
