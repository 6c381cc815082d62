"""The optimizer, the loss's normaliser, and what a step may change."""

import math

import pytest
import torch

from mtpkit.errors import MtpkitError
from mtpkit.training import depths
from mtpkit.training.config.reading import load_config
from mtpkit.training.config.settings import LossConfig, OptimizerConfig
from mtpkit.training.heads import check_unchanged, fingerprint, freeze_base
from mtpkit.training.main_grad import gradients_into_main
from mtpkit.training.optimizer import HeadOptimizer, learning_rate
from mtpkit.training.step import train_step
from tests.training.toy import cut, toy_batch, toy_model


def toy_config(*overrides):
    return load_config(
        None,
        ["model=base", "output=run", "data.train=[a.txt]", "heads.attention=serving", *overrides],
    )


def test_learning_rate_warms_up_and_decays_to_the_last_step():
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=4)
    rates = [learning_rate(config, step, 11) for step in range(11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0 and rates[7] == pytest.approx(0.55) and rates[10] == pytest.approx(0.1)
    assert [
        learning_rate(OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=0), step, 1)
        for step in range(1)
    ] == [1.0]
    # a warm-up that is longer than the run
    assert [learning_rate(config, step, 2) for step in range(2)] == [0.5, 1.0]


def test_optimizer_equals_torch_with_clipping(device):
    torch.manual_seed(0)
    ours = torch.nn.Linear(5, 3, device=device)
    theirs = torch.nn.Linear(5, 3, device=device)
    theirs.load_state_dict(ours.state_dict())
    toy_model()  # process groups
    config = OptimizerConfig(weight_decay=0.1, clip_grad=0.5, betas=(0.7, 0.9), eps=1e-2)
    optimizer = HeadOptimizer(ours.parameters(), config)
    reference = torch.optim.AdamW(
        [
            {"params": [theirs.weight], "weight_decay": 0.1},
            {"params": [theirs.bias], "weight_decay": 0.0},
        ],
        betas=config.betas,
        eps=config.eps,
    )
    for _ in range(3):
        x = torch.randn(7, 5, device=device)
        for part in x.chunk(2):
            with gradients_into_main(ours):
                ours(part).square().sum().backward()
        theirs(x).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        assert optimizer.step(1e-2) == pytest.approx(norm.item(), rel=1e-5)
        reference.param_groups[0]["lr"] = reference.param_groups[1]["lr"] = 1e-2
        reference.step()
        reference.zero_grad()
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)


def test_bfloat16_parameters_have_fp32_masters():
    toy_model()
    parameter = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = HeadOptimizer([parameter], OptimizerConfig(weight_decay=0.0, clip_grad=0.0))
    for _ in range(8):
        parameter.main_grad.fill_(1)
        # a quarter of bf16's spacing below 1: lost if it were added to the parameter
        optimizer.step(2**-10)
    torch.testing.assert_close(
        parameter.float(), torch.full((4, 4), 1 - 8 * 2**-10), atol=1e-3, rtol=0
    )


def test_a_gradient_that_is_not_finite_stops_the_run():
    toy_model()
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = HeadOptimizer([parameter], OptimizerConfig())
    parameter.main_grad.fill_(math.inf)
    with pytest.raises(MtpkitError, match=r"optimizer\.lr"):
        optimizer.step(1e-3)
    assert torch.equal(parameter, torch.ones(2, 2))


def test_every_setting_of_the_loss_reaches_it(monkeypatch):
    given = []
    compute = depths.head_losses
    monkeypatch.setattr(
        depths, "head_losses", lambda *args: given.append(args[5]) or compute(*args)
    )
    gradients([toy_batch([[20]])], "loss.temperature=2", "loss.chunk_size=7", "loss.top_k=5")
    assert given == [LossConfig(temperature=2.0, chunk_size=7, top_k=5)]


def gradients(batches, *overrides):
    """(mean loss of each depth, gradients) of one step over these micro-batches."""
    model = toy_model()
    optimizer = HeadOptimizer(freeze_base(model).values(), OptimizerConfig())
    found = []
    optimizer.step = lambda lr: (
        found.extend(grad.clone() for grad in optimizer.buffers[0].grads) or 0.0
    )
    sums, _ = train_step(model, batches, optimizer, toy_config(*overrides), 0.0)
    return sums.losses(), found


def test_every_token_counts_the_same_however_it_is_batched():
    batch = toy_batch([[7, 10, 3], [20]])
    batch.loss_mask[1, 3:] = False  # the second sequence has few tokens
    together = gradients([batch])
    apart = gradients([cut(batch, 0, 0, 20), cut(batch, 1, 0, 20)])
    assert together[0] == pytest.approx(apart[0], rel=1e-5)
    for a, b in zip(together[1], apart[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_depth_weights_weigh():
    batch = toy_batch([[20]])
    first, second = (
        gradients([batch], f"loss.depth_weights={w}")[1] for w in ("[1,0,0]", "[0,1,0]")
    )
    both = gradients([batch], "loss.depth_weights=[3,1,0]")[1]
    for a, b, c in zip(first, second, both, strict=True):
        torch.testing.assert_close(0.75 * a + 0.25 * b, c, rtol=1e-4, atol=1e-6)


def test_a_batch_without_wanted_tokens_changes_nothing_but_decay():
    losses, grads = gradients([toy_batch([[20]], wanted=0.0)])
    assert losses == [0.0, 0.0, 0.0] and not any(grad.any() for grad in grads)


@pytest.mark.parametrize("kind", ["kl", "tv", "ce"])
def test_the_base_stays_as_it_is_to_the_bit(kind):
    moe = {"num_moe_experts": 4, "moe_ffn_hidden_size": 16}
    model = toy_model(pattern="M*E", mtp_pattern="*E", **moe)
    heads = freeze_base(model)
    before = {
        name: tensor.clone() for name, tensor in model.state_dict().items() if tensor is not None
    }
    print_before = fingerprint(model)
    optimizer = HeadOptimizer(heads.values(), OptimizerConfig())
    for seed in range(3):
        train_step(
            model,
            [toy_batch([[9, 11]], seed=seed)],
            optimizer,
            toy_config(f"loss.kind={kind}"),
            1e-2,
        )
    check_unchanged(model, print_before)
    changed = {
        name for name, tensor in before.items() if not torch.equal(tensor, model.state_dict()[name])
    }
    assert changed == set(heads)


def test_a_changed_base_is_named():
    model = toy_model()
    before = fingerprint(model)
    with torch.no_grad():
        model.decoder.final_norm.weight[0] += 1e-3
    with pytest.raises(MtpkitError, match=r"decoder\.final_norm\.weight$"):
        check_unchanged(model, before)


@pytest.mark.parametrize("kind", ["kl", "tv", "ce"])
def test_a_step_that_is_not_finite_is_named_and_updates_nothing(kind):
    model = toy_model()
    heads = freeze_base(model)
    optimizer = HeadOptimizer(heads.values(), OptimizerConfig())
    model.output_layer.weight.data[5] = torch.nan
    before = {name: parameter.detach().clone() for name, parameter in heads.items()}
    config = toy_config(f"loss.kind={kind}")
    with pytest.raises(
        MtpkitError,
        match=r"^step 8: NaN or infinity in the loss of depth 1, 2, 3; the gradient's norm",
    ):
        train_step(model, [toy_batch([[20]])], optimizer, config, 1e-2, step=7)
    assert all(torch.equal(parameter, before[name]) for name, parameter in heads.items())
