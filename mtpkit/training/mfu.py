"""Model FLOPs utilization (MFU): the share of a GPU's stated peak that a training step's model FLOPs take."""

import re

import torch

from mtpkit.platform import device_name

PEAK_RATES = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "A30": 165e12,
    "A40": 150e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}
"""bf16 FLOPs per second by what is in a device's name, the first match counting. All are Tensor Core peaks for dense
matrices from NVIDIA's data sheets, half of the rates with sparsity where those alone are given: a large product reaches
about 0.8 of its GPU's (790e12 on an H200)."""


def peak_rate(device_name: str) -> float | None:
    """Stated dense bf16 FLOPs per second of a device; None if `PEAK_RATES` lacks it.

    Example: `NVIDIA H100 80GB HBM3` and `NVIDIA GH200 480GB` are 989e12, `NVIDIA H100 PCIe` is 756e12.
    """
    found = (rate for name, rate in PEAK_RATES.items() if re.search(rf"\b{name}\b", device_name))
    return next(found, None)


def find_peak(device: torch.device) -> tuple[float | None, str | None]:
    """The `peak_rate` of a device, and what to tell the user where a GPU's is not known."""
    rate = peak_rate(device_name(device))
    known = rate is not None or device.type != "cuda"
    return rate, None if known else f"no MFU is given: the stated peak rate of {device_name(device)} is not known"


def utilization(tokens_per_s: float, flops: float, num_devices: int, peak: float | None) -> float | None:
    """MFU (Chowdhery et al. 2022, arXiv:2204.02311); None where the peak is not known, as on a CPU.

    Args:
        tokens_per_s: of all devices together.
        flops: per token, see `mtpkit.model.flops.step_flops`.
        peak: FLOPs per second of one device, `peak_rate`.
    """
    return None if peak is None else tokens_per_s * flops / (num_devices * peak)
