"""Decodes completions in this process: `python -m benchmarks.server.local` reads a job from stdin
and prints a `Report`, both as JSON."""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.server.client import Completion, Report
from mtpkit.bench.shapes import to_serve
from mtpkit.cli.errors import run
from mtpkit.engine import LLM, AsyncLLM, RequestOutputKind, SamplingParams


def main() -> None:
    """Decode all completions of a job, after those of its warm-up."""
    job = json.load(sys.stdin)
    decode = {"generate": _generate, "async": _stream}[job["kind"]]
    tokenizer = Path(job["tokenizer"])
    model = to_serve(Path(job["model"]), tokenizer)
    report = decode(job, model=model, tokenizer=tokenizer, **job["engine"])
    print(json.dumps(report))


def _params(completion: Completion) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        max_tokens=completion["max_tokens"],
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )


def _new_report() -> Report:
    return Report(seconds=0.0, first=[], gaps=[], chunks=0, tokens=0, cpu=0.0)


def _generate(job: dict[str, Any], **options: Any) -> Report:
    """Decode with `LLM.generate`."""
    report = _new_report()
    with LLM(**options) as llm:
        for completions in (job["warm_up"], job["completions"]):
            prompts = [completion["prompt"] for completion in completions]
            params = [_params(completion) for completion in completions]
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            report["seconds"] = time.perf_counter() - began
            report["tokens"] = sum(len(output.outputs[0].token_ids) for output in outputs)
    return report


def _stream(job: dict[str, Any], **options: Any) -> Report:
    """Decode with `AsyncLLM`."""

    async def decode() -> Report:
        async with AsyncLLM(**options) as llm:
            await _load(llm, job["streams"], job["warm_up"])
            return await _load(llm, job["streams"], job["completions"])

    return asyncio.run(decode())


async def _load(llm: AsyncLLM, streams: int, completions: list[Completion]) -> Report:
    """Decode completions, so many at a time."""
    report = _new_report()
    waiting = iter(completions)
    began = time.perf_counter()
    streamed = (_one_after_the_other(llm, waiting, began, report) for _ in range(streams))
    await asyncio.gather(*streamed)
    report["seconds"] = time.perf_counter() - began
    return report


async def _one_after_the_other(
    llm: AsyncLLM, completions: Iterator[Completion], began: float, report: Report
) -> None:
    for completion in completions:
        wait = began + completion["due"] - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        times = [time.perf_counter()]
        async for output in llm.generate(completion["prompt"], _params(completion)):
            times.append(time.perf_counter())
            report["tokens"] += len(output.outputs[0].token_ids)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        report["first"].append(gaps[0])
        report["gaps"] += gaps[1:]
        report["chunks"] += len(gaps)


if __name__ == "__main__":
    run(main)
