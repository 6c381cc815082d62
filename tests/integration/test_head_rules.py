"""Under each rule of what heads read, briefly trained heads are accepted as often as teacher
forcing predicts."""

from itertools import chain

import pytest

from mtpkit.model import build_model
from tests.engine.test_head_rules import RULES
from tests.engine.tiny import generate, greedy, make_llm, ruled_model
from tests.integration.brief_training import (
    ATTENTION,
    PROMPTS,
    TOKENS,
    VOCAB,
    K,
    counted,
    predicted,
    train,
)


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("mimo", "repeated"),
        *((name, "distinct") for name in RULES if name != "mimo"),
        ("glm", "repeated"),
    ],
)
def test_the_engine_counts_what_teacher_forcing_predicts(name, heads):
    # its own, to be trained
    model = ruled_model.__wrapped__(heads, vocab_size=VOCAB, **RULES[name])
    answers = generate(make_llm(model, 0), PROMPTS, greedy(TOKENS), poison=False)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    train(model, texts, ATTENTION[heads])
    llm = make_llm(model, K)
    assert generate(llm, PROMPTS, greedy(TOKENS), poison=False) == answers
    counts = counted(llm)
    other = build_model(
        ruled_model(heads, vocab_size=VOCAB).mtpkit_config, device="cpu", init="none"
    )
    other.load_state_dict(model.state_dict())
    assert counts == predicted(model, texts, ATTENTION[heads]) and min(chain(*counts)) > 20
    if name != "deepseek":  # the first of many embeddings decides few drafts; other tests see it
        assert counts != predicted(other, texts, ATTENTION[heads]), (
            "another rule would agree as well"
        )
