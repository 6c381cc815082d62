"""Attention with every option against a recurrence in fp64, over sequences and in training."""

import pytest
import torch

from mtpkit.model import SequenceInput, base_forward, build_model, compute_logits, unroll_depths
from tests.kernels.recurrence import relative
from tests.model.oracle import Oracle
from tests.toy_config import toy_config

ROPE = dict(position_embedding_type="rope", rotary_base=100.0)
CASES = {
    "zero_centered": dict(layernorm_zero_centered_gamma=True, qk_layernorm=True),
    "gate": dict(attention_output_gate=True, num_attention_heads=6, num_query_groups=3),
    "gate_norm": dict(
        attention_output_gate=True, qk_layernorm=True, num_attention_heads=5, num_query_groups=5
    ),
    "bias": dict(add_qkv_bias=True, num_attention_heads=6, num_query_groups=3, **ROPE),
    "partial": dict(
        qk_layernorm=True, rotary_percent=0.5, num_attention_heads=3, num_query_groups=1, **ROPE
    ),
    "qwen3_next": dict(
        layernorm_zero_centered_gamma=True,
        attention_output_gate=True,
        qk_layernorm=True,
        rotary_percent=0.25,
        kv_channels=16,
        num_attention_heads=6,
        num_query_groups=2,
        activation="swiglu",
        **ROPE,
    ),
}
LENGTH = 11
TOLERANCE = 1e-5


def fresh(**changes):
    """A model none of whose parameters keeps a value that another could be mistaken for."""
    sizes = dict(pattern="*-*", mtp_pattern="*-", mtp_num_depths=2)
    model = build_model(toy_config(**sizes | changes), device="cpu", seed=3).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def outcome(model, ids):
    hidden = base_forward(model, ids, SequenceInput())
    states = [hidden, *unroll_depths(model, hidden, ids, 2, attention="per_depth")]
    return compute_logits(model, hidden).transpose(0, 1), [
        state.transpose(0, 1) for state in states
    ]


def errors(oracle, model, ids) -> list[float]:
    """Of logits, and of every depth's states."""
    logits, states = outcome(model, ids)
    state = oracle.hidden(ids)
    found = [relative(logits, oracle.logits(state)), relative(states[0], state)]
    for depth in (1, 2):
        state = oracle.depth(depth, state, ids)
        found.append(relative(states[depth][:, : LENGTH - depth], state))
    return found


IDS = torch.randint(40, (2, LENGTH), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_sequences_are_what_the_definition_says(case):
    model = fresh(**CASES[case])
    assert max(errors(Oracle.of_model(model), model, IDS)) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize(
    "wrong",
    [
        dict(layernorm_zero_centered_gamma=False),
        dict(attention_output_gate=False),
        dict(rotary_percent=0.5),
        dict(qk_layernorm=False),
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_an_option_that_is_missed_would_be_seen(wrong):
    model = fresh(**CASES["qwen3_next"])
    oracle = Oracle.of_model(model)
    oracle.config |= wrong
    assert min(errors(oracle, model, IDS)) > 1e-2


@torch.no_grad()
def test_biases_by_part_would_be_seen():
    """The bias lies as the rows do: queries, key and value of a group, then the next group."""
    model = fresh(**CASES["bias"])
    oracle = Oracle.of_model(model)
    name = "decoder.layers.0.self_attention.linear_qkv.bias"
    grouped = oracle.weights[name].unflatten(0, (3, 4, -1))
    oracle.weights[name] = torch.cat(
        [grouped[:, :2].flatten(), grouped[:, 2].flatten(), grouped[:, 3].flatten()]
    )
    assert min(errors(oracle, model, IDS)) > 1e-2


@torch.no_grad()
def test_gates_after_keys_would_be_seen():
    """Rows of a group: queries, gates, key, value."""
    model = fresh(**CASES["gate_norm"])
    oracle = Oracle.of_model(model)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    rows = oracle.weights[name].unflatten(0, (5, 4, -1))
    oracle.weights[name] = rows[:, [0, 2, 1, 3]].flatten(0, 2)
    assert min(errors(oracle, model, IDS)) > 1e-2


@torch.no_grad()
def test_norms_around_zero_multiply_by_one_more():
    """In every kind of layer: a model whose norms have weights 1 + w computes the same."""
    layers = dict(pattern="M*-E", num_moe_experts=4, moe_ffn_hidden_size=16, qk_layernorm=True)
    model = fresh(layernorm_zero_centered_gamma=True, **layers)
    other = fresh(**layers)
    other.load_state_dict(model.state_dict())
    for name, weight in other.named_parameters():
        if name.endswith(("norm.weight", "norm_weight")) and "mixer.norm." not in name:
            weight.add_(1)
    (logits, states), (want, want_states) = outcome(model, IDS), outcome(other, IDS)
    assert relative(logits, want.double()) < TOLERANCE
    assert all(
        relative(a, b.double()) < TOLERANCE for a, b in zip(states, want_states, strict=True)
    )


def test_gradients_through_the_gate_are_those_of_a_difference():
    """Serving attention over two depths, along a random direction of all parameters."""
    model = fresh(**CASES["qwen3_next"])
    parameters = dict(model.mtp.named_parameters())
    hidden = base_forward(model, IDS, SequenceInput())
    generator = torch.Generator().manual_seed(2)
    directions = {name: torch.randn(p.shape, generator=generator) for name, p in parameters.items()}
    weights = torch.randn(hidden.shape, generator=generator)
    model.mtp.requires_grad_(True)

    def value():
        *_, last = unroll_depths(model, hidden, IDS, 2, attention="serving")
        return (last * weights).double().sum()

    grads = torch.autograd.grad(value(), list(parameters.values()))
    slope = sum(
        (grad.double() * d).sum() for grad, d in zip(grads, directions.values(), strict=True)
    ).item()
    ends = []
    with torch.no_grad():
        for sign in (1, -2):
            for name, parameter in parameters.items():
                parameter.add_(directions[name], alpha=sign * 1e-3)
            ends.append(value().item())
    assert (ends[0] - ends[1]) / 2e-3 == pytest.approx(slope, rel=2e-2)


def test_a_fresh_model_multiplies_by_one():
    """Norms start so, also where their weights are around zero; Mamba's own norm is never around
    zero."""
    model = build_model(
        toy_config(layernorm_zero_centered_gamma=True, qk_layernorm=True), device="cpu"
    )
    norms = {
        n: p for n, p in model.named_parameters() if n.endswith(("norm.weight", "norm_weight"))
    }
    assert len(norms) > 10
    for name, weight in norms.items():
        assert (weight == int("mixer.norm." in name)).all(), name
