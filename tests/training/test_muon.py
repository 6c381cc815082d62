"""Muon against its definition and torch's own, and the work shared by ranks."""

import pytest
import torch

from mtpkit.training.config.settings import OptimizerConfig
from mtpkit.training.main_grad import gradients_into_main
from mtpkit.training.optimizer import HeadOptimizer, orthogonalize
from tests.training.toy import toy_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (1, 7)])
def test_singular_values_become_about_one(shape, dtype, device):
    torch.manual_seed(0)
    left, values, right = torch.linalg.svd(torch.randn(*shape, device=device), full_matrices=False)
    matrix = (
        left
        @ torch.diag(torch.linspace(0.05, 1, len(values), device=device) * values.max())
        @ right
    )
    result = orthogonalize(matrix, dtype)
    assert result.dtype == torch.float32 and result.shape == matrix.shape
    rotated = left.t() @ result @ right.t()
    assert ((rotated.diagonal() > 0.6) & (rotated.diagonal() < 1.3)).all()
    assert (rotated - torch.diag(rotated.diagonal())).abs().max() < 0.03


def test_fp32_weights_take_fp32_steps(device):
    """With bf16 inside, ranks whose gradients differ in the last bits would take steps that differ
    visibly."""
    toy_model()  # process groups
    torch.manual_seed(0)
    layer = torch.nn.Linear(24, 12, bias=False, device=device)
    optimizer = HeadOptimizer(
        layer.parameters(), OptimizerConfig(kind="muon", weight_decay=0.0, clip_grad=0.0)
    )
    before = layer.weight.detach().clone()
    gradient = torch.randn(12, 24, device=device)
    layer.weight.main_grad.copy_(gradient)
    optimizer.step(1.0)
    expected = orthogonalize(gradient.double(), torch.float64) * (0.2 * 24**0.5)
    torch.testing.assert_close(before - layer.weight, expected, rtol=0, atol=1e-5)


def test_a_matrix_of_zeros_stays_one():
    assert not orthogonalize(torch.zeros(3, 4)).any()


def test_steps_equal_torch():
    toy_model()  # process groups
    torch.manual_seed(0)
    ours = torch.nn.Sequential(torch.nn.Linear(24, 12), torch.nn.Linear(12, 16))
    theirs = torch.nn.Sequential(torch.nn.Linear(24, 12), torch.nn.Linear(12, 16))
    theirs.load_state_dict(ours.state_dict())
    optimizer = HeadOptimizer(
        ours.parameters(),
        OptimizerConfig(kind="muon", weight_decay=0.1, clip_grad=0.0, momentum=0.6),
    )
    matrices = torch.optim.Muon(
        [p for p in theirs.parameters() if p.ndim == 2],
        weight_decay=0.1,
        momentum=0.6,
        adjust_lr_fn="match_rms_adamw",
    )
    rest = torch.optim.AdamW(
        [p for p in theirs.parameters() if p.ndim < 2], betas=(0.9, 0.95), weight_decay=0.0
    )
    before = [parameter.detach().clone() for parameter in ours.parameters()]
    for _ in range(4):
        x = torch.randn(32, 24)
        with gradients_into_main(ours):
            ours(x).square().sum().backward()
        optimizer.step(1e-2)
        theirs(x).square().sum().backward()
        for other in (matrices, rest):
            for group in other.param_groups:
                group["lr"] = 1e-2
            other.step()
            other.zero_grad()
    for start, a, b in zip(before, ours.parameters(), theirs.parameters(), strict=True):
        assert (a - b).norm() < 0.05 * (b - start).norm()  # theirs is rounded to bf16 inside
