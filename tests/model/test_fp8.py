"""A base whose weights are kept in fp8."""

import pytest
import torch

from mtpkit.errors import UserError
from mtpkit.kernels.linear import quantize_rows
from mtpkit.model import SequenceInput, base_forward, build_model, unroll_depths
from mtpkit.model.formats.weight import QuantizedWeight
from mtpkit.model.fp8 import use_fp8_base
from tests.model.toy import CONFIG, toy_tokens


def built(device="cpu"):
    config = CONFIG.replace(pattern="M*-M*-", add_qkv_bias=True)
    return build_model(config, dtype=torch.bfloat16, device=device, seed=3)


@torch.no_grad()
def test_the_base_is_rounded_and_the_heads_are_not(device):
    ids = toy_tokens(32, batch=2).to(device)
    plain = built(device)
    model = built(device)
    want = base_forward(plain, ids, SequenceInput())
    use_fp8_base(model)
    have = base_forward(model, ids, SequenceInput())
    assert 1e-3 < (have - want).float().norm() / want.float().norm() < 0.15
    rounded = {
        name for name, module in model.named_modules() if isinstance(module, QuantizedWeight)
    }
    assert rounded and all(name.startswith("decoder.") for name in rounded)
    assert {name.split(".")[-2] for name in rounded} == {
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
        "out_proj",
    }
    for name, parameter in plain.named_parameters():
        if name in rounded:
            values, scales = quantize_rows(parameter)
            assert torch.equal(
                model.get_submodule(name).widened(torch.float32), values.float() * scales
            )
        else:
            assert torch.equal(model.get_parameter(name), parameter)
    depths = zip(
        unroll_depths(plain, want, ids, 2), unroll_depths(model, want, ids, 2), strict=True
    )
    assert all(torch.equal(a, b) for a, b in depths)


def test_a_gpu_without_fp8_is_refused(monkeypatch):
    model = built()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(
        model, "parameters", lambda: iter([torch.empty(0, device="meta").as_subclass(OnGpu)])
    )
    with pytest.raises(
        UserError, match=r"^base_fp8: NVIDIA A100 has no fp8 products; set base_fp8=false$"
    ):
        use_fp8_base(model)


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    device = torch.device("cuda", 0)
