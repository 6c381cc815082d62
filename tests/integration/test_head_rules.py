"""Under each rule of what heads read, briefly trained heads are accepted as often as teacher forcing predicts."""

from itertools import chain

import pytest
import torch

from mtpkit.data.dataset import PackedBatch
from mtpkit.model import build_model
from mtpkit.training.config.settings import LossConfig
from mtpkit.training.depths import run_depths
from mtpkit.training.evaluation import served_acceptance
from mtpkit.training.heads import freeze_base
from tests.engine.test_head_rules import RULES
from tests.engine.tiny import generate, greedy, make_llm, make_prompts, ruled_model

TOKENS, K, VOCAB = 90, 3, 13
PROMPTS = [[token % VOCAB for token in prompt] for prompt in make_prompts((5, 3, 7, 2))]
ATTENTION = {"repeated": "serving", "distinct": "per_depth"}


def train(model, texts: list[list[int]], attention: str) -> None:
    """Train on the texts that will be decoded."""
    length = min(map(len, texts))
    ids = torch.tensor([text[:length] for text in texts])
    positions = torch.arange(length).expand_as(ids)
    batch = PackedBatch(ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids), positions)
    optimizer = torch.optim.AdamW(freeze_base(model).values(), lr=1e-2)
    depths = model.mtpkit_config.mtp.num_depths
    for _ in range(25):
        losses, _ = run_depths(model, batch, max(depths, K), attention, LossConfig())
        losses.sum().div(ids.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()


def predicted(model, texts: list[list[int]], attention: str) -> list[list[int]]:
    """Drafts of each depth that are reached, and accepted."""
    pairs = zip(texts, PROMPTS, strict=True)
    sums = [served_acceptance(model, torch.tensor(text), len(prompt), K, attention) for text, prompt in pairs]
    return sum(sums[1:], start=sums[0]).values[2:].long().tolist()


def close(one: list[list[int]], other: list[list[int]]) -> bool:
    """But for the last step of each request, of which the engine counts the drafts up to the last token."""
    pairs = zip(chain(*one), chain(*other), strict=True)
    return all(abs(a - b) <= len(PROMPTS) for a, b in pairs)


@pytest.mark.parametrize(
    "name, heads",
    [("mimo", "repeated"), *((name, "distinct") for name in RULES if name != "mimo"), ("glm", "repeated")],
)
def test_the_engine_counts_what_teacher_forcing_predicts(name, heads):
    model = ruled_model.__wrapped__(heads, vocab_size=VOCAB, **RULES[name])  # its own, to be trained
    answers = generate(make_llm(model, 0), PROMPTS, greedy(TOKENS + K - 1), poison=False)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    train(model, texts, ATTENTION[heads])
    llm = make_llm(model, K)
    assert generate(llm, PROMPTS, greedy(TOKENS), poison=False) == [answer[:TOKENS] for answer in answers]
    acceptance = llm.stats().acceptance
    counted = [acceptance.reached_per_depth, acceptance.accepted_per_depth]
    other = build_model(ruled_model(heads, vocab_size=VOCAB).mtpkit_config, device="cpu", init="none")
    other.load_state_dict(model.state_dict())
    assert close(counted, predicted(model, texts, ATTENTION[heads])) and min(chain(*counted)) > 20
    if name != "deepseek":  # the first of many embeddings decides few drafts; other tests see it
        assert not close(counted, predicted(other, texts, ATTENTION[heads])), "another rule would agree as well"
