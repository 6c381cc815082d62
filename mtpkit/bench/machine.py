"""Where a measurement was made."""

import subprocess
from pathlib import Path

import torch


def describe_device(device: torch.device) -> str:
    """Name of the GPU, or of the CPU with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
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
