"""The input of eh_proj against norms in fp64."""

import pytest
import torch

from mtpkit.kernels.integer_rows import IntegerRows
from mtpkit.kernels.norm import reference
from tests.kernels.recurrence import relative

EPS = 1e-5
VOCAB = 11


def draw(tokens, width, dtype):
    """Arguments whose `hidden` has NaN between its rows, and whose embedding has NaN in the rows
    that are not read."""
    token_ids = torch.randint(VOCAB, (tokens,))
    hidden = torch.full((tokens, 2, width), torch.nan, dtype=dtype)[:, 1].copy_(
        torch.randn(tokens, width)
    )
    embedding = torch.full((VOCAB, width), torch.nan, dtype=dtype)
    embedding[token_ids] = torch.randn(tokens, width).to(dtype)
    return token_ids, hidden, embedding, *(torch.randn(width).to(dtype) for _ in range(2))


def definition(token_ids, hidden, embedding, enorm_weight, hnorm_weight, more=0):
    """`more` is added to the weights."""
    halves = []
    for x, weight in ((embedding[token_ids], enorm_weight), (hidden, hnorm_weight)):
        x = x.double()
        halves.append(
            x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS) * (more + weight.double())
        )
    return torch.cat(halves, -1)


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 17), (4, 63), (9, 128), (2, 500)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_mtp_input(twin, dtype, tokens, width, zero_centered):
    arguments = draw(tokens, width, dtype)
    on_device = [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=twin.device)
        for t in arguments
    ]
    rest = EPS, zero_centered
    have = twin("norm").mtp_input(
        *(a.copy_(b) for a, b in zip(on_device, arguments, strict=True)), *rest
    )
    want = definition(*arguments, more=int(zero_centered))
    # Triton's interpreter cuts bf16 off instead of rounding.
    bound = 2 * relative(reference.mtp_input(*arguments, *rest), want) + (
        2**-7 if twin.name == "interpreter" else 1e-6
    )
    assert have.dtype == dtype and have.shape == (tokens, 2 * width)
    assert relative(have.cpu(), want) < (1e-5 if dtype == torch.float32 else bound)


@pytest.mark.parametrize(
    ("bits", "width"), [(8, 1), (8, 63), (8, 500), (4, 2), (4, 62), (4, 256), (4, 500)]
)
@pytest.mark.parametrize("zero_first", [False, True])
def test_an_embedding_of_integers(twin, bits, width, zero_first):
    """The rows that are read have scales of their own."""
    token_ids, hidden, _, *weights = draw(5, width, torch.float32)
    rows = IntegerRows.of(torch.randn(VOCAB, width) * torch.arange(1, VOCAB + 1)[:, None], bits)
    positions = torch.tensor([3, 0, 1, 9, 0]) if zero_first else None
    table = IntegerRows(*(part.to(twin.device) for part in rows))
    on_device = [t.to(twin.device) for t in (token_ids, hidden, *weights)]
    have = twin("norm").mtp_input(
        *on_device[:2],
        table,
        *on_device[2:],
        EPS,
        False,
        None if positions is None else positions.to(twin.device),
    )
    want = definition(token_ids, hidden, rows.at(torch.arange(VOCAB), torch.float32), *weights)
    if positions is not None:
        want[positions == 0, :width] = 0
    assert have.dtype == torch.float32 and relative(have.cpu(), want) < 1e-5


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("width", [1, 17, 128])
def test_zeros_take_the_place_of_embeddings_at_position_0(twin, width, zero_centered):
    """Which may hold anything."""
    token_ids, hidden, embedding, *weights = draw(6, width, torch.float32)
    positions = torch.tensor([0, 1, 7, 0, 2**40, 0])
    embedding[token_ids[0]] = torch.nan
    token_ids[3], token_ids[5] = token_ids[0], token_ids[0]
    others = positions != 0
    token_ids[others] = token_ids[others].where(
        token_ids[others] != token_ids[0], (token_ids[0] + 1) % VOCAB
    )
    embedding[token_ids[others]] = 1.5
    arguments = [t.to(twin.device) for t in (token_ids, hidden, embedding, *weights)]
    have = twin("norm").mtp_input(*arguments, EPS, zero_centered, positions.to(twin.device)).cpu()
    assert not have[~others, :width].any()
    want = definition(token_ids, hidden, embedding, *weights, more=int(zero_centered))
    assert (
        relative(have[others], want[others]) < 1e-5
        and relative(have[:, width:], want[:, width:]) < 1e-5
    )


def test_embedding_comes_first(twin):
    """Worked example: tokens 2 and 0, width 2, eps 0: each half is a unit-RMS vector."""
    embedding = torch.tensor([[3.0, 3.0], [9.0, 9.0], [1.0, -1.0]])
    hidden = torch.tensor([[2.0, -2.0], [-4.0, 4.0]])
    ones = torch.ones(2)
    arguments = (
        t.to(twin.device) for t in (torch.tensor([2, 0]), hidden, embedding, ones, 10 * ones)
    )
    have = twin("norm").mtp_input(*arguments, 0.0).cpu()
    assert torch.allclose(have, torch.tensor([[1.0, -1.0, 10.0, -10.0], [1.0, 1.0, -10.0, 10.0]]))
