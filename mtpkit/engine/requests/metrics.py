"""An engine's totals and gauges under vLLM's names, which dashboards and scripts know."""

from dataclasses import dataclass
from itertools import accumulate

from mtpkit.engine.requests.stats import STEP_TOKENS, EngineStats, StepTokens


@dataclass(frozen=True)
class Gauge:
    """A value at present."""

    name: str
    help: str
    value: float


@dataclass(frozen=True)
class Counter:
    """A total since the engine was made or its statistics were reset."""

    name: str
    help: str
    value: int


@dataclass(frozen=True)
class Vector:
    """Totals per position."""

    name: str
    help: str
    values: list[int]


@dataclass(frozen=True)
class Histogram:
    """How often values were how large."""

    name: str
    help: str
    count: int
    sum: int
    buckets: dict[str, int]
    """For each bound, the number of values up to it; "+Inf": of all values."""


Metric = Gauge | Counter | Vector | Histogram


def metrics_of(stats: EngineStats) -> list[Metric]:
    """The metrics that statistics stand for."""
    acceptance = stats.acceptance
    reached = acceptance.reached_per_depth
    usage = stats.used_blocks / max(1, stats.blocks)
    gauges = (
        ("num_requests_running", "Requests that run.", stats.running),
        ("num_requests_waiting", "Requests that wait.", stats.waiting),
        ("kv_cache_usage_perc", "Share of the blocks in use, 1: all.", usage),
    )
    counters = (
        ("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
        ("generation_tokens", "Tokens of outputs.", stats.generated_tokens),
        ("num_preemptions", "Preemptions.", stats.preemptions),
        (
            "prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            stats.prompt_tokens,
        ),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.cached_tokens),
        # Every step with drafts reaches the first depth.
        ("spec_decode_num_drafts", "Steps with drafts.", reached[0] if reached else 0),
        ("spec_decode_num_draft_tokens", "Drafts.", acceptance.drafted),
        ("spec_decode_num_accepted_tokens", "Accepted drafts.", acceptance.accepted),
    )
    per_depth = Vector(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted drafts per depth.",
        list(acceptance.accepted_per_depth),
    )
    return [
        *(Gauge(f"vllm:{name}", text, value) for name, text, value in gauges),
        *(Counter(f"vllm:{name}", text, value) for name, text, value in counters),
        per_depth,
        _step_tokens(stats.step_tokens),
    ]


def _step_tokens(found: StepTokens) -> Histogram:
    up_to = list(accumulate(found.counts))
    bounds = [*map(str, STEP_TOKENS), "+Inf"]
    return Histogram(
        "vllm:iteration_tokens_total",
        "Tokens per step, of prompts and outputs.",
        up_to[-1],
        found.total,
        dict(zip(bounds, up_to, strict=True)),
    )
