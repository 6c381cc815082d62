"""Measure vLLM's tokens/s while all requests of a batch decode, for comparison with `mtpkit bench
decode`.

Needs vLLM (0.24.0 made the figures of docs/performance.md), a GPU, and a config directory from
write_config.py. Steps are timed from when every request has its first token until the first request
may end, as in `mtpkit bench decode`. Prompts and weights are random, acceptance is synthetic.
mtpkit is not needed. The names of the arguments were taken from vLLM 0.24.0's sources; this version
of the script has not been run with vLLM yet.
"""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from peer import fail, print_rows, require, vllm_arguments


@dataclass(frozen=True)
class Row:
    """Results of one batch size."""

    batch_size: int
    k: int
    start_seconds: float
    """Time to create the engine, weights included, until it is ready."""
    tokens_per_s: float
    step_ms: float
    run_tokens_per_s: list[float]
    """Tokens/s of each run after the warm-up."""


def main(
    model: Annotated[Path, typer.Option(help="Config directory from write_config.py.")],
    batch_size: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Requests at once; repeat for several. By default 1 4 16 32 64 128."
        ),
    ] = None,
    num_speculative_tokens: Annotated[int, typer.Option(min=0, help="K, drafts per step.")] = 0,
    acceptance: Annotated[
        float, typer.Option(min=0, max=1, help="Synthetic acceptance of each depth.")
    ] = 0.85,
    prompt_length: Annotated[int, typer.Option(min=1, help="Tokens of a random prompt.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated for each prompt.")] = 224,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a step.")
    ] = 8192,
    vocab_size: Annotated[
        int, typer.Option(min=1, help="Tokens that prompts are drawn from.")
    ] = 131072,
    repeats: Annotated[int, typer.Option(min=1, help="Runs after a warm-up, added up.")] = 3,
) -> None:
    """Decode with one engine for all batch sizes, and print one JSON object as the last line."""
    sizes = batch_size or [1, 4, 16, 32, 64, 128]
    longest = max_tokens - 2 * (1 + num_speculative_tokens)
    if longest < 1:
        fail(
            f"--max-tokens is {max_tokens}: no step lies between the first token and the end,"
            " raise it"
        )
    arguments = vllm_arguments(
        model,
        num_speculative_tokens,
        [acceptance] * num_speculative_tokens,
        prompt_length + max_tokens,
        max(sizes),
        max_num_batched_tokens,
    )
    vllm = require("vllm", "vllm==0.24.0")
    began = time.perf_counter()
    engine = vllm.LLM(**arguments).llm_engine
    start = time.perf_counter() - began
    draw = random.Random(0)
    params = vllm.SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    rows = []
    for size in sizes:
        windows = []
        for number in range(1 + repeats):
            prompts = [draw.choices(range(vocab_size), k=prompt_length) for _ in range(size)]
            windows.append(time_window(engine, prompts, params, f"{size} {number}", longest))
        later = windows[1:]
        tokens, seconds, steps = (sum(column) for column in zip(*later, strict=True))
        each = [one[0] / one[1] for one in later]
        rows.append(
            Row(size, num_speculative_tokens, start, tokens / seconds, seconds / steps * 1e3, each)
        )
    print_rows(
        "vllm_decode",
        vllm,
        rows,
        {"prompt_length": prompt_length, "acceptance": acceptance, **arguments},
    )


def time_window(
    engine: Any, prompts: list[list[int]], params: Any, name: str, longest: int
) -> tuple[int, float, int]:
    """Tokens, seconds and steps while all requests decode, until one has more than `longest`
    tokens."""
    lengths = {}
    for number, prompt in enumerate(prompts):
        request_id = f"{name} {number}"
        lengths[request_id] = 0
        engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

    def step() -> None:
        for output in engine.step():
            lengths[output.request_id] = len(output.outputs[0].token_ids)

    while not all(lengths.values()):
        step()
    before = sum(lengths.values())
    began = time.perf_counter()
    steps = 0
    while max(lengths.values()) <= longest:
        step()
        steps += 1
    tokens = sum(lengths.values()) - before
    seconds = time.perf_counter() - began
    while engine.has_unfinished_requests():
        step()
    if not steps:
        fail(f"batch {len(prompts)}: a request ended before all had begun; raise --max-tokens")
    return tokens, seconds, steps


if __name__ == "__main__":
    typer.run(main)
