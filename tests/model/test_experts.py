"""All routed experts at once, beside megatron-core's, which run one after the other."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtpkit.bench.sizes import NEMOTRON_3_TINY
from mtpkit.model import build_model, stack_experts
from mtpkit.model.layers import experts as layer
from mtpkit.model.layers.experts import Experts, side_by_side
from mtpkit.training.main_grad import gradients_into_main

COUNTS = {
    "uneven": (3, 0, 7, 1),
    "none of the first and last": (0, 5, 2, 0),
    "one for all": (0, 0, 9, 0),
}


def experts_of(activation="relu2", dtype=torch.float32, device="cpu", count=4, inner=48) -> Experts:
    config = NEMOTRON_3_TINY.replace(
        activation=activation, num_moe_experts=count, moe_ffn_hidden_size=inner, init_std=0.3
    )
    model = build_model(config, dtype, device, seed=2)
    return model.decoder.layers[1].mlp.experts


def draw(experts, counts):
    weight = experts.local_experts[0].linear_fc1.weight
    x = torch.randn(sum(counts), weight.shape[1])
    probs = torch.rand(sum(counts))
    pull = torch.randn(sum(counts), weight.shape[1])
    return [t.to(weight.device, weight.dtype) for t in (x, probs, pull)]


def gradients(experts, counts, x, probs, pull, apart: bool):
    """Output, and the gradients of x, of the rows' weights and of the matrices."""
    x = x.clone().requires_grad_()
    probs = probs.clone().requires_grad_()
    experts.apart = apart
    out, _ = experts(x, torch.tensor(counts), probs)
    found = torch.autograd.grad(
        (out * pull).sum(), [x, probs, *experts.parameters()], allow_unused=True
    )
    return [out.detach(), *(torch.zeros(1) if each is None else each for each in found)]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_gradients_are_those_of_one_after_the_other(counts, activation, stacked, monkeypatch):
    experts = experts_of(activation)
    if stacked:
        lay_side_by_side(experts)
    drawn = draw(experts, counts)
    want = gradients(experts, counts, *drawn, apart=True)
    # they do not run one after the other now
    monkeypatch.setattr(Experts.__base__, "forward", None)
    for have, expected in zip(gradients(experts, counts, *drawn, apart=False), want, strict=True):
        assert (have - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(
    ("inner", "dtype"), [(50, torch.float32), (51, torch.float32), (48, torch.float64)]
)
def test_what_pytorch_does_not_multiply_runs_one_after_the_other(inner, dtype):
    experts = experts_of(inner=inner, dtype=dtype)
    counts = COUNTS["uneven"]
    drawn = draw(experts, counts)
    want = gradients(experts, counts, *drawn, apart=True)
    assert all(map(torch.equal, gradients(experts, counts, *drawn, apart=False), want))


@pytest.mark.parametrize("stacked", [False, True])
def test_large_matrices_are_not_copied(stacked, monkeypatch):
    experts = experts_of()
    counts = COUNTS["uneven"]
    if stacked:
        lay_side_by_side(experts)
    monkeypatch.setattr(
        layer,
        "_MOST_COPIED",
        sum(one.linear_fc1.weight.nbytes for one in experts.local_experts) - 1,
    )
    ran = []
    before = layer.SequentialMLP.forward
    monkeypatch.setattr(
        layer.SequentialMLP, "forward", lambda *args: ran.append(1) or before(*args)
    )
    gradients(experts, counts, *draw(experts, counts), apart=False)
    assert bool(ran) != stacked


def test_some_experts_are_frozen():
    """Of the others, one has an optimizer's gradient and the rest autograd's."""
    experts = experts_of()
    counts = (2, 3, 1, 4)
    drawn = draw(experts, counts)
    want = dict(
        zip(
            dict(experts.named_parameters()),
            gradients(experts, counts, *drawn, apart=True)[3:],
            strict=True,
        )
    )
    experts.local_experts[0].requires_grad_(False)
    for parameter in experts.local_experts[1].parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    experts.apart = False
    with gradients_into_main(experts):
        for expert in experts.local_experts:
            expert.linear_fc1.gradient_accumulation_fusion = (
                expert.linear_fc2.gradient_accumulation_fusion
            ) = True
        out, _ = experts(drawn[0].requires_grad_(), torch.tensor(counts), drawn[1])
    (out * drawn[2]).sum().backward()
    for name, parameter in experts.named_parameters():
        index = int(name.split(".")[1])
        found = (None, getattr(parameter, "main_grad", None), parameter.grad, parameter.grad)[index]
        assert parameter.grad is None or index > 1
        assert (
            found is None if index == 0 else torch.allclose(found, want[name], rtol=1e-4, atol=1e-5)
        )


def lay_side_by_side(experts) -> None:
    for name in ("linear_fc1", "linear_fc2"):
        weights = [getattr(expert, name).weight for expert in experts.local_experts]
        for weight, part in zip(weights, torch.stack([w.detach() for w in weights]), strict=True):
            weight.data = part


@pytest.mark.parametrize("spaced", [False, True])
def test_gradients_are_added_to_those_of_the_optimizer(spaced):
    """Evenly spaced in one buffer, as an optimizer has them, and each in its own memory."""
    experts = experts_of()
    counts = COUNTS["uneven"]
    drawn = draw(experts, counts)
    want = gradients(experts, counts, *drawn, apart=True)[3:]
    parameters = list(experts.parameters())
    buffer = torch.ones(sum(map(torch.numel, parameters)))
    views = buffer.split([each.numel() for each in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.main_grad = view.view_as(parameter) if spaced else torch.ones(parameter.shape)
    x, probs, pull = drawn
    experts.apart = False
    with gradients_into_main(experts):
        out, _ = experts(x.requires_grad_(), torch.tensor(counts), probs)
    (out * pull).sum().backward()
    for parameter, each in zip(parameters, want, strict=True):
        assert parameter.grad is None
        assert torch.allclose(parameter.main_grad, 1 + each, rtol=1e-4, atol=1e-5)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.__name__.split(".")[0] not in (
            "detach",
            "select",
            "view",
            "unbind",
            "as_strided",
        )
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("apart", [False, True])
def test_more_experts_are_no_more_operations(apart):
    counted = []
    for count in (4, 16):
        experts = experts_of(count=count)
        drawn = draw(experts, [2] * count)
        with Operations() as operations:
            gradients(experts, [2] * count, *drawn, apart=apart)
        counted.append(operations.count)
    assert (counted[1] > 2 * counted[0]) == apart and (counted[1] == counted[0]) != apart


def test_matrices_are_copied_only_where_they_must_be():
    memory = torch.randn(5, 6, 4)
    for matrices, is_view in (
        (list(memory), True),
        (list(memory[1:, :3]), True),
        (list(memory[::2]), True),
        ([memory[2]], True),
        ([memory[0], memory[1], memory[3]], False),
        ([memory[1], memory[0]], False),
        (list(memory.transpose(1, 2)), False),
        ([memory[0].clone(), memory[1].clone()], False),
    ):
        together = side_by_side(matrices)
        assert torch.equal(together, torch.stack(matrices))
        assert (together.data_ptr() == matrices[0].data_ptr()) == is_view


def test_experts_that_are_stacked_are_not_copied():
    model = build_model(NEMOTRON_3_TINY, torch.float32, "cpu", seed=2)
    assert stack_experts(model)
    experts = model.decoder.layers[1].mlp.experts.local_experts
    weights = [expert.linear_fc2.weight for expert in experts]
    assert side_by_side(weights).data_ptr() == weights[0].data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("inner", [48, 52])
def test_bf16_on_a_gpu(activation, inner, monkeypatch):
    """Against fp64, within twice the error of one after the other; sizes that are no multiple of 8
    run so."""
    experts = experts_of(activation, torch.bfloat16, "cuda", inner=inner)
    counts = (300, 0, 17, 1)
    drawn = draw(experts, counts)
    near = gradients(experts, counts, *drawn, apart=True)
    # The gradient of an expert without rows may be what lay in memory before.
    junk = [
        torch.full((sum(p.numel() for p in experts.parameters()),), torch.nan, device="cuda")
        for _ in range(4)
    ]
    del junk
    with monkeypatch.context() as patch:
        if inner % 8 == 0:
            patch.setattr(Experts.__base__, "forward", None)
        have = gradients(experts, counts, *drawn, apart=False)
    exact = experts_of(activation, torch.float64, "cpu", inner=inner)
    for into, value in zip(exact.parameters(), experts.parameters(), strict=True):
        into.data.copy_(value)
    want = gradients(exact, counts, *(t.double().cpu() for t in drawn), apart=True)
    for one, other, expected in zip(have, near, want, strict=True):
        errors = [(each.double().cpu() - expected).norm() for each in (one, other)]
        assert errors[0] <= 2 * errors[1] + 1e-3 * expected.norm()
