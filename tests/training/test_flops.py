"""Model FLOPs against counts by hand, and the rates of devices."""

import pytest
import torch

from mtpkit.bench.shapes import NEMOTRON_H_8B
from mtpkit.model.matrices import layer_matrices, moe_matrices
from mtpkit.training import flops
from mtpkit.training.flops import model_flops_utilization, peak_rate, step_flops
from tests.training.toy import CONFIG, toy_model


@pytest.mark.parametrize(("repeated", "applied"), [(True, 3), (False, 1)])
def test_every_weight_counts_as_often_as_it_is_used(repeated, applied):
    model = toy_model(mtp_use_repeated_layer=repeated)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    base = sum(size for name, size in sizes.items() if name.startswith("decoder."))
    heads = sum(size for name, size in sizes.items() if name.startswith("mtp."))
    assert step_flops(model, 3) == 2 * base + 6 * applied * heads + 4 * 3 * CONFIG.vocab_size * CONFIG.hidden_size


def test_of_experts_those_count_that_a_token_uses():
    changes = dict(num_moe_experts=4, moe_ffn_hidden_size=64, moe_router_topk=1, hidden_size=64)
    config = CONFIG.replace(pattern="*E", **changes)
    always, expert = moe_matrices(config)
    head = sum(layer_matrices(config, letter) for letter in "*-") + 2 * 64**2
    expected = 2 * (layer_matrices(config, "*") + always + expert) + 6 * 3 * head + 4 * 3 * config.vocab_size * 64
    got = step_flops(toy_model(pattern="*E", **changes), 3)
    assert expected < got < 1.03 * expected  # norms


def test_the_8b_shape_takes_25_gflop_a_token():
    """As issue 4 counts; by matrices, since the model is too large to build here."""
    config = NEMOTRON_H_8B.replace(mtp_pattern="*-")
    base = sum(layer_matrices(config, letter) for letter in config.pattern)
    head = sum(layer_matrices(config, letter) for letter in "*-") + 2 * config.hidden_size**2
    total = 2 * base + 6 * 3 * head + 4 * 3 * config.vocab_size * config.hidden_size
    assert total == pytest.approx(25.0e9, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H200", 790e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_rates_by_name(name, rate):
    assert peak_rate(name) == rate


def test_utilization_is_shown_of_known_devices_alone(monkeypatch):
    assert model_flops_utilization(1e4, 25e9, 1, torch.device("cpu")) is None
    monkeypatch.setattr(flops.torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert model_flops_utilization(31_600, 25e9, 2, torch.device("cuda", 0)) == pytest.approx(0.5)
