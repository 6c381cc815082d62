"""The fitted input projection against a plain least-squares solution, and what it is good for."""

import pytest
import torch

from mtpkit.errors import MtpkitError
from mtpkit.model import SequenceInput, base_forward, embed
from mtpkit.training import fit
from mtpkit.training.fit import fit_input_projection
from mtpkit.training.heads import init_inputs_from_base
from tests.training.toy import toy_batch, toy_model

BATCHES = [toy_batch([[25, 39], [64]], wanted=1.1, seed=seed) for seed in range(6)]


@torch.no_grad()
def residuals(model, batch, layers):
    """Hidden states, and the residual stream that enters the last `layers` of the base, by running
    the others alone."""
    hidden = base_forward(model, batch.token_ids, SequenceInput(batch.documents, batch.positions))
    stream = embed(model, batch.token_ids)
    for layer in model.decoder.layers[: len(model.decoder.layers) - layers]:
        out = layer(
            hidden_states=stream,
            attention_mask=None,
            inference_context=SequenceInput(batch.documents, batch.positions),
        )
        stream = out[0] if isinstance(out, tuple) else out
    return hidden, stream


@pytest.mark.parametrize("pattern", ["M*-", "MM*-"])
def test_the_projection_is_the_least_squares_solution(monkeypatch, pattern):
    monkeypatch.setattr(fit, "RIDGE", 1e-10)
    model = toy_model(pattern=pattern, mtp_pattern="*-")
    explained = fit_input_projection(model, BATCHES)
    head = model.mtp.layers[0]
    inputs = []
    targets = []
    for batch in BATCHES:
        hidden, stream = residuals(model, batch, 2)
        for row in range(batch.token_ids.shape[0]):
            for place in range(batch.token_ids.shape[1] - 1):
                if batch.documents[row, place] == batch.documents[row, place + 1]:
                    token = batch.token_ids[row : row + 1, place + 1 : place + 2]
                    parts = head.enorm(embed(model, token))[0, 0], head.hnorm(hidden[place, row])
                    inputs.append(torch.cat(parts).detach())
                    targets.append(stream[place + 1, row])
    x = torch.stack(inputs).double()
    y = torch.stack(targets).double()
    # the toy's few embeddings leave directions open
    want = x @ torch.linalg.lstsq(x, y, driver="gelsd").solution
    got = x @ head.eh_proj.weight.detach().double().t()
    assert (got - want).norm() < 1e-3 * want.norm()
    assert explained == pytest.approx(
        float(1 - (y - want).square().sum() / y.square().sum()), abs=1e-4
    )


def test_layers_that_are_not_the_last_are_left_out_of_the_target():
    """A head `*` of a base `M*-`: the target keeps what the MLP, which the head lacks, adds."""
    model = toy_model(pattern="M*-", mtp_pattern="*")
    _, residual = fit._run_base(model, BATCHES[0])
    with torch.no_grad():
        hidden, before = residuals(model, BATCHES[0], 2)
        _, middle = residuals(model, BATCHES[0], 1)
        _, last = residuals(model, BATCHES[0], 0)
    torch.testing.assert_close(residual, last - (middle - before), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.decoder.final_norm(last), hidden)


def test_padding_does_not_count():
    """Padding is a document of its own, without prediction targets."""
    model = toy_model(mtp_pattern="*-")
    head = model.mtp.layers[0]
    whole = [toy_batch([[25, 14]], wanted=1.1, seed=seed) for seed in range(6)]
    padded = [toy_batch([[25, 14, 25]], wanted=1.1, seed=seed) for seed in range(6)]
    for batch, alone in zip(padded, whole, strict=True):
        batch.token_ids[:, :39] = alone.token_ids
        batch.loss_mask[:, 39:] = False
    explained = fit_input_projection(model, whole)
    weight = head.eh_proj.weight.clone()
    assert fit_input_projection(model, padded) == pytest.approx(explained, abs=1e-5)
    assert (head.eh_proj.weight - weight).norm() < 1e-3 * weight.norm()


def test_nothing_but_the_projection_changes():
    model = toy_model(mtp_pattern="*-")
    init_inputs_from_base(model)
    before = {name: value.clone() for name, value in model.named_parameters()}
    fit_input_projection(model, BATCHES)
    changed = {
        name for name, value in model.named_parameters() if not torch.equal(value, before[name])
    }
    assert changed == {"mtp.layers.0.eh_proj.weight"}
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(
    "name", ["decoder.layers.0.mixer.in_proj.weight", "embedding.word_embeddings.weight"]
)
def test_states_that_are_no_numbers_are_not_fitted(name, value):
    model = toy_model(mtp_pattern="*-")
    before = model.mtp.layers[0].eh_proj.weight.detach().clone()
    model.get_parameter(name).data[3] = float(value)
    with pytest.raises(MtpkitError, match=r"cannot be fitted: .* NaN or infinity"):
        fit_input_projection(model, BATCHES)
    assert torch.equal(model.mtp.layers[0].eh_proj.weight, before)


def test_nothing_to_fit_is_one_line():
    with pytest.raises(MtpkitError, match=r"cannot be fitted: .* set heads\.fit_tokens=0"):
        fit_input_projection(toy_model(mtp_pattern="*-"), [toy_batch([[1] * 16], wanted=1.1)])


def test_the_penalty_is_relative_to_the_inputs():
    """Inputs of another size give the same map, scaled back."""
    model = toy_model()
    found = []
    width = model.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2 * width, generator=generator, dtype=torch.float64)
    y = torch.randn(200, width, generator=generator, dtype=torch.float64)
    for scale in (1.0, 100.0):
        inputs = scale * x
        with torch.no_grad():
            explained = fit._solve(model, inputs.t() @ inputs, inputs.t() @ y, y.square().sum())
        found.append((model.mtp.layers[0].eh_proj.weight.detach() * scale, explained))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
