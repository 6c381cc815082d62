"""The best token of logits and of hidden states."""

import math

import pytest
import torch

from mtpkit.kernels import NO_TOKEN

# the interpreter's loops
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

LOGIT_SHAPES = [(1, 1), (3, 17), (2, 4099), (5, 9000)]
HEAD_SHAPES = [(1, 3, 17), (3, 63, 40), (16, 64, 128), (17, 130, 40), (33, 65, 96), (64, 129, 130)]
"""Rows of hidden states, vocabulary, hidden size; with full and partly empty blocks in each
dimension."""


def heads(rows, vocabulary, width, dtype=torch.float32):
    return torch.randn(rows, width).to(dtype), torch.randn(vocabulary, width).to(dtype)


def low(twin):
    """The 16-bit dtype of a twin; Triton's interpreter multiplies the bit patterns of bf16."""
    return torch.float16 if twin.name == "interpreter" else torch.bfloat16


def shortfall(tokens, hidden, weight):
    """Distance of the chosen tokens' logits from the best, in fp64, relative to the largest
    logit."""
    logits = hidden.double() @ weight.double().t()
    return (
        ((logits.amax(-1) - logits.gather(1, tokens[:, None])[:, 0]) / logits.abs().amax())
        .max()
        .item()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", LOGIT_SHAPES)
def test_argmax(twin, shape, dtype):
    whole = torch.full((shape[0], shape[1] + 7), math.inf, dtype=dtype)
    logits = whole[:, : shape[1]].copy_(torch.randn(shape))
    have = twin("draft_head").argmax(whole.to(twin.device)[:, : shape[1]])
    assert have.dtype == torch.int64 and have.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("programs", [3, 6, 1000])
@pytest.mark.parametrize(
    "places", [(0, 8999), (5, 6, 7), (4095, 4096), (17, 4096 + 17, 8192 + 17), (8998, 8999)]
)
def test_first_of_ties(twin, places, programs, monkeypatch):
    """Equal logits lie within a block, in blocks of one program, or in those of several."""
    module = twin("draft_head")
    monkeypatch.setattr(module, "PER_MULTIPROCESSOR", 1, raising=False)
    monkeypatch.setattr(module, "multiprocessors", lambda: programs, raising=False)
    logits = torch.randn(3, 9000).clamp_max(3)
    logits[:, list(places)] = 4.0
    assert twin("draft_head").argmax(logits.to(twin.device)).tolist() == [places[0]] * 3


def test_argmax_of_equal_and_masked_logits(twin):
    logits = torch.full((3, 5000), -math.inf)
    logits[0, 4999] = -1e30
    logits[1] = 0
    logits[2] = -3e38
    assert twin("draft_head").argmax(logits.to(twin.device)).tolist() == [4999, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocabulary", "place"), [(1, 0), (17, 16), (9000, 0), (9000, 5000), (9000, 8999)]
)
def test_no_token_of_invalid_logits(twin, vocabulary, place, dtype):
    """A row is invalid with one NaN or +inf anywhere, or -inf everywhere."""
    logits = torch.randn(5, vocabulary).to(dtype)
    logits[1, place], logits[2, place], logits[3] = math.nan, math.inf, -math.inf
    want = [int(logits[0].argmax()), NO_TOKEN, NO_TOKEN, NO_TOKEN, int(logits[4].argmax())]
    assert twin("draft_head").argmax(logits.to(twin.device)).tolist() == want


def test_parts_of_many_rows(twin):
    """Programs read several blocks, and the last one fewer."""
    if twin.name == "interpreter":
        pytest.skip("a thousand programs")
    logits = torch.randn(700, 20_000)
    assert twin("draft_head").argmax(logits.to(twin.device)).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("shape", HEAD_SHAPES)
def test_linear_argmax(twin, shape, full):
    hidden, weight = heads(*shape, torch.float32 if full else low(twin))
    have = twin("draft_head").linear_argmax(hidden.to(twin.device), weight.to(twin.device))
    assert have.dtype == torch.int64 and have.shape == shape[:1]
    # What rounding of bf16 logits to 8 bits may hide; the sums of fp32 hide less.
    assert shortfall(have.cpu(), hidden, weight) <= (1e-6 if full else 2**-8)


@pytest.mark.parametrize("rows", [1, 20, 70])
def test_a_pruned_vocabulary(twin, rows):
    hidden, weight = heads(rows, 200, 32)
    token_ids = torch.randperm(200)[:77]
    want = token_ids[(hidden @ weight[token_ids].t()).argmax(-1)]
    arguments = (hidden, weight[token_ids], token_ids)
    have = twin("draft_head").linear_argmax(*(t.to(twin.device) for t in arguments))
    assert have.tolist() == want.tolist()


def test_first_of_equal_tokens(twin):
    """Equal rows of the weight lie in one tile, or in two."""
    hidden = torch.ones(2, 16)
    weight = torch.zeros(150, 16)
    weight[[70, 71, 149]] = 1.0
    assert twin("draft_head").linear_argmax(
        hidden.to(twin.device), weight.to(twin.device)
    ).tolist() == [70, 70]


def test_nothing(twin):
    ops = twin("draft_head")
    nothing = torch.empty(0, 16, device=twin.device)
    assert (
        ops.argmax(nothing).shape
        == ops.linear_argmax(nothing, torch.ones(4, 16, device=twin.device)).shape
        == (0,)
    )


def test_strided_hidden_states(twin):
    hidden, weight = heads(6, 90, 32)
    spread = torch.full((6, 3, 32), math.nan)
    spread[:, 1] = hidden
    have = twin("draft_head").linear_argmax(spread.to(twin.device)[:, 1], weight.to(twin.device))
    assert have.tolist() == (hidden @ weight.t()).argmax(-1).tolist()


@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_row_of_nan_has_no_token(twin, rows, mapped):
    """The other rows do not change."""
    hidden, weight = heads(rows, 130, 40)
    token_ids = torch.arange(130) + 7 if mapped else torch.arange(130)
    want = token_ids[(hidden @ weight.t()).argmax(-1)]
    hidden[2, 3], want[2] = math.nan, NO_TOKEN
    hidden[4], want[4] = math.inf, NO_TOKEN
    arguments = (hidden, weight, token_ids) if mapped else (hidden, weight)
    assert (
        twin("draft_head").linear_argmax(*(t.to(twin.device) for t in arguments)).tolist()
        == want.tolist()
    )


@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_leaves_no_token(twin, rows, value):
    """The best token is in the last row of the weight, which fills no tile."""
    hidden, weight = heads(rows, 130, 40)
    hidden.abs_()
    weight[129, 39] = value
    have = twin("draft_head").linear_argmax(hidden.to(twin.device), weight.to(twin.device))
    assert have.tolist() == [NO_TOKEN] * rows


@pytest.mark.parametrize("rows", [1, 16, 33, 64])
def test_streaming_at_every_height(twin, rows):
    if twin.name == "reference":
        pytest.skip("has no tiles")
    hidden, weight = heads(rows, 300, 160, low(twin))
    have = twin("draft_head").stream(hidden.to(twin.device), weight.to(twin.device))
    assert shortfall(have.cpu(), hidden, weight) < 1e-6


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_best_logits_of_a_part(twin, rows):
    """What ranks exchange: the best logit beside its token, +inf where a logit is invalid, -inf
    where none counts."""
    hidden, weight = heads(rows, 40, 24)
    token_ids = torch.arange(100, 140)
    values, tokens = twin("draft_head").linear_best(
        *(t.to(twin.device) for t in (hidden, weight, token_ids))
    )
    best = (hidden.double() @ weight.double().t()).max(-1)
    assert values.dtype == torch.float32 and torch.allclose(
        values.cpu().double(), best.values, rtol=1e-4
    )
    assert tokens.tolist() == (100 + best.indices).tolist()
    logits = (hidden @ weight.t()).to(twin.device)
    logits[0, 7] = math.nan
    values, tokens = twin("draft_head").best(logits)
    assert values[0] == math.inf and tokens[0] == NO_TOKEN
    assert tokens[1:].tolist() == best.indices[1:].tolist()


def test_a_part_without_tokens_has_no_best(twin):
    hidden = torch.randn(3, 8, device=twin.device)
    none = torch.zeros(0, dtype=torch.int64, device=twin.device)
    values, tokens = twin("draft_head").linear_best(hidden, hidden[:0], none)
    assert values.tolist() == [-math.inf] * 3 and tokens.tolist() == [NO_TOKEN] * 3
    values, tokens = twin("draft_head").best(torch.full((2, 5), -math.inf, device=twin.device))
    assert values.tolist() == [-math.inf] * 2 and tokens.tolist() == [NO_TOKEN] * 2
