"""Measure what structured outputs leave of the speedup of drafts.

    python -m benchmarks.structured MODEL --prompts prompts.jsonl

The same prompts are decoded greedily with K = 0 and with drafts, free and by a JSON schema, in
turns, so that whatever else the machine does meets all alike. A free output has as many tokens as
that of the same prompt by the schema, so that prompts count alike. Figures are medians over the
turns: tokens per second, the speedup over K = 0, the acceptance length, and the share of the time
in which the host walks along drafts and computes masks. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mtpkit.bench.machine import commit, describe_device
from mtpkit.bench.shapes import read_prompts
from mtpkit.cli.errors import run
from mtpkit.engine import LLM, SamplingParams, StructuredOutputsParams, require_whole
from mtpkit.engine.device import executor
from mtpkit.engine.requests.prompts import Prompt
from mtpkit.platform import default_device

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["module", "class", "function"]},
        "source": {"type": "string"},
        "lines": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "kind", "source", "lines"],
    "additionalProperties": False,
}
"""Text that is forced, text that is free, and something between."""


@dataclass
class Case:
    """One way to decode the prompts, and what each turn measured."""

    name: str
    llm: LLM
    params: SamplingParams | Sequence[SamplingParams]
    """Of all prompts, or of each."""
    rates: list[float] = field(default_factory=list)
    """Tokens per second."""
    shares: list[float] = field(default_factory=list)
    """Share of the time that constraints take."""
    acceptance_length: float = 1.0


class _Clock:
    """Adds up the time that constraints take on the host."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.rows = executor.constrained_rows

    def constrained_rows(self, *args: Any, **settings: Any) -> Any:
        """`mtpkit.engine.steps.constrained.constrained_rows`, timed."""
        began = time.perf_counter()
        found = self.rows(*args, **settings)
        self.seconds += time.perf_counter() - began
        return found


def measure(cases: list[Case], prompts: Sequence[Prompt], repeats: int) -> None:
    """Decode the prompts in every way, in turns; the first turn only warms up."""
    clock = _Clock()
    executor.constrained_rows = clock.constrained_rows
    try:
        for turn in range(1 + repeats):
            for case in cases:
                case.llm.reset_stats()
                clock.seconds = 0.0
                began = time.perf_counter()
                outputs = case.llm.generate(prompts, case.params)
                seconds = time.perf_counter() - began
                require_whole(outputs)
                if turn:
                    count = sum(len(output.outputs[0].token_ids) for output in outputs)
                    case.rates.append(count / seconds)
                    case.shares.append(clock.seconds / seconds)
                    case.acceptance_length = case.llm.stats().acceptance.acceptance_length
    finally:
        executor.constrained_rows = clock.rows


def alike(
    llm: LLM, prompts: Sequence[Prompt], constrained: SamplingParams, free: SamplingParams
) -> list[SamplingParams]:
    """Params of free outputs that have as many tokens as the constrained ones."""
    outputs = llm.generate(prompts, constrained)
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    return [replace(free, max_tokens=count) for count in counts]


def kept(cases: list[Case]) -> float:
    """The speedup with a schema over that without: the median over the turns, each of which
    measured all cases."""
    free, drafted, constrained, both = (case.rates for case in cases)
    turns = zip(free, drafted, constrained, both, strict=True)
    return statistics.median((d / c) / (b / a) for a, b, c, d in turns)


def main() -> None:
    """Measure, and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.structured",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="a model with heads, in either layout")
    parser.add_argument("--prompts", type=Path, required=True, help="a file of prompts")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=1, help="requests that run at once")
    parser.add_argument("--num-speculative-tokens", type=int, default=3, help="K")
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()

    prompts = read_prompts(options.prompts, options.num_prompts)
    free = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    schema = StructuredOutputsParams(json=SCHEMA)
    constrained = SamplingParams(
        temperature=0, max_tokens=options.max_tokens, structured_outputs=schema
    )
    engines = {
        k: LLM(options.model, k, max_num_seqs=options.batch_size, dtype=options.dtype)
        for k in (0, options.num_speculative_tokens)
    }
    ways = {
        "free": alike(engines[0], prompts, constrained, free),
        "schema": constrained,
    }
    cases = [
        Case(f"{name}, K = {k}", llm, params)
        for name, params in ways.items()
        for k, llm in engines.items()
    ]
    measure(cases, prompts, options.repeats)

    rows = []
    for index, case in enumerate(cases):
        plain = cases[index - index % 2]
        speedups = [one / two for one, two in zip(case.rates, plain.rates, strict=True)]
        rows.append(
            {
                "case": case.name,
                "tokens/s": round(statistics.median(case.rates), 1),
                "speedup": round(statistics.median(speedups), 3),
                "acceptance length": round(case.acceptance_length, 3),
                "share of constraints": round(statistics.median(case.shares), 4),
            }
        )
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()))
    print(f"speedup with a schema over that without: {kept(cases):.3f}")
    result = {
        "model": str(options.model),
        "kept": round(kept(cases), 4),
        "rows": rows,
        "device": describe_device(default_device()),
        "threads": torch.get_num_threads(),
        "commit": commit(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    run(main)
