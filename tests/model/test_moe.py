"""Stacked experts against megatron-core's own pass through them, and what stacking leaves alone."""

import pytest
import torch

from mtpkit.kernels.moe import reference
from mtpkit.kernels.moe import triton as triton_moe
from mtpkit.model import build_model, stack_experts
from mtpkit.model.formats import weight as products
from mtpkit.model.layers import moe
from mtpkit.model.layers.moe import MoELayer
from tests.engine.tiny import greedy, make_llm
from tests.kernels.recurrence import relative
from tests.model.test_residual import ROWS, WIDTH, first_step, run
from tests.model.toy import CONFIG
from tests.ranks import run_ranks

SOFTMAX = dict(moe_router_score_function="softmax", moe_router_enable_expert_bias=False)
AS_WIDE = dict(moe_shared_expert_intermediate_size=CONFIG.moe.ffn_hidden_size)
CASES = {
    "plain": {},
    "shared expert as wide as the others": AS_WIDE,
    "gated shared expert as wide": dict(
        SOFTMAX, **AS_WIDE, moe_shared_expert_gate=True, activation="swiglu"
    ),
    "wide, and groups": dict(
        AS_WIDE,
        num_moe_experts=8,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_topk=4,
    ),
    "gated": dict(activation="swiglu"),
    "latent": dict(moe_latent_size=20),
    "no shared expert": dict(moe_shared_expert_intermediate_size=0),
    "latent alone": dict(moe_latent_size=20, moe_shared_expert_intermediate_size=0),
    "groups": dict(
        num_moe_experts=8, moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk=4
    ),
    "one of all": dict(moe_router_topk=1),
    "unnormalised": dict(moe_router_normalize=False, moe_router_enable_expert_bias=False),
    "softmax": dict(SOFTMAX, num_moe_experts=5, moe_router_topk=3),
    "pre-softmax": dict(SOFTMAX, moe_router_pre_softmax=True, moe_shared_expert_gate=True),
    "gate of the shared expert": dict(
        SOFTMAX, moe_shared_expert_gate=True, activation="swiglu", moe_latent_size=12
    ),
    "best two of a group": dict(
        num_moe_experts=12,
        moe_router_num_groups=4,
        moe_router_group_topk=3,
        moe_router_topk=4,
        moe_router_group_best=2,
    ),
}


def fresh(device: str = "cpu", dtype: torch.dtype = torch.float32, **changes):
    """A model of its own, whose router prefers some experts."""
    model = build_model(
        CONFIG.replace(**changes), dtype=dtype, device=device, seed=3
    ).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, MoELayer):
            if module.router.expert_bias is None:
                continue
            module.router.expert_bias.copy_(
                torch.linspace(-0.2, 0.2, len(module.router.expert_bias))
            )
    return model


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_stacked_experts_are_megatrons(case, device):
    model = fresh(device, **CASES[case])
    layer = model.decoder.layers[3]
    x = torch.randn(ROWS * WIDTH, 1, CONFIG.hidden_size).to(device)
    step = first_step(model)
    want = run(layer, x.clone(), step).double()
    mixed = layer.mlp(x)[0].double()
    weights = {
        name: weight.clone() for name, weight in model.state_dict().items() if weight is not None
    }
    assert not layer.mlp.is_stacked
    stack_experts(model)
    assert layer.mlp.is_stacked
    assert relative(run(layer, x.clone(), step), want) < 1e-5
    assert relative(layer.mlp(x)[0], mixed) < 1e-5
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in weights.items())


@torch.no_grad()
@pytest.mark.parametrize("case", [*CASES, "groups of three"])
def test_kernels_in_the_layer_are_megatrons(case, monkeypatch):
    """Run in Triton's interpreter."""
    changes = CASES.get(
        case, dict(num_moe_experts=12, moe_router_num_groups=4, moe_router_group_topk=2)
    )
    model = fresh(**changes)
    layer = model.decoder.layers[3]
    x = torch.randn(ROWS * WIDTH, 1, CONFIG.hidden_size)
    want = layer.mlp(x)[0].double()
    stack_experts(model)
    monkeypatch.setattr(moe, "route", triton_moe.route)
    monkeypatch.setattr(products, "expert_mlp", triton_moe.expert_mlp)
    assert relative(layer.mlp(x)[0], want) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize(
    "case", ["shared expert as wide as the others", "gated shared expert as wide"]
)
def test_many_tokens_have_their_shared_expert_apart(case, monkeypatch):
    """One of the routed experts up to a number of tokens; that number, and one more."""
    model = fresh(**CASES[case])
    layer = model.decoder.layers[3]
    x = torch.randn(4, 1, CONFIG.hidden_size)
    want = layer.mlp(x)[0].double()
    routed = []
    stack_experts(model)
    monkeypatch.setattr(
        moe, "route", lambda *args: routed.append(args[9]) or reference.route(*args)
    )
    for most in (4, 3):
        monkeypatch.setattr(moe, "_JOINED_TOKENS", most)
        assert relative(layer.mlp(x)[0], want) < 1e-5
    assert routed == ["gated" if "gated" in case else "whole", "apart"]


