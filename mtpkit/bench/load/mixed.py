"""The speed of the engine under a mixed load: requests of many lengths, queued at once or arriving
one by one."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from mtpkit.bench.load.requests import draw_requests, limit_seconds, token_sums
from mtpkit.bench.load.run import LoadEngine, Run
from mtpkit.bench.load.serving import Clock, percentiles_ms
from mtpkit.bench.load.workload import Drafts, Workload, draft_vocab_size, shown_rate
from mtpkit.bench.machine import Machine
from mtpkit.bench.report import Column, significant
from mtpkit.bench.roofline import Roofline
from mtpkit.bench.settings import LoadConfig
from mtpkit.engine.scheduling.adaptive import Speculation
from mtpkit.model.hybrid import HybridModel

Case = tuple[float, Drafts]
"""Requests per second, and K."""


def _pair(name: str) -> "Callable[[LoadRow], str]":
    """Shows two percentiles of a row in one column."""

    def show(row: "LoadRow") -> str:
        first, last = (getattr(row, f"{name}_p{percent}_ms") for percent in (50, 99))
        return f"{significant(first, 3)} / {significant(last, 3)}"

    return show


def _of_several(show: "Callable[[LoadRow], str]") -> "Callable[[LoadRow], str]":
    """Shows a value only if there are several runs."""
    return lambda row: show(row) if len(row.run_seconds) > 1 else "-"


@dataclass(frozen=True)
class LoadRow:
    """One engine: its start, its first run and its later ones.

    Latencies are those of all requests of the later runs, or of the first one if it is the only
    one.
    """

    request_rate: Annotated[float | Literal["inf"], Column("requests/s", key=True)]
    """"inf": all requests are queued at once."""
    k: Annotated[int | Literal["auto"], Column("K", key=True)]
    start_seconds: Annotated[float, Column("start s", ".1f")]
    """Time to make the engine around a loaded model, until it takes requests."""
    first_seconds: Annotated[float, Column("first s", ".2f")]
    """From the first arrival to the last output."""
    seconds: Annotated[float, Column("later s", _of_several(lambda row: f"{row.seconds:.2f}"))]
    """Median of the later runs; the first one's time if it is the only one."""
    spread: Annotated[float, Column("spread", _of_several(lambda row: f"{row.spread:.1%}"))]
    """By how much the longest of all runs exceeds the shortest."""
    tokens_per_s: Annotated[float, Column("tokens/s", ".0f")]
    """Output tokens over `seconds`."""
    ttft_p50_ms: Annotated[float | None, Column("TTFT ms p50 / p99", _pair("ttft"))]
    """Time to first token, see `Stream.first_seconds`."""
    ttft_p99_ms: float | None
    itl_p50_ms: Annotated[float | None, Column("ITL ms p50 / p99", _pair("itl"))]
    """Inter-token latency: time between consecutive outputs of a request; None if there are
    none."""
    itl_p99_ms: float | None
    tpot_ms: Annotated[float | None, Column("TPOT ms", ".2f")]
    """Time per output token after the first, the mean over requests."""
    acceptance_length: Annotated[
        float,
        Column("acceptance length", lambda row: f"{row.acceptance_length:.2f}" if row.k else "-"),
    ]
    """1 + mean accepted drafts per decode step and request."""
    preemptions: Annotated[int, Column("preempted")]
    """Preemptions of all runs."""
    limit_seconds: Annotated[float, Column("limit s", ".2f")]
    """See `load_requests.limit_seconds`: at the requested acceptance, and the copy bandwidth and
    matrix rates measured in the same run; at least the time of the last arrival. For "auto": the
    least of any K."""
    limit_share: Annotated[float, Column("of the limit", ".0%")]
    """Share of the limit's speed."""
    run_seconds: list[float]
    """Each run, in order."""
    sustained_share: Annotated[float | None, Column("of it, sustained", ".0%")] = None
    """`limit_share` with the limit at `Machine.sustained_rate`, which a GPU keeps up for the
    seconds of a run; products in fp8 count at `Machine.fp8_rate`."""
    hit_rate: Annotated[float | None, Column("hit rate", ".1%")] = None
    """Share of the prompts' tokens that the prefix cache had; None without one."""
    gpu_idle_share: Annotated[float | None, Column("GPU idle", ".1%")] = None
    """See `Trace.host_gap_share`, over steps in the middle of a run; None if nothing was traced: on
    a CPU, and if requests arrive one by one, since the GPU may then wait for them."""


