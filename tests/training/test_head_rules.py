"""Training under each rule of what heads read: losses by hand, gradients, settings, caches and what
is written."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mtpkit.checkpoint import load_config as load_model_config
from mtpkit.checkpoint import load_model
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.errors import UserError
from mtpkit.model import SequenceInput, base_forward, unroll_depths
from mtpkit.training import fit
from mtpkit.training.config.reading import load_config
from mtpkit.training.config.settings import LossConfig, OptimizerConfig
from mtpkit.training.depths import HiddenMix, run_depths
from mtpkit.training.fit import fit_input_projection
from mtpkit.training.heads import freeze_base, resolve
from mtpkit.training.loop import train
from mtpkit.training.optimizer import HeadOptimizer
from tests.training.toy import toy_batch, toy_model

BASE = {"mtp_reads_of_base": "before_final_norm"}
DEPTH = {"mtp_reads_of_depth": "before_final_norm"}
ZEROED = {"mtp_zero_first_embedding": True}
RULES = {
    "mimo": BASE | ZEROED,
    "glm": DEPTH | ZEROED,
    "deepseek": ZEROED,
    "all before": BASE | DEPTH,
    "window": {"mtp_attention_window": 6, "mtp_attention_sinks": 2},
}
KINDS = [("serving", {}), ("per_depth", {}), ("per_depth", {"mtp_use_repeated_layer": False})]


def spread_model(**changes):
    """A toy model whose final norms have weights that are far apart."""
    model = toy_model(**changes)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for norm in (
            model.decoder.final_norm,
            *(layer.final_layernorm for layer in model.mtp.layers),
        ):
            norm.weight.copy_(torch.randn(norm.weight.shape, generator=generator).exp())
    return model


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_the_loss_is_between_normed_states(rules):
    """Of one document, from what lm_head makes of the base's stream, normed by hand, and of each
    depth's g."""
    model = spread_model(**rules)
    batch = toy_batch([[20]], wanted=1.1)
    streams = []
    model.decoder.layers[-1].register_forward_hook(
        lambda _, args, output: streams.append(output[0] if isinstance(output, tuple) else output)
    )
    freeze_base(model)
    losses, _ = run_depths(model, batch, 3, "serving", LossConfig())
    hidden = base_forward(model, batch.token_ids, SequenceInput())
    weight = model.decoder.final_norm.weight.double()
    head = model.output_layer.weight.double()
    base = F.rms_norm(streams[0].double(), weight.shape, weight, 1e-5) @ head.t()
    for depth, states in enumerate(
        unroll_depths(model, hidden, batch.token_ids, 3, "serving"), start=1
    ):
        p = base[depth:-1].log_softmax(-1)
        q = (states.double() @ head.t())[: -depth - 1].log_softmax(-1)
        assert losses[depth - 1].item() == pytest.approx((p.exp() * (p - q)).sum().item(), rel=1e-5)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_gradients_are_slopes_and_arrive_whole(kind, changes, rules):
    """By autograd, against a central difference; the same into `main_grad`, and with
    recomputation."""
    model = spread_model(**changes, **rules)
    batch = toy_batch([[9, 4]], wanted=1.1)
    heads = freeze_base(model)
    weights = torch.tensor([1.0, 0.6, 0.3])

    def value(recompute=False):
        return (
            run_depths(model, batch, 3, kind, LossConfig(), recompute=recompute)[0] * weights
        ).sum()

    grads = torch.autograd.grad(value(), list(heads.values()))
    generator = torch.Generator().manual_seed(1)
    noise = [torch.randn(grad.shape, generator=generator) for grad in grads]
    # Across the slope too, but mostly along it: there fp32 and curvature matter least.
    directions = [
        each / each.norm() + 2 * grad / grad.norm() for each, grad in zip(noise, grads, strict=True)
    ]
    ends = []
    with torch.no_grad():
        for sign in (1, -2):
            for parameter, direction in zip(heads.values(), directions, strict=True):
                parameter.add_(direction, alpha=sign * 3e-3)
            ends.append(value().item())
        for parameter, direction in zip(heads.values(), directions, strict=True):
            parameter.add_(direction, alpha=3e-3)
    slope = sum(
        (grad * direction).sum() for grad, direction in zip(grads, directions, strict=True)
    ).item()
    assert (ends[0] - ends[1]) / 6e-3 == pytest.approx(slope, rel=1e-2)
    HeadOptimizer(heads.values(), OptimizerConfig())
    for times, recompute in enumerate((False, True), start=1):
        value(recompute).backward()
        for grad, (name, parameter) in zip(grads, heads.items(), strict=True):
            assert (parameter.main_grad - times * grad).norm() <= 1e-5 * times * grad.norm(), name


def seen(calls, own, base):
    calls.append(base)
    return own


def test_mixed_in_are_states_of_the_kind_that_depths_hand_on():
    for rules in (BASE, BASE | DEPTH):
        model = spread_model(**rules)
        batch = toy_batch([[9]])
        calls = []
        with torch.no_grad():
            hidden = base_forward(model, batch.token_ids, SequenceInput())
            list(
                unroll_depths(
                    model, hidden, batch.token_ids, 2, "serving", mix=partial(seen, calls)
                )
            )
            want = hidden if rules != BASE else model.decoder.final_norm(hidden)
        assert torch.equal(calls[0][:-1], want[1:])
    blended = run_depths(
        spread_model(**BASE), toy_batch([[20]]), 3, "serving", LossConfig(), HiddenMix(0.5, "blend")
    )
    assert blended[0].isfinite().all()


