"""Built models: names, sizes, initial weights, caches."""

import math

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from mtpkit.errors import UserError
from mtpkit.model import (
    SequenceInput,
    base_forward,
    build_model,
    compute_logits,
    embed,
    mtp_forward,
    normed_states,
    output_weight,
    state_specs,
)
from mtpkit.model.kinds import KINDS
from mtpkit.model.state import ConvWindowSpec, PagedKVSpec, PagedLatentSpec, Part, RecurrentSpec
from tests.model.toy import CONFIG, VOCAB, toy_model, toy_tokens
from tests.toy_config import DELTA


def parameters(model) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def test_caches_of_every_layer_by_name():
    attention = (PagedKVSpec(num_kv_heads=2, head_dim=8),)
    inputs = {"x": Part((4, 8)), "B": Part((2, 8)), "dt": Part((4,), torch.float32)}
    mamba = (ConvWindowSpec(kernel=4, channels=32 + 2 * 16), RecurrentSpec((4, 8, 8), inputs))
    assert state_specs(toy_model(mtp_pattern="*M")) == {
        "decoder.layers.0": mamba,
        "decoder.layers.1": attention,
        "mtp.layers.0.layers.0": attention,
        "mtp.layers.0.layers.1": mamba,
    }


@pytest.mark.parametrize("letter", KINDS)
def test_what_is_counted_of_the_past_is_what_the_states_hold(letter):
    kind = KINDS[letter]
    elements = {"state": 0, "kv": 0}
    for spec in kind.states(CONFIG):
        if isinstance(spec, RecurrentSpec):
            elements["state"] += math.prod(spec.shape)
        elif isinstance(spec, PagedKVSpec):
            elements["kv"] += 2 * spec.num_kv_heads * spec.head_dim
        elif isinstance(spec, PagedLatentSpec):
            elements["kv"] += spec.latent_width + spec.rotary_width
    memory = kind.memory(CONFIG)
    assert elements == {"state": memory.state, "kv": memory.kv}


@pytest.mark.parametrize(("repeated", "physical"), [(True, 1), (False, 3)])
def test_physical_heads(repeated, physical):
    model = toy_model(mtp_use_repeated_layer=repeated)
    assert len(model.mtp.layers) == physical
    found = {name.split(".")[2] for name in state_specs(model) if name.startswith("mtp.")}
    assert found == set(map(str, range(physical)))


@pytest.fixture
def megatron_looks_for_te(monkeypatch):
    """Have megatron-core's own MTP layer look at its linears as its 0.20 does where there is no
    Transformer Engine."""

    def built(layer, *args, **kwargs):
        build(layer, *args, **kwargs)
        for module in (layer.eh_proj, *layer.mtp_model_layer.layers[0].modules()):
            isinstance(module, None)  # its class of a linear of Transformer Engine

    build = MultiTokenPredictionLayer.__init__
    monkeypatch.setattr(MultiTokenPredictionLayer, "__init__", built)


@pytest.mark.usefixtures("megatron_looks_for_te")
@pytest.mark.parametrize("repeated", [True, False])
def test_heads_are_built_and_run_without_the_types_of_transformer_engine(repeated):
    model = build_model(CONFIG.replace(mtp_use_repeated_layer=repeated), seed=3)
    inputs = SequenceInput()
    hidden = base_forward(model, toy_tokens(5), inputs)
    handed_on = mtp_forward(model, 1, hidden, toy_tokens(5), inputs)
    compute_logits(model, normed_states(model, handed_on, 1)).square().mean().backward()
    heads = {
        name: one.grad for name, one in model.named_parameters() if name.startswith("mtp.layers.0.")
    }
    assert "mtp.layers.0.eh_proj.weight" in heads
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in heads.values())


def test_a_model_without_heads():
    model = toy_model(mtp_pattern="", mtp_num_depths=0)
    assert not any(name.startswith("mtp.") for name in parameters(model))
    assert base_forward(model, toy_tokens(3), SequenceInput()).shape == (3, 1, 32)


def test_megatron_names():
    names = set(parameters(toy_model()))
    assert {
        "embedding.word_embeddings.weight",
        "decoder.layers.0.mixer.in_proj.layer_norm_weight",
        "decoder.layers.0.mixer.conv1d_weight",
        "decoder.layers.0.mixer.A_log",
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.2.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.3.pre_mlp_layernorm.weight",
        "decoder.layers.3.mlp.router.weight",
        "decoder.final_norm.weight",
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.mtp_model_layer.layers.0.self_attention.linear_proj.weight",
        "output_layer.weight",
    } <= names
    assert not any(name.endswith(".bias") for name in names)


