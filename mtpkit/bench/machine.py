"""Where a measurement was made, and what that machine can do."""

import datetime
import gc
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mtpkit.errors import UserError
from mtpkit.platform import device_name

LARGE_SHAPES = ("nemotron-h-8b", "nemotron-3-nano")
"""Those of `mtpkit.bench.shapes` with billions of weights: too many for a CPU to hold, or to be through with."""


def require_gpu(model: str, device: torch.device) -> None:
    """Refuse a large shape on a CPU.

    Raises:
        UserError: the model is one.
    """
    if model in LARGE_SHAPES and device.type != "cuda":
        raise UserError(f"{model} needs a GPU; --model nemotron-h-tiny, or a model directory, runs on a CPU")


def describe_device(device: torch.device) -> str:
    """Name of the GPU, or of the CPU with the number of threads that torch uses."""
    if device.type == "cuda":
        return device_name(device)
    threads = torch.get_num_threads()
    return f"{_cpu_model()}, {threads} thread{'s' if threads > 1 else ''}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "CPU")


def commit() -> str | None:
    """The commit of mtpkit's checkout, with `-dirty` when files differ from it; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@dataclass(frozen=True)
class Machine:
    """A device, and the rates that figures are set against, measured in the same run."""

    device: str
    commit: str | None
    date: str
    copy_bandwidth: float
    """Bytes a second, read and written, of a large copy: what shares of a bandwidth are shares of."""
    read_bandwidth: float
    """Bytes a second of a sum over as much: work that writes little may come close to it, past a copy."""
    matrix_rate: float
    """FLOPs a second of a large bf16 (on a CPU: fp32) product of random matrices."""

    def __str__(self) -> str:
        """In one line, for people."""
        rates = f"copy {self.copy_bandwidth / 1e12:.3g} TB/s, reads alone {self.read_bandwidth / 1e12:.3g} TB/s"
        where = f"{self.device}, commit {self.commit or 'unknown'}, {self.date}"
        return f"{where}: {rates}, matrix product {self.matrix_rate / 1e12:.3g} TFLOP/s"


def measure_machine(device: torch.device) -> Machine:
    """Describe the device and time a copy, a sum and a product, larger than its caches on a GPU and small on a CPU."""
    large = device.type == "cuda"
    size = 1 << (31 if large else 24)
    machine = Machine(
        device=describe_device(device),
        commit=commit(),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        copy_bandwidth=_copy_bandwidth(size, device),
        read_bandwidth=_read_bandwidth(size, device),
        matrix_rate=_matrix_rate(8192, torch.bfloat16, device) if large else _matrix_rate(512, torch.float32, device),
    )
    release_memory(device)
    return machine


def _copy_bandwidth(size: int, device: torch.device) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), device)


def _read_bandwidth(size: int, device: torch.device) -> float:
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    return size / median_seconds(source.sum, device)


def _matrix_rate(width: int, dtype: torch.dtype, device: torch.device) -> float:
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    return 2 * width**3 / median_seconds(lambda: left @ right, device)


def release_memory(device: torch.device) -> None:
    """Give memory of objects that nobody holds back to a GPU, even where they hold each other."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(function: Callable[[], object], device: torch.device, repeats: int = 20, warm_up: int = 3) -> float:
    """Median time of a call, on a GPU as its own clock sees it."""
    for _ in range(warm_up):
        function()
    if device.type != "cuda":
        return statistics.median(_wall_seconds(function) for _ in range(repeats))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def _wall_seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def mean_seconds(
    calls: Sequence[Callable[[], object]], device: torch.device, capture: bool, repeats: int = 20
) -> float:
    """Time of one of `calls` where they run one after another, from the median of several such runs.

    Each call should work on memory of its own, more in all than a cache holds. What the calls return is kept until the
    last of them has run, so that outputs do not share memory either.

    Args:
        capture: run them as one CUDA graph, so that the host's part is not seen; on a CPU that means nothing.
    """

    def run() -> list[object]:
        return [call() for call in calls]

    if device.type != "cuda" or not capture:
        return median_seconds(run, device, repeats) / len(calls)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()  # compiles kernels, which a capture must not
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_seconds(graph.replay, device, repeats) / len(calls)