def test_the_input_projection_is_fitted_on_what_heads_read():
    """Without the final norm's weights the state before the norm is, to a norm after it, the one
    after the norm."""
    batches = [toy_batch([[64]], wanted=1.1, seed=seed) for seed in range(3)]
    model = spread_model(**BASE)
    plain = toy_model()
    shares = [fit_input_projection(each, batches) for each in (model, plain)]
    assert shares[0] == pytest.approx(shares[1], abs=1e-5) and shares[0] > 0.1
    weights = [each.mtp.layers[0].eh_proj.weight for each in (model, plain)]
    assert (weights[0] - weights[1]).norm() < 1e-3 * weights[0].norm()


@torch.no_grad()
def test_the_projection_is_fitted_without_the_first_embeddings():
    """Pairs of a document's first position have zeros for their token."""
    batch = toy_batch([[9, 6]], wanted=1.1)
    residuals = torch.zeros(15, 1, 32)
    models = [spread_model(**rules) for rules in ({}, ZEROED)]
    hidden = base_forward(
        models[0], batch.token_ids, SequenceInput(batch.documents, batch.positions)
    )
    kept, zeroed = (
        fit._pairs(model, batch, torch.stack([hidden, residuals]))[0] for model in models
    )
    first = torch.zeros(len(kept), dtype=torch.bool)
    first[[0, 8]] = True  # of the documents, the first of which has eight pairs
    assert torch.equal(kept[~first], zeroed[~first]) and torch.equal(kept[:, 32:], zeroed[:, 32:])
    assert not zeroed[first, :32].any() and kept[first, :32].abs().sum(1).all()


def test_settings_override_what_the_model_says(run_settings):
    def rules_of(*overrides) -> tuple[str, str, bool]:
        heads = resolve(load_config(None, [*run_settings(), *overrides]))[1].mtp
        return heads.reads_of_base[:6], heads.reads_of_depth[:6], heads.zero_first_embedding

    before = "before_final_norm"
    assert rules_of() == ("after_", "after_", False)
    assert rules_of(f"heads.reads_of_base={before}") == ("before", "after_", False)
    assert rules_of(f"heads.reads_of_depth={before}") == ("after_", "before", False)
    assert rules_of("heads.zero_first_embedding=true") == ("after_", "after_", True)
    assert rules_of("heads.zero_first_embedding=false") == rules_of()
    with pytest.raises(
        UserError, match=r"heads\.zero_first_embedding is 'maybe', must be 'auto' or True or False"
    ):
        rules_of("heads.zero_first_embedding=maybe")
    with pytest.raises(
        UserError,
        match=r"heads\.reads_of_base is 'behind', must be 'auto' or 'after_final_norm' or",
    ):
        rules_of("heads.reads_of_base=behind")
    with pytest.raises(
        UserError,
        match=r"hidden_mix 0\.5 mixes .*; set heads\.reads_of_depth=after_final_norm, heads",
    ):
        rules_of(f"heads.reads_of_depth={before}", "loss.hidden_mix=0.5")


def test_the_rules_go_with_the_heads_and_the_cache(run_settings, tmp_path):
    """Through a run, the next run on its heads, both layouts, and a cache that other heads cannot
    use."""
    short = {"steps": 2, "data.eval": "[]", "cache": tmp_path / "cache", "data.sequence_length": 16}
    own = {"heads.reads_of_base": "before_final_norm", "heads.reads_of_depth": "before_final_norm"}
    own["heads.zero_first_embedding"] = "true"
    own |= {"heads.attention_window": "9", "heads.attention_sinks": "2"}
    run = train(load_config(None, run_settings(**short, **own)))
    first = load_model_config(run).mtp
    assert (first.reads_of_base, first.reads_of_depth) == (
        "before_final_norm",
    ) * 2 and first.zero_first_embedding
    assert (first.attention_window, first.attention_sinks) == (9, 2)
    export_checkpoint(run, tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron")
    for directory in (tmp_path / "hf", tmp_path / "megatron"):
        assert load_model_config(directory).mtp == first
    assert same_states(run, tmp_path / "hf") and same_states(run, tmp_path / "megatron")
    further = run_settings(**short | {"model": tmp_path / "hf", "output": tmp_path / "on"})
    assert load_model_config(train(load_config(None, further))).mtp == first
    after = run_settings(**short | {"output": tmp_path / "after"})
    with pytest.raises(UserError, match="hidden states before final norm, not after final norm"):
        train(load_config(None, after))


def same_states(first: Path, second: Path) -> bool:
    ids = torch.arange(9)[None]
    found = []
    for directory in (first, second):
        model = load_model(directory).requires_grad_(False)
        found.append(
            torch.stack(
                list(unroll_depths(model, base_forward(model, ids, SequenceInput()), ids, 2))
            )
        )
    return torch.equal(*found)
