"""Time of calls, of named parts of a run, and of each kernel that a GPU ran."""

import functools
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_Mark = float | torch.cuda.Event


def release_memory(device: torch.device) -> None:
    """Give the memory of unreachable objects, including those in reference cycles, back to a
    GPU."""
    if device.type == "cuda":
        # First the collector: torch can give back only what nothing refers to.
        gc.collect()
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(
    function: Callable[[], object], device: torch.device, repeats: int = 20, warm_up: int = 3
) -> float:
    """Median time of a call, on a GPU by its own clock."""
    for _ in range(warm_up):
        function()
    spans = []
    for _ in range(repeats):
        start = _mark(device)
        function()
        spans.append((start, _mark(device)))
    # Times are read after all calls: waiting for each call's end would leave the GPU idle between.
    return statistics.median(map(_seconds, spans))


def mean_seconds(
    calls: Sequence[Callable[[], object]], device: torch.device, capture: bool, repeats: int = 20
) -> float:
    """Mean time of one of `calls` when they run one after another, from the median of several such
    runs.

    Each call should work on its own memory, all of which together exceeds the cache. Results are
    kept until the last call has run, so that outputs do not share memory either.

    Args:
        capture: run them as one CUDA graph, so that the host's time does not count; ignored on a
            CPU.
    """

    def run() -> list[object]:
        return [call() for call in calls]

    if device.type != "cuda" or not capture:
        return median_seconds(run, device, repeats) / len(calls)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()  # compiles kernels, which a capture must not do
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_seconds(graph.replay, device, repeats) / len(calls)


class Stopwatch:
    """Adds up spans by name, with the GPU's own clock or else the wall clock."""

    def __init__(self, device: torch.device):
        self._device = device
        self._spans: defaultdict[str, list[tuple[_Mark, _Mark]]] = defaultdict(list)
        self._open: dict[str, _Mark] = {}

    def start(self, name: str) -> None:
        """Begin a span."""
        self._open[name] = _mark(self._device)

    def stop(self, name: str) -> None:
        """End a span."""
        self._spans[name].append((self._open.pop(name), _mark(self._device)))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the code inside as a span."""
        self.start(name)
        yield
        self.stop(name)

    def attach(self, owner: object, method: str, name: str) -> None:
        """Time each call of an object's method as a span, from now on."""
        call = getattr(owner, method)

        @functools.wraps(call)
        def timed(*args: Any, **named: Any) -> Any:
            with self.span(name):
                return call(*args, **named)

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        """Seconds per name since the last call. Waits for the spans to end, not for other work."""
        sums = {name: sum(map(_seconds, spans)) for name, spans in self._spans.items()}
        self._spans.clear()
        return sums


def _mark(device: torch.device) -> _Mark:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(span: tuple[_Mark, _Mark]) -> float:
    start, end = span
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    end.synchronize()
    return start.elapsed_time(end) / 1e3


@dataclass(frozen=True)
class Kernel:
    """One kernel, copy or fill."""

    name: str
    start: float
    end: float
    """Seconds since the trace's first kernel started."""
    launch: int
    """Number of the host's call that started it; all kernels of a CUDA graph share one."""


@dataclass(frozen=True)
class Trace:
    """Kernels in the order of their start."""

    kernels: Sequence[Kernel]

    @property
    def span(self) -> float:
        """Seconds from the first kernel's start to the last one's end."""
        return (
            max(kernel.end for kernel in self.kernels) - self.kernels[0].start
            if self.kernels
            else 0.0
        )

    @property
    def host_gap_share(self) -> float:
        """Share of the span in which nothing ran between kernels that different host calls started.

        Pauses between the kernels of one CUDA graph are the device's own and are not counted.
        Tracing slows the host more than the device, so that without tracing the share is at most
        this.
        """
        gaps = 0.0
        latest = float("-inf")
        for kernel, following in pairwise(self.kernels):
            # Kernels of several streams overlap: a gap begins where the last of them has ended.
            latest = max(latest, kernel.end)
            if following.launch != kernel.launch:
                gaps += max(0.0, following.start - latest)
        return gaps / self.span if self.span else 0.0

    @property
    def busy_seconds(self) -> float:
        """Seconds in which at least one kernel ran."""
        busy = 0.0
        latest = float("-inf")
        for kernel in self.kernels:
            # Only the part after all earlier kernels, so that overlapping ones count once.
            busy += max(0.0, kernel.end - max(kernel.start, latest))
            latest = max(latest, kernel.end)
        return busy

    def seconds_by_name(self) -> dict[str, float]:
        """Seconds of all kernels of a name, the longest first."""
        totals: dict[str, float] = defaultdict(float)
        for kernel in self.kernels:
            totals[kernel.name] += kernel.end - kernel.start
        return dict(sorted(totals.items(), key=lambda item: -item[1]))


def can_trace(device: torch.device) -> bool:
    """Whether `trace_kernels` can trace the device."""
    return device.type == "cuda"


def trace_kernels(function: Callable[[], object], device: torch.device) -> Trace:
    """Run `function` and trace its kernels, on a GPU.

    The tracer stays attached to the process, and launches of CUDA graphs take longer from then on:
    do all timing first.
    """
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        function()
        torch.cuda.synchronize(device)
    results = profiler.profiler.kineto_results
    events = [
        e
        for e in results.events()
        if e.device_type() == DeviceType.CUDA and not e.is_user_annotation()
    ]
    events.sort(key=lambda e: e.start_ns())
    # The clock counts from 1970: as floats, its values would be too coarse for the time of a
    # kernel.
    times = [e.start_ns() - events[0].start_ns() for e in events]
    return Trace(
        [
            Kernel(e.name(), start / 1e9, (start + e.duration_ns()) / 1e9, e.correlation_id())
            for e, start in zip(events, times, strict=True)
        ]
    )
