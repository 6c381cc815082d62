"""The machine of a measurement, with its copy bandwidth, read bandwidth and matrix rate."""

import datetime
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mtpkit.bench.timing import median_seconds, release_memory
from mtpkit.platform import device_name


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
    """Bytes per second, read and written, of a large copy. Shares of a bandwidth are shares of this one."""
    read_bandwidth: float
    """Bytes per second of a sum over as much: work that writes little may come close to it, past a copy."""
    matrix_rate: float
    """FLOPs per second of a large bf16 (on a CPU: fp32) product of random matrices."""

    def __str__(self) -> str:
        """One line for people."""
        rates = f"copy {self.copy_bandwidth / 1e12:.3g} TB/s, reads alone {self.read_bandwidth / 1e12:.3g} TB/s"
        where = f"{self.device}, commit {self.commit or 'unknown'}, {self.date}"
        return f"{where}: {rates}, matrix product {self.matrix_rate / 1e12:.3g} TFLOP/s"


def measure_machine(device: torch.device) -> Machine:
    """Describe the device and time a copy, a sum and a product, larger than its caches on a GPU and small on a CPU."""
    rates = _measure_rates(device)
    release_memory(device)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Machine(describe_device(device), commit(), date, *rates)


def _measure_rates(device: torch.device) -> tuple[float, float, float]:
    """Copy bandwidth, read bandwidth and matrix rate."""
    large = device.type == "cuda"
    size, width = (1 << 31, 8192) if large else (1 << 24, 512)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    numbers = torch.ones(size // 4, device=device)
    left, right = torch.randn(2, width, width, device=device, dtype=torch.bfloat16 if large else torch.float32)
    return (
        2 * size / median_seconds(partial(torch.empty_like(source).copy_, source), device),
        size / median_seconds(numbers.sum, device),
        2 * width**3 / median_seconds(partial(torch.matmul, left, right), device),
    )