def test_weights_follow_the_seed():
    first, again, other = (parameters(build_model(CONFIG, seed=seed)) for seed in (5, 5, 6))
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    matrices = [name for name, value in first.items() if value.dim() > 1]
    assert matrices and not any(torch.equal(first[name], other[name]) for name in matrices)


def test_heads_start_the_same_beside_any_base():
    first, second = (
        parameters(build_model(CONFIG.replace(pattern=pattern), seed=5))
        for pattern in ("M*-E", "M")
    )
    heads = [name for name in first if name.startswith("mtp.")]
    # What writes to the residual stream is scaled by the depth of the base.
    unscaled = [
        name for name in heads if not name.endswith(("linear_proj.weight", "linear_fc2.weight"))
    ]
    assert len(unscaled) > 5 and all(torch.equal(first[name], second[name]) for name in unscaled)


def test_every_parameter_is_initialised_as_its_kind_needs():
    for name, value in parameters(toy_model()).items():
        assert value.isfinite().all(), name
        if "norm" in name.rpartition(".weight")[0].rpartition(".")[2] or name.endswith(
            ("layer_norm_weight", ".D")
        ):
            assert (value == 1).all(), name
        elif name.endswith("A_log"):
            assert (value >= 0).all() and (value <= torch.tensor(16.0).log()).all()
        elif name.endswith("dt_bias"):
            dt = torch.nn.functional.softplus(value)
            assert (dt > 0.9e-3).all() and (dt < 1.1e-1).all()
        elif value.dim() > 1 and "conv1d" not in name:
            scaled = name.endswith(("out_proj.weight", "linear_proj.weight", "linear_fc2.weight"))
            want = 0.2 / (8**0.5 if scaled else 1)
            assert value.std().item() == pytest.approx(want, rel=0.15), name


@torch.no_grad()
def test_tied_embeddings():
    model = toy_model(tie_word_embeddings=True)
    assert "output_layer.weight" not in parameters(model)
    assert output_weight(model) is model.embedding.word_embeddings.weight
    hidden = base_forward(model, toy_tokens(4), SequenceInput())
    want = hidden @ model.embedding.word_embeddings.weight.t()
    torch.testing.assert_close(compute_logits(model, hidden), want)


@torch.no_grad()
def test_shapes_and_dtypes():
    model = build_model(CONFIG, dtype=torch.bfloat16, device="cpu")
    tokens = toy_tokens(5, batch=2)
    hidden = base_forward(model, tokens, SequenceInput())
    assert embed(model, tokens).shape == hidden.shape == (5, 2, 32)
    logits = compute_logits(model, hidden[2:4, 1])
    assert logits.shape == (2, VOCAB) and logits.dtype == hidden.dtype == torch.bfloat16
    assert all(
        parameters(model)[f"decoder.layers.0.mixer.{name}"].dtype == torch.float32
        for name in ("A_log", "D")
    )
    assert not model.training and model.mtpkit_config == CONFIG


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_rates_of_gated_delta_nets_stay_in_fp32(name):
    """Of the base and of heads, in a model of bf16."""
    config = CONFIG.replace(pattern="G*", mtp_pattern="G*", **DELTA)
    found = parameters(build_model(config, dtype=torch.bfloat16, device="cpu"))
    for layer in ("decoder.layers.0", "mtp.layers.0.mtp_model_layer.layers.0"):
        assert found[f"{layer}.self_attention.{name}"].dtype == torch.float32
        assert found[f"{layer}.self_attention.in_proj.weight"].dtype == torch.bfloat16


@torch.no_grad()
def test_the_clamp_of_dt_is_applied():
    free = toy_model(pattern="M", mtp_pattern="", mtp_num_depths=0)
    clamped = toy_model(pattern="M", mtp_pattern="", mtp_num_depths=0, mamba_dt_limit=(0.5, 0.6))
    outputs = [base_forward(model, toy_tokens(6), SequenceInput()) for model in (free, clamped)]
    assert not torch.allclose(*outputs, rtol=1e-2)


def test_unknown_backend():
    with pytest.raises(UserError, match=r"backend 'cudnn' is unknown; choose one of: .*local"):
        build_model(CONFIG, backend="cudnn")
