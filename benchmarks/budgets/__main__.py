"""Measure what a budget by request gains over the same number of drafts for all requests.

    python -m benchmarks.budgets nemotron-h-8b --batch-size 16 64 128

Half of the requests accept each draft at one rate, half at another, by synthetic acceptance. Each
way of choosing drafts (every fixed K that is given, K = auto, and a budget) decodes as many
requests at once, none of which ends in between. Tokens per second are those of the last three
quarters of the steps, since budgets learn in the first one. Beside each figure stands the ideal:
what the cost model of `mtpkit roofline` gives a budget that knows the rates, over the best fixed K
by the same model. The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from mtpkit.bench.machine import Machine, measure_machine
from mtpkit.bench.roofline import Roofline
from mtpkit.bench.shapes import open_model, random_prompts
from mtpkit.bench.timing import synchronize
from mtpkit.cli.errors import run
from mtpkit.config import MOST_DRAFTS
from mtpkit.engine import LLM, SamplingParams
from mtpkit.engine.requests.options import EngineOptions
from mtpkit.model.hybrid import HybridModel
from mtpkit.platform import default_device

Way = int | Literal["auto", "budget"]
"""A fixed K, or how the engine chooses."""


@dataclass(frozen=True)
class Row:
    """One way at one batch size."""

    batch_size: int
    way: Way
    tokens_per_s: float
    step_ms: float
    over_best_fixed: float
    """Over the fastest fixed K that was measured."""
    ideal: float
    """The same of a budget that knows the rates, by the cost model."""


def lengths(rate: float, most: int) -> np.ndarray:
    """[1 + most] expected tokens of a step with 0, 1, .. drafts, each accepted at a rate."""
    return np.power(rate, np.arange(1 + most)).cumsum()


def ideal_gain(
    roofline: Roofline,
    machine: Machine,
    batch_size: int,
    rates: Sequence[float],
    most: int,
    context: float,
) -> float:
    """Tokens per second of the best split of requests into two kinds over those of the best K for
    all, by the cost model: drafts of all rows, and verification by the number of tokens."""
    limits = machine.rates()
    costs = [roofline.decode(batch_size, [0.5] * k, context) for k in range(1 + most)]
    seconds = [
        {name: sum(work.seconds(*limits) for work in works) for name, works in cost.phases.items()}
        for cost in costs
    ]
    tokens = batch_size * np.arange(1, 2 + most)
    verify = np.array([one["verify"] for one in seconds])
    drafts = np.array([sum(one.values()) - one["verify"] for one in seconds])
    # Half of the requests each.
    half = batch_size / len(rates)
    expected = [half * lengths(rate, most) for rate in rates]
    fixed = sum(expected) / (verify + drafts)
    best = fixed.max()
    for counts in np.ndindex(*[1 + most] * len(rates)):
        fed = half * sum(1 + count for count in counts)
        took = float(np.interp(fed, tokens, verify)) + drafts[max(counts)]
        made = sum(one[count] for one, count in zip(expected, counts, strict=True))
        best = max(best, made / took)
    return float(best / fixed.max())


def decode(
    model: HybridModel,
    way: Way,
    batch_size: int,
    rates: Sequence[float],
    options: argparse.Namespace,
) -> tuple[float, float]:
    """Tokens per second, and milliseconds per step."""
    most = options.most_drafts
    llm = LLM(
        model,
        way if isinstance(way, int) else "auto" if way == "auto" else most,
        speculative_budget="auto" if way == "budget" else None,
        # The largest K of auto is the heads' own.
        synthetic_acceptance=[[rate] * MOST_DRAFTS for rate in rates],
        max_num_seqs=batch_size,
        max_model_len=options.prompt_length + options.steps * (2 + most) + 64,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        warm_up=False,
    )
    engine = llm.engine
    vocab_size = model.mtpkit_config.vocab_size
    for seed, prompt in enumerate(random_prompts(batch_size, options.prompt_length, vocab_size)):
        # The seed says which rate a request has.
        params = SamplingParams(
            temperature=0, max_tokens=options.steps * (1 + most), ignore_eos=True, seed=seed
        )
        engine.add_request(prompt, params)
    while engine.scheduler.num_decoding < batch_size:
        engine.step()

    first = options.steps // 4
    for _ in range(first):
        engine.step()
    synchronize(next(model.parameters()).device)
    before = engine.scheduler.num_generated
    began = time.perf_counter()
    for _ in range(options.steps - first):
        engine.step()
    synchronize(next(model.parameters()).device)
    seconds = time.perf_counter() - began
    made = engine.scheduler.num_generated - before
    llm.shutdown()
    return made / seconds, seconds / (options.steps - first) * 1e3


def compare(
    model: HybridModel, machine: Machine, batch_size: int, options: argparse.Namespace
) -> list[Row]:
    """All ways at one batch size."""
    rates = options.acceptance
    roofline = Roofline.of(model, EngineOptions())
    context = options.prompt_length + options.steps
    ideal = ideal_gain(roofline, machine, batch_size, rates, options.most_drafts, context)
    ways: list[Way] = [*options.num_speculative_tokens, "auto", "budget"]
    found = {way: decode(model, way, batch_size, rates, options) for way in ways}
    best = max(found[k][0] for k in options.num_speculative_tokens)
    return [
        Row(batch_size, way, speed, ms, speed / best, ideal if way == "budget" else 1.0)
        for way, (speed, ms) in found.items()
    ]


def main() -> None:
    """Measure, and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.budgets",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a shape or a model directory with heads")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.95, 0.4])
    parser.add_argument("--num-speculative-tokens", type=int, nargs="+", default=[1, 2, 3, 5, 7])
    parser.add_argument(
        "--most-drafts", type=int, default=7, help="the largest K of auto and budget"
    )
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()

    device = default_device()
    machine = measure_machine(device)
    print(machine)
    model = open_model(options.model, device, options.dtype)
    rows = []
    for batch_size in options.batch_size:
        for row in compare(model, machine, batch_size, options):
            rows.append(row)
            print(
                f"batch {row.batch_size}  K {row.way}  tokens/s {row.tokens_per_s:,.0f}"
                f"  ms per step {row.step_ms:.2f}  over the best fixed K {row.over_best_fixed:.3f}"
                f"  ideal {row.ideal:.3f}"
            )
    print(
        json.dumps(
            {
                "benchmark": "budgets",
                "rows": [asdict(row) for row in rows],
                "settings": vars(options),
                "machine": asdict(machine),
            }
        )
    )


if __name__ == "__main__":
    run(main)
