"""Unrolled depths equal what decoding one position at a time computes."""

import pytest
import torch

from mtpkit.model import (
    SequenceInput,
    base_forward,
    build_model,
    embed,
    mtp_forward,
    shift_tokens,
    unroll_depths,
)
from mtpkit.model.inputs import DepthInput, DepthStreams
from mtpkit.model.layers import delta, mamba
from tests.kernels.recurrence import relative
from tests.model.toy import CONFIG, DELTA, packed, toy_model, toy_tokens

DEPTHS = 4
TOLERANCE = 1e-5
PATTERNS = ["*", "*-", "*E", "M-", "*M-", "M*", "+-", "G-", "*GG"]
POSITIONAL = {
    "none": {},
    "rope": dict(position_embedding_type="rope", rotary_percent=0.5, qk_layernorm=True),
}
LENGTHS = {"one": (9,), "several": (5, 1, 2, 6)}


def block_input(model, hidden, token_ids):
    """x^k of the design: the embedding's norm first, the hidden state's second."""
    layer = model.mtp.layers[0]
    return layer.eh_proj(
        torch.cat([layer.enorm(embed(model, token_ids)), layer.hnorm(hidden)], -1)
    )[0]


def decode(model, hidden, tokens, start: int, i: int, depths: int):
    """g^1_i .. g^K_i as decoding makes them: the entries of depth 1 at start .. i, then one more
    for each depth.

    hidden [s, 1, h] and tokens [1, s] are the whole row's; the document of i begins at `start`.
    """
    layer = model.mtp.layers[0]
    x = block_input(model, hidden[start : i + 1], tokens[:, start + 1 : i + 2])
    states = []
    for k in range(1, depths + 1):
        if k > 1:
            x = torch.cat([x, block_input(model, states[-1][None], tokens[:, i + k : i + k + 1])])
        positions = torch.arange(len(x))[None]
        out = layer.mtp_model_layer(
            hidden_states=x,
            attention_mask=None,
            inference_context=SequenceInput(positions=positions),
        )
        states.append(layer.final_layernorm(out)[-1])
    return states


def compare(model, lengths, **changes) -> float:
    """Worst relative error over all positions and depths that read tokens of one document only."""
    documents, positions = packed(*lengths)
    tokens = toy_tokens(documents.shape[1])
    hidden = base_forward(model, tokens, SequenceInput(documents, positions))
    settings = dict(attention="serving", documents=documents, positions=positions) | changes
    states = torch.stack(list(unroll_depths(model, hidden, tokens, DEPTHS, **settings)))
    have = []
    want = []
    start = 0
    for length in lengths:
        for i in range(start, start + length - 1):
            depths = min(DEPTHS, start + length - 1 - i)
            want += decode(model, hidden, tokens, start, i, depths)
            have += states[:depths, i].unbind()
        start += length
    assert states.isfinite().all()
    return relative(torch.stack(have), torch.stack(want))


@torch.no_grad()
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("positional", POSITIONAL)
@pytest.mark.parametrize("mtp_pattern", PATTERNS)
def test_serving_attention_is_what_decoding_does(mtp_pattern, positional, lengths):
    model = toy_model(mtp_pattern=mtp_pattern, **POSITIONAL[positional])
    assert compare(model, lengths) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("mtp_pattern", ["*-", "M-", "G-"])
def test_another_mask_would_be_seen(mtp_pattern):
    model = toy_model(mtp_pattern=mtp_pattern)
    assert compare(model, (9,), attention="per_depth") > 1e-2
    assert compare(model, (5, 4), documents=None) > 1e-2


@torch.no_grad()
def test_rotary_positions_of_later_depths_matter():
    model = toy_model(mtp_pattern="*-", **POSITIONAL["rope"])
    assert compare(model, (9,)) < TOLERANCE
    assert compare(model, (9,), positions=torch.arange(9).neg()[None]) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize(
    ("mtp_pattern", "layer", "op"), [("M", mamba, "ssd_scan"), ("G", delta, "delta_rule")]
)
def test_later_depths_multiply_in_the_precision_of_the_model(mtp_pattern, layer, op, monkeypatch):
    """What they read of depth 1's states is fp32, as they go on with it; operands that were widened
    would keep the kernels from the tensor cores."""
    sizes = dict(pattern="*", mtp_pattern=mtp_pattern)
    tokens = toy_tokens(6)
    calls = []
    model = build_model(CONFIG.replace(**sizes, **DELTA), dtype=torch.bfloat16, device="cpu")
    right = getattr(layer, op)

    def spy(*args, **named):
        out = right(*args, **named)
        tokens = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() > 2]
        calls.append(({arg.dtype for arg in tokens}, out.dtype))
        return out

    monkeypatch.setattr(layer, op, spy)
    list(
        unroll_depths(
            model, base_forward(model, tokens, SequenceInput()), tokens, 2, attention="serving"
        )
    )
    assert calls == [({torch.bfloat16}, torch.bfloat16), ({torch.bfloat16}, torch.float32)]


