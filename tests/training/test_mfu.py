"""Stated peaks of devices, and the share of them that a step takes."""

import pytest
import torch

from mtpkit.training import metrics
from mtpkit.training.metrics import find_peak, utilization


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H800", 989e12),
        ("NVIDIA H800 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peaks_are_those_of_the_data_sheets(monkeypatch, name, rate):
    monkeypatch.setattr(metrics, "device_name", lambda device: name)
    assert find_peak(torch.device("cuda", 0))[0] == rate


def test_utilization_is_a_share_of_all_devices_peaks():
    assert utilization(39_560, 25e9, 2, 989e12) == pytest.approx(0.5)
    assert utilization(39_560, 25e9, 2, None) is None


def test_a_gpu_that_is_not_known_is_named_and_has_no_peak(monkeypatch):
    assert find_peak(torch.device("cpu")) == (None, None)
    monkeypatch.setattr(metrics, "device_name", lambda device: "NVIDIA H200")
    assert find_peak(torch.device("cuda", 0)) == (989e12, None)
    monkeypatch.setattr(metrics, "device_name", lambda device: "Voodoo 2")
    peak, says = find_peak(torch.device("cuda", 0))
    assert peak is None and "Voodoo 2 is not known" in says