@torch.no_grad()
def test_weights_that_are_loaded_later_count():
    model = fresh()
    other = fresh(init_std=0.5)
    layer = model.decoder.layers[3]
    x = torch.randn(4, 1, CONFIG.hidden_size)
    stack_experts(model)
    model.load_state_dict(other.state_dict())
    assert layer.mlp.is_stacked
    assert relative(layer.mlp(x)[0], other.decoder.layers[3].mlp(x)[0].double()) < 1e-5


@torch.no_grad()
def test_moved_experts_are_no_longer_stacked():
    model = fresh()
    layer = model.decoder.layers[3]
    x = torch.randn(4, 1, CONFIG.hidden_size)
    stack_experts(model)
    want = layer.mlp(x)[0].double()
    for weight in model.parameters():
        weight.data = weight.data.clone()
    assert not layer.mlp.is_stacked
    assert relative(layer.mlp(x)[0], want) < 1e-5


@torch.no_grad()
def test_weights_in_anothers_buffer_stay_there():
    """Weights are views of one flat tensor, as with an optimizer that keeps heads flat."""
    model = fresh()
    layer = model.decoder.layers[3]
    x = torch.randn(4, 1, CONFIG.hidden_size)
    want = layer.mlp(x)[0]
    weights = [weight for pair in layer.mlp._together for weight in pair]
    flat = torch.cat([weight.flatten() for weight in reversed(weights)])
    for weight, part in zip(
        weights, reversed(flat.split([w.numel() for w in reversed(weights)])), strict=True
    ):
        weight.data = part.view_as(weight)
    assert not stack_experts(model) and not layer.mlp.is_stacked
    assert torch.equal(layer.mlp(x)[0], want)
    assert all(
        weight.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        for weight in weights
    )
    other = fresh()
    assert stack_experts(other) and other.decoder.layers[3].mlp.is_stacked


def test_experts_learn_stacked_or_not():
    """Gradients go through megatron-core's own pass."""
    grads = []
    for stacked in (False, True):
        model = fresh().requires_grad_(True)
        if stacked:
            stack_experts(model)
        x = torch.randn(6, 1, CONFIG.hidden_size, generator=torch.Generator().manual_seed(2))
        mlp = model.decoder.layers[3].mlp
        grads.append(
            torch.autograd.grad(
                mlp(x)[0].square().sum(), mlp.experts.local_experts[1].linear_fc1.weight
            )[0]
        )
    assert grads[0].abs().max() > 0 and torch.equal(*grads)


def split_over_ranks(rank: int) -> None:
    model = build_model(CONFIG, device="cpu", seed=3, expert_parallel=2)
    stack_experts(model)
    assert not model.decoder.layers[3].mlp.is_stacked


@torch.no_grad()
@pytest.mark.parametrize("expert", [0, 1, 3])
def test_a_single_expert_that_moved_is_found(expert):
    model = fresh()
    stack_experts(model)
    layer = model.decoder.layers[3]
    x = torch.randn(9, 1, CONFIG.hidden_size)
    weight = layer.mlp.experts.local_experts[expert].linear_fc2.weight
    weight.data = torch.zeros_like(weight)
    assert (
        not stack_experts(model)
        or relative(layer.mlp(x)[0], layer.mlp.one_by_one(x).double()) < 1e-5
    )


def test_a_model_made_in_inference_mode_decodes():
    with torch.inference_mode():
        model = build_model(CONFIG, device="cpu", seed=3)
    assert not stack_experts(model)
    plain = build_model(CONFIG, device="cpu", seed=3)
    want = make_llm(plain, 2).generate([[1, 2, 3]], greedy(4))[0].outputs[0].token_ids
    assert make_llm(model, 2).generate([[1, 2, 3]], greedy(4))[0].outputs[0].token_ids == want


def test_experts_split_over_ranks_stay_apart():
    run_ranks(split_over_ranks)
