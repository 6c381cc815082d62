"""AdamW against its definition in fp64, over several steps."""

import pytest
import torch

from tests.kernels.recurrence import relative

SETTINGS = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def definition(master, grads, lr, betas, eps, weight_decay):
    """Weights and moments in fp64 after one update per gradient."""
    weight = master.double()
    first = torch.zeros_like(master).double()
    second = torch.zeros_like(master).double()
    for step, grad in enumerate(map(torch.Tensor.double, grads), start=1):
        first = betas[0] * first + (1 - betas[0]) * grad
        second = betas[1] * second + (1 - betas[1]) * grad**2
        unbiased = first / (1 - betas[0] ** step), second / (1 - betas[1] ** step)
        weight = weight * (1 - lr * weight_decay) - lr * unbiased[0] / (unbiased[1].sqrt() + eps)
    return weight, first, second


@pytest.mark.parametrize("eps", [1e-8, 1e-2])
@pytest.mark.parametrize("size", [1, 63, 4096, 70_001])
def test_steps(twin, size, eps):
    master = torch.randn(size)
    grads = torch.randn(3, size)
    settings = SETTINGS | {"eps": eps}
    state = [torch.zeros(size, device=twin.device) for _ in range(3)]
    state[0].copy_(master)
    # Gradients are part of a larger buffer, at no even place.
    buffer = torch.full((size + 2,), torch.nan, device=twin.device)
    for step, grad in enumerate(grads, start=1):
        buffer[1:-1] = grad
        twin("adamw").adamw_(buffer[1:-1], *state, step, **settings)
    for have, want in zip(state, definition(master, grads, **settings), strict=True):
        assert relative(have.cpu(), want) < 1e-5
    assert torch.equal(buffer[1:-1].cpu(), state[0].cpu()) and buffer[[0, -1]].isnan().all()


def test_a_coordinate_that_never_moved(twin):
    """Moments of an unused weight are 0, and eps keeps the step finite."""
    state = [torch.ones(2, device=twin.device), *torch.zeros(2, 2, device=twin.device)]
    twin("adamw").adamw_(torch.zeros(2, device=twin.device), *state, 1, **SETTINGS)
    assert torch.allclose(state[0].cpu(), torch.full((2,), 1 - 1e-3))
