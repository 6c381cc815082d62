"""Metrics in Prometheus's format, under vLLM's names, so that its dashboards and autoscalers work.

Totals and gauges are the engine's own, read when somebody asks. Times are noted here, when outputs
come.
"""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mtpkit.engine import EngineStats, RequestOutput
from mtpkit.engine.requests.metrics import Counter as EngineCounter
from mtpkit.engine.requests.metrics import Gauge, Vector, metrics_of
from mtpkit.engine.requests.metrics import Histogram as EngineHistogram

_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_TIMES = {
    "time_to_first_token_seconds": "Time until the first token.",
    "e2e_request_latency_seconds": "Time from arrival to end.",
    "request_queue_time_seconds": "Time until the request first ran.",
    "request_prefill_time_seconds": "Time from running to the first token.",
    "request_decode_time_seconds": "Time from the first token to the end.",
    "request_inference_time_seconds": "Time from running to the end.",
}
_TOKEN_TIMES = {
    "inter_token_latency_seconds": "Time between two outputs of a request.",
    "request_time_per_output_token_seconds": "Mean time per token after the first, per request.",
}
_COUNTS = {
    "request_prompt_tokens": "Tokens of the prompt.",
    "request_generation_tokens": "Tokens of the output.",
}
TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of the metrics."""


class Metrics:
    """The metrics of a server.

    Args:
        model_name: value of the label `model_name`.
        max_model_len: bound of the counts of tokens.
    """

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self.engine = _EngineCollector(self._labels)
        self._registry.register(self.engine)
        counts = _steps_up_to(max_model_len)
        buckets = dict.fromkeys(_TIMES, _SECONDS) | dict.fromkeys(_TOKEN_TIMES, _TOKEN_SECONDS)
        self._histograms = {
            name: Histogram(
                f"vllm:{name}",
                text,
                [*self._labels],
                buckets=buckets.get(name, counts),
                registry=self._registry,
            ).labels(**self._labels)
            for name, text in (_TIMES | _TOKEN_TIMES | _COUNTS).items()
        }
        self._ended = Counter(
            "vllm:request_success_total",
            "Requests that have ended.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._ended.labels(**self._labels, finished_reason=reason)

    def timer(self) -> "Timer":
        """Note that a request has arrived."""
        return Timer(self)

    def text(self) -> bytes:
        """All metrics, with the engine's as they were noted last in `engine.stats`."""
        return generate_latest(self._registry)

    def observe(self, name: str, value: float) -> None:
        """Note a value of a histogram."""
        self._histograms[name].observe(value)

    def count_end(self, reason: str) -> None:
        """Count a request that has ended."""
        self._ended.labels(**self._labels, finished_reason=reason).inc()


class Timer:
    """Notes when the outputs of a request come."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrival = time.time()
        self._newest: float | None = None
        self._num_tokens = 0
        self._reason = "abort"

    def note(self, output: RequestOutput) -> None:
        """Note an output that is there now."""
        now = time.perf_counter()
        num_tokens = sum(len(one.token_ids) for one in output.outputs)
        self._num_tokens += num_tokens
        if self._newest is not None and num_tokens:
            self._metrics.observe("inter_token_latency_seconds", now - self._newest)
        self._newest = now
        if output.finished:
            self._reason = str(output.outputs[-1].finish_reason)
            self._note_end(output)

    def close(self) -> None:
        """Count the request, as aborted if its end was not noted."""
        self._metrics.count_end(self._reason)

    def _note_end(self, output: RequestOutput) -> None:
        observe = self._metrics.observe
        observe("request_prompt_tokens", len(output.prompt_token_ids))
        observe("request_generation_tokens", self._num_tokens)
        times = output.metrics
        if times is None or times.finished_time is None:
            return
        observe("e2e_request_latency_seconds", times.finished_time - self._arrival)
        if times.first_scheduled_time is None or times.first_token_time is None:
            return
        observe("time_to_first_token_seconds", times.first_token_time - self._arrival)
        observe("request_queue_time_seconds", times.first_scheduled_time - times.arrival_time)
        observe("request_prefill_time_seconds", times.first_token_time - times.first_scheduled_time)
        observe("request_inference_time_seconds", times.finished_time - times.first_scheduled_time)
        decode = times.finished_time - times.first_token_time
        observe("request_decode_time_seconds", decode)
        if self._num_tokens > 1:
            observe("request_time_per_output_token_seconds", decode / (self._num_tokens - 1))


class _EngineCollector(Collector):
    """The totals and gauges of the engine."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.stats: EngineStats | None = None
        """As they were noted last; None: not yet."""
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        for metric in metrics_of(self.stats) if self.stats else ():
            match metric:
                case Vector():
                    yield self._per_position(metric)
                case EngineHistogram():
                    yield self._histogram(metric)
                case _:
                    yield self._single(metric)

    def _single(self, metric: Gauge | EngineCounter) -> GaugeMetricFamily | CounterMetricFamily:
        kind = GaugeMetricFamily if isinstance(metric, Gauge) else CounterMetricFamily
        family = kind(metric.name, metric.help, labels=[*self._labels])
        family.add_metric([*self._labels.values()], metric.value)
        return family

    def _histogram(self, metric: EngineHistogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(metric.name, metric.help, labels=[*self._labels])
        buckets = list(metric.buckets.items())
        family.add_metric([*self._labels.values()], buckets, metric.sum)
        return family

    def _per_position(self, metric: Vector) -> CounterMetricFamily:
        labels = [*self._labels, "position"]
        family = CounterMetricFamily(metric.name, metric.help, labels=labels)
        for position, value in enumerate(metric.values):
            family.add_metric([*self._labels.values(), str(position)], value)
        return family


def _steps_up_to(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, .. up to a limit."""
    steps = [number * 10**power for power in range(12) for number in (1, 2, 5)]
    return [step for step in steps if step <= limit] or [1]
