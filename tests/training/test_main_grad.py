"""Weight gradients of a head that is used at every depth."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mtpkit.training.config import OptimizerConfig
from mtpkit.training.depths import run_depths
from mtpkit.training.freeze import freeze_base
from mtpkit.training.loss import LossOptions
from mtpkit.training.main_grad import gradients_into_main
from mtpkit.training.optimizer import HeadOptimizer
from tests.training.toy import toy_batch, toy_model


def used_three_times(module, recompute):
    """The gradients of the uses are 1, 1 and 256: in bf16 256 + 1 is 256."""

    def use(x):
        with gradients_into_main(module):
            return module(x)

    uses = [
        torch.full((1, 1), value, dtype=torch.bfloat16) for value in (1.0, 1.0, 256.0)
    ]  # the backward begins with the last
    outputs = [checkpoint(use, x, use_reentrant=False) if recompute else use(x) for x in uses]
    torch.cat(outputs).sum().backward()


@pytest.mark.parametrize("recompute", [False, True])
def test_nothing_is_lost_between_uses(recompute):
    module = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    used_three_times(module, recompute)
    assert module.weight.grad == 256  # what autograd does by itself
    module.weight.grad = None
    module.weight.main_grad = torch.zeros(1, 1)
    for total in (258, 516):
        used_three_times(module, recompute)
        assert module.weight.main_grad == total and module.weight.grad is None
    assert isinstance(module.weight, torch.nn.Parameter)


def test_parameters_return_after_an_error():
    module = torch.nn.Linear(2, 2)
    module.weight.main_grad = torch.zeros(2, 2)
    weight = module.weight
    with pytest.raises(RuntimeError), gradients_into_main(module):
        assert module.weight is not weight
        module(torch.zeros(3))
    assert module.weight is weight


@pytest.mark.parametrize("pattern", ["*-", "M*"])
def test_all_gradients_of_heads_arrive_in_fp32(pattern):
    """In bf16; those of fp32 are compared with one rank's, and with torch's optimizers, elsewhere."""
    model = toy_model(dtype=torch.bfloat16, mtp_pattern=pattern)
    heads = freeze_base(model)
    losses, _ = run_depths(model, toy_batch([[20]]), 3, "serving", LossOptions())
    losses.sum().backward()
    want = {name: parameter.grad for name, parameter in heads.items()}
    model.zero_grad()
    HeadOptimizer(heads.values(), OptimizerConfig())
    losses, _ = run_depths(model, toy_batch([[20]]), 3, "serving", LossOptions())
    losses.sum().backward()
    for name, parameter in heads.items():
        found = parameter.main_grad
        assert parameter.grad is None and found.dtype == torch.float32
        assert (found - want[name].float()).norm() < 0.02 * want[name].float().norm(), name
