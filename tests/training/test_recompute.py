"""Activations made again in the backward change no bit, and fewer are kept."""

import weakref
from contextlib import nullcontext

import pytest
import torch

from mtpkit.model import mtp
from mtpkit.model.layers import attention, linear, residual
from mtpkit.model.layers.base import keeping_inputs, linear_of
from mtpkit.training.config.settings import LossConfig, OptimizerConfig
from mtpkit.training.depths import HiddenMix, run_depths
from mtpkit.training.heads import freeze_base
from mtpkit.training.optimizer import HeadOptimizer
from mtpkit.training.step import train_step
from tests.toy_config import DELTA
from tests.training.test_step import toy_config
from tests.training.toy import toy_batch, toy_model

MOE = dict(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16)
CASES = {
    "attention": ("serving", dict(mtp_pattern="*-")),
    "two layers that leave entries": ("serving", dict(mtp_pattern="*M*")),
    "gated delta nets": ("serving", dict(mtp_pattern="*G*", **DELTA)),
    "rotary": ("serving", dict(mtp_pattern="*-", position_embedding_type="rope")),
    "experts": ("serving", dict(mtp_pattern="*E", **MOE)),
    "per depth": ("per_depth", dict(mtp_pattern="M*")),
    "distinct": ("per_depth", dict(mtp_pattern="*-", mtp_use_repeated_layer=False)),
}


def run(model, kind, recompute, weights=(1.0, 0.6, 0.3), mix=None):
    """Losses, gradients, and the bytes that autograd keeps outside of what it makes again."""
    heads = freeze_base(model)
    kept = {}
    model.zero_grad()

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses, _ = run_depths(
            model, toy_batch([[7, 10, 3], [20]]), 3, kind, LossConfig(), mix, recompute=recompute
        )
    (losses * torch.tensor(weights)).sum().backward()
    return losses.detach(), [parameter.grad for parameter in heads.values()], sum(kept.values())


@pytest.mark.parametrize(("kind", "changes"), CASES.values(), ids=CASES)
def test_losses_and_gradients_are_the_same_to_the_bit(kind, changes):
    model = toy_model(**changes)
    losses, grads, kept = run(model, kind, recompute=False)
    again, grads_again, kept_again = run(model, kind, recompute=True)
    assert torch.equal(losses, again) and all(
        torch.equal(a, b) for a, b in zip(grads, grads_again, strict=True)
    )
    assert kept_again < kept / 3


def test_whichever_depths_are_differentiated():
    """A depth of no weight runs again too, as later ones did or before them."""
    model = toy_model(mtp_pattern="*M")
    for weights in ((1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.0, 1.0, 0.0)):
        plain, again = (run(model, "serving", recompute, weights) for recompute in (False, True))
        assert all(torch.equal(a, b) for a, b in zip(plain[1], again[1], strict=True))


def test_mixed_states_are_drawn_once():
    model = toy_model()
    mixes = (
        HiddenMix(0.5, "sample", [torch.Generator().manual_seed(row) for row in range(2)])
        for _ in range(2)
    )
    plain, again = (
        run(model, "serving", recompute, mix=mix)
        for recompute, mix in zip((False, True), mixes, strict=True)
    )
    assert torch.equal(plain[0], again[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[1], again[1], strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_the_setting_reaches_the_depths(recompute):
    model = toy_model()
    calls = []
    optimizer = HeadOptimizer(freeze_base(model).values(), OptimizerConfig())
    model.mtp.layers[0].mtp_model_layer.register_forward_pre_hook(lambda *_: calls.append(1))
    train_step(
        model,
        [toy_batch([[20]])],
        optimizer,
        toy_config(f"heads.recompute={str(recompute).lower()}"),
        1e-3,
    )
    assert len(calls) == (6 if recompute else 3)


@pytest.fixture
def made(monkeypatch):
    """Weak references to every input that a linear may make again, in the order of their making."""
    found: list[weakref.ref] = []

    def watched(linear, function, *inputs):
        def noted(*arguments):
            found.append(weakref.ref(output := function(*arguments)))
            return output

        return linear_of(linear, noted, *inputs)

    for module in (linear, residual, mtp):
        monkeypatch.setattr(module, "linear_of", watched)
    return found


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_inputs_of_linears_are_made_again(made, activation):
    """Recomputed are eh_proj, the attention's first product and both of the feed-forward network,
    at three depths."""
    model = toy_model(mtp_pattern="*-", activation=activation)
    grads = []
    heads = freeze_base(model)
    for context, alive, calls in ((keeping_inputs(), 12, 12), (nullcontext(), 0, 24)):
        model.zero_grad()
        made.clear()
        with context:
            losses, _ = run_depths(model, toy_batch([[7, 10, 3], [20]]), 3, "serving", LossConfig())
        of_heads = made[-12:]  # the base was there before
        assert sum(tensor() is not None for tensor in of_heads) == alive
        before = len(made) - 12
        losses.sum().backward()
        assert len(made) - before == calls
        grads.append([parameter.grad for parameter in heads.values()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("kind", ["serving", "per_depth"])
def test_attention_keeps_no_more_than_its_inputs(kind, monkeypatch):
    """Keys that are a view of the projection would keep all of it."""
    model = toy_model(mtp_pattern="*-")
    seen = []
    freeze_base(model)
    for name in ("sequence_attention", "depth_attention"):
        original = getattr(attention, name)

        def watched(q, k, v, *rest, original=original, **options):
            if torch.is_grad_enabled():
                seen.extend((q, k, v))
            return original(q, k, v, *rest, **options)

        monkeypatch.setattr(attention, name, watched)
    run_depths(model, toy_batch([[7, 10, 3], [20]]), 3, kind, LossConfig())
    assert len(seen) == 9
    assert all(
        tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        for tensor in seen
    )
