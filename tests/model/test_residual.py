"""Layers in decoding: megatron-core's results with fewer kernels, on one rank and on two."""

import copy

import pytest
import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer import TransformerLayer
from torch.utils._python_dispatch import TorchDispatchMode

from mtpkit.model import StepInput, build_model, compute_logits, init_weights, output_weight
from mtpkit.model.collectives import all_gather
from mtpkit.model.mtp import draft_output_weight, greedy_tokens
from mtpkit.model.quantized import online
from mtpkit.model.state import Committed
from tests.kernels.recurrence import relative
from tests.model.test_steps import make_layout, nan_states, simulate
from tests.model.toy import CONFIG, VOCAB, toy_model
from tests.ranks import run_ranks
from tests.toy_config import toy_config

KINDS = {"M": 0, "*": 1, "-": 2, "E": 3}
ROWS = 2
WIDTH = 3


def first_step(model) -> StepInput:
    """The first step of two rows: as prefill chunks, which read no cache."""
    tokens = ROWS * WIDTH
    return StepInput(
        positions=torch.arange(WIDTH).repeat(ROWS),
        query_start=torch.arange(0, tokens + 1, WIDTH),
        context_lens=torch.zeros(ROWS, dtype=torch.int64),
        block_tables=torch.arange(ROWS)[:, None],
        kv_slots=torch.tensor([0, 1, 2, 4, 5, 6]),
        state_slots=torch.arange(ROWS),
        committed=Committed.none((), ROWS, torch.device("cpu")),
        num_decode_rows=0,
        decode_width=0,
        states=nan_states(make_layout(model, "snapshot")),
    )


def run(layer, x, step):
    out = layer(x, inference_context=step)
    return out[0] if isinstance(out, tuple) else out


def megatron(layer, x, step):
    """Run the layer by megatron-core's own forward."""
    if isinstance(layer, MambaLayer):
        return MambaLayer.forward(layer, x, inference_context=step)
    return TransformerLayer.forward(layer, x, inference_context=step)[0]


class Calls(TorchDispatchMode):
    """Names of the operators that ran, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "view" not in func.name():
            self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_megatrons(kind, activation):
    model = toy_model(activation=activation)
    layer = model.decoder.layers[KINDS[kind]]
    step = first_step(model)
    x = torch.randn(ROWS * WIDTH, 1, CONFIG.hidden_size)
    want = megatron(layer, x.clone(), copy.deepcopy(step)).double()
    assert relative(run(layer, x.clone(), step), want) < 1e-6
    assert relative(run(layer, x.clone(), step), x.double()) > 0.01


@torch.no_grad()
@pytest.mark.parametrize("kind", ["M", "*", "-"])
def test_the_product_adds_to_the_residual(kind):
    model = toy_model()
    layer = model.decoder.layers[KINDS[kind]]
    x = torch.randn(ROWS * WIDTH, 1, CONFIG.hidden_size)
    assert run(layer, x, first_step(model)).data_ptr() == x.data_ptr()


@torch.no_grad()
def test_an_mlp_is_four_calls():
    model = toy_model()
    layer = model.decoder.layers[KINDS["-"]]
    step = first_step(model)
    x = torch.randn(ROWS * WIDTH, 1, CONFIG.hidden_size)
    with Calls() as calls:
        run(layer, x, step)
    assert [name for name in calls.names if "mm" in name] == ["mm", "addmm_"]
    assert calls.names[calls.names.index("mm") + 1 :] == ["relu", "pow.Tensor_Scalar", "addmm_"]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_pass_and_leave_the_input_alone(kind):
    model = build_model(CONFIG, device="cpu", seed=3)
    layer = model.decoder.layers[KINDS[kind]]
    x = torch.randn(ROWS * WIDTH, 1, CONFIG.hidden_size, requires_grad=True)
    grads = []
    for forward in (run, megatron):
        step = first_step(model)
        weights = torch.linspace(-1, 1, x.numel()).view_as(x)
        before = x.detach().clone()
        inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]
        grads.append(
            torch.autograd.grad(
                (forward(layer, x, step) * weights).sum(), inputs, allow_unused=True
            )
        )
        assert torch.equal(x, before)
    for have, want in zip(*grads, strict=True):
        assert (have is None) == (want is None)
        # An expert without tokens has a gradient of zeros.
        assert have is None or torch.equal(have, want) or relative(have, want.double()) < 1e-5


@torch.no_grad()
def test_a_residual_is_added_in_the_call_that_is_given_it():
    linear = toy_model().decoder.layers[KINDS["-"]].mlp.linear_fc2
    x = torch.randn(3, 1, CONFIG.mlp.ffn_hidden_size)
    residual = torch.randn(3, 1, CONFIG.hidden_size)
    plain = linear(x)[0]
    want = residual + plain
    assert relative(linear(x, residual)[0], want.double()) < 1e-6
    assert torch.equal(linear(x)[0], plain)


@torch.no_grad()
def test_a_residual_that_cannot_be_accumulated_into():
    linear = toy_model().decoder.layers[KINDS["-"]].mlp.linear_fc2
    x = torch.randn(3, 2, CONFIG.mlp.ffn_hidden_size)
    residual = torch.randn(2, 3, CONFIG.hidden_size).transpose(0, 1)
    want = residual + linear(x)[0]
    assert relative(linear(x, residual)[0], want.double()) < 1e-6


def check_greedy_tokens(model) -> None:
    """Check greedy tokens of the whole vocabulary, and of a pruned one."""
    hidden = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    logits = compute_logits(model, hidden)
    assert greedy_tokens(model, hidden).tolist() == logits.argmax(-1).tolist()
    token_ids = torch.tensor([3, 39, 0, 21, 20, 19])
    want = token_ids[logits[:, token_ids].argmax(-1)]
    assert (
        greedy_tokens(model, hidden, *draft_output_weight(model, token_ids)).tolist()
        == want.tolist()
    )
    part = hidden @ online(output_weight(model)).widen().t()
    rounded = torch.cat(all_gather(part, model.pg_collection.tp).unbind(), -1)
    for ids in (torch.arange(rounded.shape[1]), token_ids):
        chosen = None if len(ids) > len(token_ids) else ids
        copied = draft_output_weight(model, chosen, "fp8_e4m3")
        want = ids[rounded[:, ids].argmax(-1)]
        assert greedy_tokens(model, hidden, *copied).tolist() == want.tolist()


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_greedy_tokens(tied):
    model = toy_model(tie_word_embeddings=tied)
    check_greedy_tokens(model)
    rows, tokens = draft_output_weight(model, torch.tensor([7, 2]))
    assert torch.equal(rows, output_weight(model)[[7, 2]]) and tokens.tolist() == [7, 2]


@torch.no_grad()
def two_ranks(rank: int) -> None:
    for activation in ("relu2", "swiglu"):
        config = toy_config(vocab_size=VOCAB, mamba_chunk_size=4, activation=activation)
        model = build_model(config, device="cpu", seed=3, tensor_parallel=2)
        # each rank its own rows; what both hold whole is ones
        init_weights(model, config, seed=rank)
        assert simulate(model, "replay") < 1e-5
        check_greedy_tokens(model)


def test_two_ranks():
    run_ranks(two_ranks)
