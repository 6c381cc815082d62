"""Serving a load of requests: one command, whose workload is a rule by which requests arrive.

`mixed` draws lengths and arrivals, `stall` lets prompts arrive while others decode, `turns` holds
conversations, `prefill` queues prompts of one length and waits for their first tokens, and
`long-agent` goes on from long prefixes that the cache has.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mtpkit.bench.experts import check_has_experts
from mtpkit.bench.load.agent import LongAgent
from mtpkit.bench.load.mixed import Mixed
from mtpkit.bench.load.prefill import Prefill
from mtpkit.bench.load.serving import Clock, WallClock
from mtpkit.bench.load.stall import Stall
from mtpkit.bench.load.turns import Turns
from mtpkit.bench.load.workload import Workload, shown_rate
from mtpkit.bench.report import Result
from mtpkit.bench.settings import (
    LOAD_DRAFTS,
    AgentConfig,
    LoadConfig,
    PrefillConfig,
    StallConfig,
    TurnsConfig,
)
from mtpkit.bench.shapes import choose_drafts
from mtpkit.bench.timing import can_trace, release_memory
from mtpkit.bench.weights import ModelWeights
from mtpkit.config.parts import options_of
from mtpkit.model.hybrid import HybridModel

Rule = StallConfig | TurnsConfig | PrefillConfig | AgentConfig | None
"""Settings of a workload; None: `mixed`, which has none beside those of the load."""

WORKLOADS: Mapping[type, type[Workload[Any]]] = {
    type(None): Mixed,
    StallConfig: Stall,
    TurnsConfig: Turns,
    PrefillConfig: Prefill,
    AgentConfig: LongAgent,
}


def measure_load(
    model: HybridModel,
    config: LoadConfig,
    rule: Rule = None,
    name: str = "model",
    keep: Callable[[Result[Any]], object] | None = None,
    clock: Clock | None = None,
) -> Result[Any]:
    """Serve a workload with every K, each time with a new engine around the same weights.

    Kernels are traced after all timing, see `trace_kernels`.

    Args:
        model: from `mtpkit.bench.shapes.open_model`.
        config: settings of the engine, K, acceptance and seed, and the load of `mixed`.
        name: the model's name in the report.
        keep: see `Result.measure`.
        clock: source of all times; by default the machine's clock.

    Raises:
        UserError: the model lacks the heads, or experts to draw, or the requests do not fit.
        RequestError: the logits of a request are NaN or infinite.
        MtpkitError: a check of the workload fails, see the class of each.
    """
    check_has_experts(config.random_experts, model.mtpkit_config)
    drafts = choose_drafts(model.mtpkit_config, config.num_speculative_tokens, LOAD_DRAFTS)
    config = replace(config, num_speculative_tokens=drafts)
    if not isinstance(rule, AgentConfig):
        config = replace(config, acceptance=config.usual_acceptance)
    workload = WORKLOADS[type(rule)](model, config, rule, clock or WallClock())
    weights = ModelWeights.of(model)
    about = {
        "model": name,
        **options_of(config),
        **({} if rule is None else options_of(rule)),
        **workload.about,
        "weight_formats": [*weights.formats],
        # Last, in place of the configured rates, which may be infinite.
        "request_rate": [shown_rate(rate) for rate in config.request_rate],
    }
    drawn = ", experts drawn at random" if config.random_experts else ""
    said = weights.said(workload.dtype)
    title = f"{workload.title(name)}{drawn}, {said}, {workload.machine.device}"
    result: Result[Any] = Result(workload.name, title, workload.row, [], workload.machine, about)
    cases = workload.cases

    def time_one(index: int) -> Any:
        release_memory(workload.device)  # of the engine before
        return workload.measure(cases[index])

    def trace_one(index: int) -> Any:
        release_memory(workload.device)
        return workload.trace(cases[index], result.rows[index])

    labels = [workload.label(case) for case in cases]
    result = result.measure(range(len(cases)), time_one, labels.__getitem__, keep)
    if workload.traced and config.trace and can_trace(workload.device):
        result = result.measure(range(len(cases)), trace_one, labels.__getitem__, keep)
    release_memory(workload.device)
    return result
