"""What a GPU did while some code ran, kernel by kernel."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


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
        return max(kernel.end for kernel in self.kernels) - self.kernels[0].start if self.kernels else 0.0

    @property
    def host_gap_share(self) -> float:
        """Share of the span in which nothing ran between kernels that different host calls started.

        Pauses between the kernels of one CUDA graph are the device's own and are not counted. Tracing slows the host
        more than the device, so that without it the share is this or less.
        """
        gaps, latest = 0.0, float("-inf")
        for kernel, following in pairwise(self.kernels):
            latest = max(latest, kernel.end)
            if following.launch != kernel.launch:
                gaps += max(0.0, following.start - latest)
        return gaps / self.span if self.span else 0.0

    @property
    def busy_seconds(self) -> float:
        """Seconds in which at least one kernel ran."""
        busy, latest = 0.0, float("-inf")
        for kernel in self.kernels:
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
    """Whether `trace_kernels` has anything to see there."""
    return device.type == "cuda"


def trace_kernels(function: Callable[[], object], device: torch.device) -> Trace:
    """Run `function` and trace its kernels, on a GPU.

    The tracer stays attached to the process, and launches of CUDA graphs take longer from then on: time first.
    """
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        function()
        torch.cuda.synchronize(device)
    results = profiler.profiler.kineto_results
    events = [e for e in results.events() if e.device_type() == DeviceType.CUDA and not e.is_user_annotation()]
    events.sort(key=lambda e: e.start_ns())
    # The clock counts from 1970: floats that hold it lose what a kernel takes.
    times = [e.start_ns() - events[0].start_ns() for e in events]
    return Trace(
        [
            Kernel(e.name(), start / 1e9, (start + e.duration_ns()) / 1e9, e.correlation_id())
            for e, start in zip(events, times, strict=True)
        ]
    )