@torch.no_grad()
@pytest.mark.parametrize("repeated", [True, False])
@pytest.mark.parametrize("mtp_pattern", ["*-", "M-"])
def test_per_depth_attention_is_one_causal_pass_a_depth(mtp_pattern, repeated):
    model = toy_model(mtp_pattern=mtp_pattern, mtp_use_repeated_layer=repeated)
    tokens = toy_tokens(9, batch=2)
    state = base_forward(model, tokens, SequenceInput())
    states = list(unroll_depths(model, state, tokens, 3, attention="per_depth"))
    for k, have in enumerate(states, start=1):
        count = 9 - k
        state = mtp_forward(model, k, state[:count], tokens[:, k:], SequenceInput())
        assert relative(have[:count], state) < TOLERANCE


@torch.no_grad()
def test_distinct_heads_use_their_own_layer():
    model = toy_model(mtp_use_repeated_layer=False)
    tokens = toy_tokens(6)
    hidden = base_forward(model, tokens, SequenceInput())
    outputs = [
        mtp_forward(model, k, hidden, shift_tokens(tokens, 1), SequenceInput()) for k in (1, 2, 3)
    ]
    assert relative(outputs[0], outputs[1]) > 1e-2 and relative(outputs[1], outputs[2]) > 1e-2


@torch.no_grad()
@pytest.mark.parametrize(("repeated", "attention"), [(True, "serving"), (False, "per_depth")])
def test_the_default_is_what_decoding_the_model_does(repeated, attention):
    model = toy_model(mtp_use_repeated_layer=repeated)
    tokens = toy_tokens(6)
    hidden = base_forward(model, tokens, SequenceInput())
    default = unroll_depths(model, hidden, tokens, 3)
    named = unroll_depths(model, hidden, tokens, 3, attention)
    assert all(torch.equal(a, b) for a, b in zip(default, named, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("attention", ["serving", "per_depth"])
def test_a_repeated_head_unrolls_further_than_it_was_trained(attention):
    model = toy_model(mtp_num_depths=1)
    tokens = toy_tokens(5)
    hidden = base_forward(model, tokens, SequenceInput())
    # past the end of the tokens too
    states = list(unroll_depths(model, hidden, tokens, 7, attention))
    assert len(states) == 7 and all(state.isfinite().all() for state in states)


@pytest.mark.parametrize(
    ("depth", "want"), [(1, [2, 3, 0]), (2, [3, 0, 0]), (3, [0, 0, 0]), (5, [0, 0, 0])]
)
def test_shift_tokens(depth, want):
    assert shift_tokens(torch.tensor([[1, 2, 3]]), depth).tolist() == [want]


@pytest.mark.parametrize("mtp_pattern", ["*-", "M-", "G-"])
def test_gradients_reach_every_head_parameter_through_all_depths(mtp_pattern):
    """The gradient of the last depth alone, by autograd against a central difference along a random
    direction."""
    model = build_model(CONFIG.replace(mtp_pattern=mtp_pattern, **DELTA), seed=3)
    tokens = toy_tokens(6)
    hidden = base_forward(model, tokens, SequenceInput()).detach()
    parameters = dict(model.mtp.named_parameters())
    generator = torch.Generator().manual_seed(1)
    directions = {name: torch.randn(p.shape, generator=generator) for name, p in parameters.items()}
    weights = torch.randn(hidden.shape, generator=generator)

    def value() -> torch.Tensor:
        *_, last = unroll_depths(model, hidden, tokens, 3, attention="serving")
        return (last * weights).double().sum()

    grads = torch.autograd.grad(value(), list(parameters.values()))
    assert all(grad.abs().max() > 0 for grad in grads)
    slope = sum(
        (g.double() * d).sum() for g, d in zip(grads, directions.values(), strict=True)
    ).item()
    ends = []
    with torch.no_grad():
        for sign in (1, -2):
            for name, parameter in parameters.items():
                parameter.add_(directions[name], alpha=sign * 1e-3)
            ends.append(value().item())
    assert (ends[0] - ends[1]) / 2e-3 == pytest.approx(slope, rel=2e-2)


def test_depths_see_what_earlier_ones_left():
    """A depth that runs again leaves nothing, and one type is asked for."""
    streams = DepthStreams()
    one, two, three = (DepthInput(depth=depth, streams=streams) for depth in (1, 2, 3))
    assert one.leave("a", 1.0) == [1.0] and two.leave("a", 2.0) == [1.0, 2.0]
    assert one.leave("a", 5.0) == [5.0] and three.left("a", float) == [1.0, 2.0]
    assert (
        three.left("a", float, first=2) == [2.0]
        and not one.left("a", float)
        and not three.left("b", float)
    )
    with pytest.raises(AssertionError, match="a holds other entries than str"):
        two.left("a", str)
