"""Heads trained for a moment on the very texts that will be decoded, and two counts of what is
accepted of them."""

import torch

from mtpkit.data.dataset import PackedBatch
from mtpkit.training.config.settings import LossConfig
from mtpkit.training.depths import measure_depths, run_depths
from mtpkit.training.heads import freeze_base
from tests.engine.tiny import make_prompts
from tests.training.toy import answer_batch

TOKENS = 90
K = 3
VOCAB = 13
PROMPTS = [[token % VOCAB for token in prompt] for prompt in make_prompts((5, 3, 7, 2))]
ATTENTION = {"repeated": "serving", "distinct": "per_depth"}

Counts = list[list[int]]
"""Drafts of each depth that are reached, and accepted."""


def train(model, texts: list[list[int]], attention: str, steps: int = 25, lr: float = 1e-2) -> None:
    """Train on the texts that will be decoded."""
    length = min(map(len, texts))
    ids = torch.tensor([text[:length] for text in texts])
    positions = torch.arange(length).expand_as(ids)
    batch = PackedBatch(
        ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids), positions
    )
    optimizer = torch.optim.AdamW(freeze_base(model).values(), lr=lr)
    depths = model.mtpkit_config.mtp.num_depths
    for _ in range(steps):
        losses, _ = run_depths(model, batch, max(depths, K), attention, LossConfig())
        losses.sum().div(ids.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()


def predicted(model, texts: list[list[int]], attention: str) -> Counts:
    """Without an engine."""
    answers = [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]
    sums, _ = measure_depths(model, answer_batch(PROMPTS, answers), K, attention, LossConfig())
    return sums.counts().long().tolist()


def counted(llm) -> Counts:
    """By an engine that has decoded the prompts."""
    acceptance = llm.stats().acceptance
    return [acceptance.reached_per_depth, acceptance.accepted_per_depth]
