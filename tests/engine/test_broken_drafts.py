"""Drafts whose activations are not finite, and which the base rejects, change nothing but how many
are accepted."""

import dataclasses
import math

import pytest
import torch

from mtpkit.engine.steps.plan import Drafts
from mtpkit.model import build_model
from tests.engine.fakes import KnownTokens
from tests.engine.test_trees import FIXED, GROWN, tree_llm
from tests.engine.tiny import VOCAB_SIZE, decode, generate, greedy, make_prompts, tiny_model
from tests.shared import covering

PROMPTS = make_prompts()
EMBEDDING = "embedding.word_embeddings.weight"


class WithBroken:
    """A drafter around the heads' own that puts a token in some places of the drafts."""

    def __init__(self, inner, token: int) -> None:
        self.inner, self.token, self.known, self.count = inner, token, KnownTokens(), 0

    def draft(self, hidden, batch, verdict) -> Drafts:
        drafts = self.inner.draft(hidden, batch, verdict)
        token_ids = drafts.token_ids.clone()
        for row, known in enumerate(self.known.after(batch, verdict)):
            token_ids[row, sum(known) % token_ids.shape[1]] = self.token
            self.count += 1
        return dataclasses.replace(drafts, token_ids=token_ids)


MODELS = [
    ("repeated", "M-*M-", "*-"),
    ("repeated", "G-*G-", "G*"),
    ("repeated", "+-M+", "+-"),
    ("repeated", "ME*E", "*E"),
    ("distinct", "M*M-", "M*"),
]
DRAFTS = {"chain": dict(num_speculative_tokens=3), "fixed": FIXED, "grown": GROWN}


@pytest.mark.parametrize(
    ("kinds", "drafts", "rollback"), covering(MODELS, DRAFTS, ("replay", "snapshot"))
)
def test_a_rejected_draft_that_is_not_finite_changes_no_token(kinds, drafts, rollback):
    """One token's embedding is NaN. The heads do not know it, but it is put among the drafts of
    every step."""
    model = tiny_model(*kinds)
    want = [decode(model, prompt, 16) for prompt in PROMPTS]
    seen = {
        token for prompt, tokens in zip(PROMPTS, want, strict=True) for token in (*prompt, *tokens)
    }
    bad = next(token for token in range(VOCAB_SIZE) if token not in seen)
    broken = build_model(model.mtpkit_config, device="cpu", seed=1)
    with torch.no_grad():
        dict(broken.named_parameters())[EMBEDDING][bad] = math.nan
    known = [token for token in range(VOCAB_SIZE) if token != bad]
    settings = dict(
        draft_vocab=known, state_rollback=rollback, async_scheduling=rollback == "replay"
    )
    llm = tree_llm(broken, DRAFTS[drafts], **settings)
    drafter = llm.engine.executor.drafter = WithBroken(llm.engine.executor.drafter, bad)
    assert generate(llm, PROMPTS, greedy(16)) == want
    assert drafter.count > 40
