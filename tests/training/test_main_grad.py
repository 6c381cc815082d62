"""Weight gradients of a head that is used at every depth."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mtpkit.model import build_model
from mtpkit.training.config.settings import LossConfig, OptimizerConfig
from mtpkit.training.depths import run_depths
from mtpkit.training.heads import freeze_base
from mtpkit.training.main_grad import gradients_into_main
from mtpkit.training.optimizer import HeadOptimizer
from tests.training.toy import CONFIG, toy_batch, toy_model

EXPERTS = dict(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16)


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


@pytest.mark.parametrize("tokens", [7, 0])
@pytest.mark.parametrize("which", ["eh_proj", "linear_fc1", "linear_fc2"])
def test_a_linear_adds_up_its_gradient_in_fp32(device, which, tokens):
    """Contributions of single uses are not rounded to bf16 either, even for experts, which may have
    no token."""
    config = CONFIG.replace(mtp_pattern="*E", **EXPERTS)
    head = build_model(config, dtype=torch.bfloat16, device=device).mtp.layers[0]
    product = next(module for name, module in head.named_modules() if name.endswith(which))
    width = product.weight.shape[1]
    inputs = torch.randn(tokens, 1, width, device=device).bfloat16()
    slope = torch.randn(tokens, 1, len(product.weight), device=device).bfloat16()
    product.weight.main_grad = torch.ones(product.weight.shape, device=device)
    for _ in range(2):
        with gradients_into_main(product):
            output, _ = product(inputs)
        output.backward(slope)
    want = 1 + 2 * slope[:, 0].double().t() @ inputs[:, 0].double()
    assert product.weight.grad is None
    assert (product.weight.main_grad - want).norm() < 1e-6 * want.norm()


def test_parameters_return_after_an_error():
    module = torch.nn.Linear(2, 2)
    module.weight.main_grad = torch.zeros(2, 2)
    weight = module.weight
    with pytest.raises(RuntimeError), gradients_into_main(module):
        assert module.weight is not weight
        module(torch.zeros(3))
    assert module.weight is weight


HEADS = {
    "attention": dict(mtp_pattern="*-"),
    "state": dict(mtp_pattern="M*"),
    "experts": dict(mtp_pattern="*E", **EXPERTS),
    "distinct": dict(mtp_pattern="*-", mtp_use_repeated_layer=False),
}


def check_all_arrive(model, attention, recompute, tolerance):
    """Check the gradients that autograd sums, and those that two backwards add to an
    optimizer's."""

    def backward():
        batch = toy_batch([[20]]).to(next(model.parameters()).device)
        losses, _ = run_depths(model, batch, 3, attention, LossConfig(), recompute=recompute)
        losses.sum().backward()

    heads = freeze_base(model)
    backward()
    want = {name: parameter.grad.float() for name, parameter in heads.items()}
    model.zero_grad()
    optimizer = HeadOptimizer(heads.values(), OptimizerConfig())
    for times in (1, 2):
        backward()
        for name, parameter in heads.items():
            assert parameter.grad is None and parameter.main_grad.dtype == torch.float32
            assert (parameter.main_grad - times * want[name]).norm() <= tolerance * times * want[
                name
            ].norm(), name
    assert optimizer.reduce() > 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("changes", HEADS.values(), ids=HEADS)
def test_all_gradients_of_heads_arrive(changes, recompute):
    attention = "serving" if changes.get("mtp_use_repeated_layer", True) else "per_depth"
    check_all_arrive(toy_model(**changes), attention, recompute, 1e-6)
    check_all_arrive(toy_model(dtype=torch.bfloat16, **changes), attention, recompute, 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_gradients_arrive_with_transformer_engine(dtype, recompute):
    pytest.importorskip("transformer_engine.pytorch")
    model = build_model(CONFIG.replace(mtp_pattern="*-"), dtype=dtype, device="cuda", backend="te")
    check_all_arrive(model, "serving", recompute, 1e-4 if dtype == torch.float32 else 0.02)


def test_a_backward_outside_is_not_lost_silently():
    model = toy_model()
    heads = freeze_base(model)
    optimizer = HeadOptimizer(heads.values(), OptimizerConfig())
    sum(parameter.sum() for parameter in heads.values()).backward()
    with pytest.raises(AssertionError, match="a backward outside of `gradients_into_main`"):
        optimizer.step(1e-3)
