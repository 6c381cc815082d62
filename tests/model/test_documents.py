"""A document packed between others is computed as if it were alone."""

import pytest
import torch

from mtpkit.model import SequenceInput, base_forward, unroll_depths
from tests.kernels.recurrence import relative
from tests.model.toy import packed, toy_model, toy_tokens

LENGTHS = (3, 1, 7, 2, 5)
TOLERANCE = 1e-5
ROPE = dict(position_embedding_type="rope")


def states(model, tokens, documents=None, positions=None, attention="serving"):
    """h, g^1, g^2, g^3."""
    hidden = base_forward(model, tokens, SequenceInput(documents, positions))
    return [hidden, *unroll_depths(model, hidden, tokens, 3, attention, documents, positions)]


def worst(model, attention="serving", hide=False) -> float:
    """Largest error over documents and depths; with `hide` the model is not told where documents
    end."""
    documents, positions = packed(*LENGTHS)
    tokens = toy_tokens(sum(LENGTHS))
    whole = states(model, tokens, None if hide else documents, positions, attention)
    errors = []
    start = 0
    for length in LENGTHS:
        span = slice(start, start + length)
        for k, alone in enumerate(states(model, tokens[:, span], attention=attention)):
            if count := max(0, length - k):
                errors.append(relative(whole[k][span][:count], alone[:count]))
        start += length
    return max(errors)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["serving", "per_depth"])
@pytest.mark.parametrize("changes", [{}, ROPE, dict(mtp_pattern="M*E")], ids=str)
def test_packed_equals_alone(changes, attention):
    assert worst(toy_model(**changes), attention) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("mtp_pattern", ["*-", "M-"])
def test_packed_equals_alone_with_distinct_heads(mtp_pattern):
    assert (
        worst(toy_model(mtp_pattern=mtp_pattern, mtp_use_repeated_layer=False), "per_depth")
        < TOLERANCE
    )


@torch.no_grad()
@pytest.mark.parametrize("pattern", ["M-", "*-"])
def test_a_leak_would_be_seen(pattern):
    assert worst(toy_model(pattern=pattern), hide=True) > 1e-2


@torch.no_grad()
def test_rows_of_a_batch_do_not_mix():
    model = toy_model()
    tokens = toy_tokens(8, batch=3)
    documents = torch.tensor([[0] * 8, [0] * 3 + [1] * 5, [4] * 7 + [9]])
    together = states(model, tokens, documents)
    for row in range(3):
        alone = states(model, tokens[row : row + 1], documents[row : row + 1])
        for have, want in zip(together, alone, strict=True):
            assert relative(have[:, row : row + 1], want) < TOLERANCE