class Mixed(Workload[LoadRow]):
    """Requests of many lengths, queued at once or arriving one by one, at every rate with every K.

    All outputs must have the requested length, synthetic acceptance must match the requested rates,
    and tokens that the base chose must be those of a plain forward pass, except near ties (one
    request of each first run is compared; with drawn experts, one of a run without them).
    """

    name = "load"
    row = LoadRow
    sustained = True
    traced = True

    def __init__(self, model: HybridModel, config: LoadConfig, rule: None, clock: Clock) -> None:
        super().__init__(model, config, rule, clock)
        self.requests = draw_requests(config)
        self.choices: dict[Case, Speculation] = {}
        """What "auto" knew when a case had been timed."""

    @property
    def cases(self) -> Sequence[Case]:
        """Each rate with each K."""
        return [*itertools.product(self.config.request_rate, super().cases)]

    def label(self, case: Case) -> str:
        """See `Workload.label`."""
        return f"{shown_rate(case[0])} requests/s, K = {case[1]}"

    def title(self, name: str) -> str:
        """See `Workload.title`."""
        sums = token_sums(self.requests)
        return (
            f"load of {len(self.requests)} requests, {sums['prompt_tokens']:,} prompt and"
            f" {sums['output_tokens']:,} output tokens: {name}, synthetic acceptance"
            f" {' '.join(map(str, self.config.usual_acceptance))}"
        )

    @property
    def about(self) -> dict[str, object]:
        """See `Workload.about`."""
        pattern = self.model.mtpkit_config.mtp.pattern
        return {"mtp_pattern": pattern, **token_sums(self.requests)}

    def measure(self, case: Case) -> LoadRow:
        """Time the engine's start, its first run and its later ones."""
        engine = LoadEngine(self.model, self.config, case[1], self.clock, self.draws)
        row = _measure(engine, case[0], self.machine)
        self.choices[case] = engine.llm.engine.speculation
        return row

    def trace(self, case: Case, row: LoadRow) -> LoadRow:
        """Add the GPU's idle share, if the requests are all queued at once."""
        if case[0] != math.inf:
            return row
        engine = LoadEngine(self.model, self.config, case[1], self.clock, self.draws)
        engine.llm.engine.speculation = self.choices[case]  # "auto" goes on as it was timed
        trace = engine.trace()
        return replace(row, gpu_idle_share=trace.host_gap_share if trace.kernels else None)


def _measure(engine: LoadEngine, rate: float, machine: Machine) -> LoadRow:
    config = engine.config
    runs = [engine.run(rate) for _ in range(config.repeats)]
    engine.check()
    run_seconds = [run.seconds for run in runs]
    # The first run after a start may still meet steps for which nothing is compiled or captured.
    later = runs[1:] or runs
    seconds = statistics.median(run.seconds for run in later)
    streams = [stream for run in later for stream in run.streams]
    ttft = percentiles_ms([stream.first_seconds for stream in streams])
    itl = percentiles_ms([gap for stream in streams for gap in stream.gaps])
    per_token = [each for stream in streams if (each := stream.seconds_per_token) is not None]
    # No engine ends before the last request has arrived.
    last_arrival = streams[-1].arrival
    limit = max(_limit(engine, *machine.rates()), last_arrival)
    sustained = None
    if machine.sustained_rate is not None:
        sustained = max(_limit(engine, *machine.rates(sustained=True)), last_arrival)
    return LoadRow(
        request_rate=shown_rate(rate),
        k=engine.k,
        start_seconds=engine.start_seconds,
        first_seconds=run_seconds[0],
        seconds=seconds,
        spread=max(run_seconds) / min(run_seconds) - 1,
        tokens_per_s=sum(request.max_tokens for request in engine.requests) / seconds,
        ttft_p50_ms=ttft[0],
        ttft_p99_ms=ttft[1],
        itl_p50_ms=itl[0],
        itl_p99_ms=itl[1],
        tpot_ms=statistics.mean(per_token) * 1e3 if per_token else None,
        acceptance_length=_acceptance_length(runs),
        preemptions=sum(run.stats.preemptions for run in runs),
        limit_seconds=limit,
        limit_share=limit / seconds,
        run_seconds=run_seconds,
        sustained_share=None if sustained is None else sustained / seconds,
        hit_rate=_hit_rate(runs) if config.engine.enable_prefix_caching else None,
    )


def _acceptance_length(runs: Sequence[Run]) -> float:
    """1 + mean accepted drafts per decode step and request, over all runs."""
    acceptances = [run.stats.acceptance for run in runs]
    return 1 + sum(one.accepted for one in acceptances) / max(
        1, sum(one.steps for one in acceptances)
    )


def _hit_rate(runs: Sequence[Run]) -> float:
    """Share of the prompts' tokens that the prefix cache had, over all runs."""
    return sum(run.stats.cached_tokens for run in runs) / sum(
        run.stats.prompt_tokens for run in runs
    )


def _limit(
    engine: LoadEngine, bandwidth: float, matrix_rate: float, fp8_rate: float | None
) -> float:
    """Least seconds of a run, whatever the arrivals."""
    config = engine.config
    model = engine.llm.model
    roofline = Roofline.of(model, config.engine, draft_vocab_size=draft_vocab_size(model, config))
    ks = range(engine.depths + 1) if engine.k == "auto" else [engine.k]
    given = roofline, engine.requests, config.engine.max_num_seqs
    rates = bandwidth, matrix_rate, fp8_rate
    return min(limit_seconds(*given, config.rates(k), *rates) for k in ks)
