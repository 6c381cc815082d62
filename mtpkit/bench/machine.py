"""The machine of a measurement, with its copy bandwidth, read bandwidth and matrix rates."""

import datetime
import math
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mtpkit.bench.timing import median_seconds, release_memory
from mtpkit.platform import device_name

_FIRST_WITH_FP8 = (8, 9)
"""Compute capability of the oldest GPUs that have fp8."""
_SUSTAINED_SECONDS = 2.0
"""Seconds of work after which a GPU has come down to the clock that its power limit allows."""


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
    """The commit of mtpkit's checkout, with `-dirty` when files differ from it; None outside a
    checkout."""
    # No tag matches, so that the name is the commit's hash, whatever tags a checkout has.
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@dataclass(frozen=True)
class Machine:
    """A device and its rates, measured in the same run as the results that are compared with
    them."""

    device: str
    commit: str | None
    date: str
    copy_bandwidth: float
    """Bytes read and written per second by a large copy. All shares of a bandwidth are shares of
    this one."""
    read_bandwidth: float
    """Bytes per second of a sum over as much memory. Work that writes little may come close to it
    and beat a copy."""
    matrix_rate: float
    """FLOPs per second of a large bf16 (on a CPU: fp32) product of random matrices, for some
    milliseconds."""
    sustained_rate: float | None = None
    """Rate of the same product repeated on a GPU for seconds, until the GPU runs at its power
    limit; None: not measured."""
    fp8_rate: float | None = None
    """FLOPs per second of a product of the same matrices in fp8 (e4m3, one scale for each matrix,
    fast accumulation), into bf16; None: a CPU, or a GPU without fp8."""

    def rates(self, devices: int = 1, sustained: bool = False) -> tuple[float, float, float | None]:
        """Copy bandwidth, matrix rate and fp8 rate of several such devices together.

        Args:
            sustained: take the sustained matrix rate, which must have been measured; that of fp8
                stays the one of a single product.
        """
        matrix_rate = self.sustained_rate if sustained else self.matrix_rate
        assert matrix_rate is not None, "the sustained rate was not measured"
        fp8_rate = None if self.fp8_rate is None else devices * self.fp8_rate
        return devices * self.copy_bandwidth, devices * matrix_rate, fp8_rate

    def __str__(self) -> str:
        """One line for people."""
        rates = (
            f"copy {self.copy_bandwidth / 1e12:.3g} TB/s, reads alone"
            f" {self.read_bandwidth / 1e12:.3g} TB/s"
        )
        where = f"{self.device}, commit {self.commit or 'unknown'}, {self.date}"
        sustained = f", {self.sustained_rate / 1e12:.3g} for seconds" if self.sustained_rate else ""
        fp8 = f", in fp8 {self.fp8_rate / 1e12:.0f} TFLOP/s" if self.fp8_rate else ""
        return (
            f"{where}: {rates}, matrix product {self.matrix_rate / 1e12:.3g} TFLOP/s{sustained}"
            f"{fp8}"
        )


def measure_machine(device: torch.device, sustained: bool = False) -> Machine:
    """Describe the device and time a copy, a sum and a product, larger than its caches on a GPU and
    small on a CPU.

    Args:
        sustained: measure `Machine.sustained_rate` too, for work that keeps the matrix units busy
            for seconds.
    """
    rates = _measure_rates(device, sustained)
    # The caches of engines, or the model to train, need the memory of these tensors.
    release_memory(device)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Machine(describe_device(device), commit(), date, *rates)


def _measure_rates(
    device: torch.device, sustained: bool
) -> tuple[float, float, float, float | None, float | None]:
    """Copy bandwidth, read bandwidth, matrix rate, sustained rate if requested, and fp8 rate if the
    device has fp8."""
    large = device.type == "cuda"
    size, width = (1 << 31, 8192) if large else (1 << 24, 512)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    # float32, of as many bytes as `source`: integers would be summed as int64.
    numbers = torch.ones(size // 4, device=device)
    # Random numbers: a product of zeros takes less power, and runs at a higher clock.
    left, right = torch.randn(
        2, width, width, device=device, dtype=torch.bfloat16 if large else torch.float32
    )
    copied = median_seconds(partial(torch.empty_like(source).copy_, source), device)
    summed = median_seconds(numbers.sum, device)
    product = partial(torch.matmul, left, right, out=torch.empty_like(left))
    flops = 2 * width**3
    alone = median_seconds(product, device)
    fp8 = median_seconds(fp8_product(left, right), device) if _has_fp8(device) else None
    # Last: the lower clock that it ends with would slow the others.
    lasting = _sustained_seconds(product, device, alone) if sustained and large else None
    return (
        2 * size / copied,
        size / summed,
        flops / alone,
        lasting and flops / lasting,
        fp8 and flops / fp8,
    )


def _has_fp8(device: torch.device) -> bool:
    """Whether a device multiplies fp8 in its matrix units: an NVIDIA GPU from Ada on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_WITH_FP8


def fp8_product(left: Tensor, right: Tensor) -> Callable[[], Tensor]:
    """Return a function that multiplies left [M, K] with the transpose of right [N, K], both
    rounded to e4m3 here, into bf16 [M, N]."""
    scale = torch.ones((), device=left.device)
    return partial(
        torch._scaled_mm,
        left.to(torch.float8_e4m3fn),
        # The product takes its second matrix column by column.
        right.to(torch.float8_e4m3fn).t(),
        scale_a=scale,
        scale_b=scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _sustained_seconds(product: Callable[[], object], device: torch.device, alone: float) -> float:
    """Time of a product in the second half of a run of `_SUSTAINED_SECONDS`, given the time `alone`
    of a single one."""
    count = max(1, math.ceil(_SUSTAINED_SECONDS / 2 / alone))

    def half() -> None:
        for _ in range(count):
            product()

    # The untimed first half brings the clock down.
    return median_seconds(half, device, repeats=1, warm_up=1) / count
