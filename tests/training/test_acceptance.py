"""Served acceptance against greedy speculative decoding written out with whole forward passes."""

import pytest
import torch

from mtpkit.data.dataset import PackedBatch
from mtpkit.errors import MtpkitError
from mtpkit.model import SequenceInput, base_forward, compute_logits, unroll_depths
from mtpkit.training.config.settings import LossConfig
from mtpkit.training.depths import run_depths
from mtpkit.training.evaluation import served_acceptance
from mtpkit.training.heads import freeze_base
from tests.training.toy import toy_model

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
    model, tokens = toy_model(), list(PROMPT)
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
@pytest.mark.parametrize("num_depths", [1, 3])
def test_equals_decoding(answered, num_depths):
    model, tokens = answered
    offered, accepted = [0] * num_depths, [0] * num_depths
    known = len(PROMPT) + 1
    while known + num_depths <= len(tokens):
        right = 0
        for guess in draft(model, tokens[:known], num_depths):
            offered[right] += 1
            if guess != tokens[known + right]:
                break
            accepted[right] += 1
            right += 1
        known += right + 1
    sums = served_acceptance(model, torch.tensor(tokens), len(PROMPT), num_depths)
    assert sums.values[2:].tolist() == [offered, accepted]
    assert 0 < accepted[0] < offered[0]


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 3, 4, 6])
def test_a_text_shorter_than_the_drafts_has_no_step(answered, length):
    """The prompt's last token, the one that the base gives, and fewer than K more."""
    model, tokens = answered
    assert not served_acceptance(model, torch.tensor(tokens[:length]), length, num_depths=6).values.any()


@torch.no_grad()
def test_logits_that_are_no_numbers_accept_nothing(answered):
    model, tokens = answered
    weight = model.output_layer.weight
    before = weight[0].clone()
    try:
        weight[0] = torch.nan  # what a search for the largest finds first
        with pytest.raises(MtpkitError, match="NaN or infinity in the logits of depth 1"):
            served_acceptance(model, torch.tensor(tokens), len(PROMPT), 3)
    finally:
        weight[0] = before
