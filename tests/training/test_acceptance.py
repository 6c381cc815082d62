"""Acceptance along a text against greedy speculative decoding written out with whole forward
passes."""

import pytest
import torch

from mtpkit.data.dataset import PackedBatch
from mtpkit.model import SequenceInput, base_forward, compute_logits, unroll_depths
from mtpkit.training.config.settings import LossConfig
from mtpkit.training.depths import DECODINGS, measure_depths, run_depths
from mtpkit.training.heads import freeze_base
from tests.training.toy import answer_batch, toy_model

PROMPT = [3, 1, 4, 1, 5]


def draft(model, tokens, num_depths):
    """K drafts after `tokens`, whose last one was just sampled: nothing later is known."""
    drafts = []
    for depth in range(1, num_depths + 1):
        text = torch.tensor([tokens + drafts])
        hidden = base_forward(model, text, SequenceInput())
        states = list(unroll_depths(model, hidden, text, depth))[-1]
        drafts.append(int(compute_logits(model, states[len(tokens) - 2, 0]).argmax()))
    return drafts


@pytest.fixture(scope="module")
def answered():
    """A model whose heads are half trained on the text, prompt and answer, that its base wrote."""
    model = toy_model()
    tokens = list(PROMPT)
    with torch.no_grad():
        while len(tokens) < 40:
            hidden = base_forward(model, torch.tensor([tokens]), SequenceInput())
            tokens.append(int(compute_logits(model, hidden[-1, 0]).argmax()))
    optimizer = torch.optim.Adam(freeze_base(model).values(), lr=1e-2)
    ids = torch.tensor([tokens])
    batch = PackedBatch(ids, ids >= 0, torch.zeros_like(ids), torch.arange(40)[None])
    for _ in range(6):
        optimizer.zero_grad()
        run_depths(model, batch, 3, "serving", LossConfig("ce"))[0].sum().backward()
        optimizer.step()
    return model, tokens


@torch.no_grad()
@pytest.mark.parametrize("length", [40, 39, 38, 37])
@pytest.mark.parametrize("num_depths", [1, 3])
def test_equals_decoding(answered, num_depths, length):
    """To the last step, which the end of the text cuts short."""
    model, tokens = answered
    tokens = tokens[:length]
    reached = [0] * num_depths
    accepted = [0] * num_depths
    known = len(PROMPT) + 1
    while known < len(tokens):
        right = 0
        for guess in draft(model, tokens[:known], num_depths)[: len(tokens) - known]:
            reached[right] += 1
            if guess != tokens[known + right]:
                break
            accepted[right] += 1
            right += 1
        known += right + 1
    batch = answer_batch([PROMPT], [tokens[len(PROMPT) :]])
    sums, by_document = measure_depths(model, batch, num_depths, "serving", LossConfig())
    assert sums.counts().tolist() == [reached, accepted]
    assert by_document[0, :2].tolist() == [reached[0], sum(accepted)]
    assert 0 < accepted[0] < reached[0] and sums.departures() == 0


@torch.no_grad()
def test_an_answer_of_one_token_has_no_step(answered):
    model, tokens = answered
    batch = answer_batch([tokens[:8]], [tokens[8:9]])
    sums, by_document = measure_depths(model, batch, 3, "serving", LossConfig())
    assert not sums.values.any() and not len(by_document)
    assert [sums.acceptance_length(decoding) for decoding in DECODINGS] == [1, 1, 1]
