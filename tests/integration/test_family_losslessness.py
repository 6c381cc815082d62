"""Published directories of every family: drafts change no token, and are those of whole sequences
without caches."""

import pytest

from mtpkit.checkpoint import load_model
from tests.checkpoint.family_models import FAMILIES, write_family
from tests.engine.tiny import (
    Recorder,
    decode,
    generate,
    greedy,
    guide,
    make_llm,
    make_prompts,
    teacher_forced_drafts,
)
from tests.shared import covering

TOKENS = 10
PROMPTS = make_prompts((1, 4, 9, 21))
WIDE = dict(initializer_range=0.3)
"""Logits are far apart."""
CHANGES = {"nemotron_h": WIDE | dict(moe_latent_size=12)}
TWO_LAYERS = WIDE | dict(num_hidden_layers=2, full_attention_interval=2)
SETTINGS = {
    "plain": {},
    "mixed": dict(max_num_batched_tokens=10, async_scheduling=True),
    "chunks alone": dict(max_num_batched_tokens=6, max_num_seqs=1, async_scheduling=False),
    "preempted": dict(block_size=2),
}
ROOM = {1: 18, 2: 18, 3: 18, 4: 20}
"""Blocks for the longest request with so many drafts, and too few for all."""


@pytest.fixture(scope="module")
def models() -> dict:
    """The models of the families that were asked for so far."""
    return {}


@pytest.fixture
def model(models, family, tmp_path):
    if family not in models:
        changes = TWO_LAYERS if family.startswith("qwen") else CHANGES.get(family, WIDE)
        models[family] = load_model(write_family(family, tmp_path / family, **changes))
    return models[family]


@pytest.mark.parametrize(
    ("family", "k", "rollback", "way"),
    covering(FAMILIES, (1, 2, 3, 4), ("replay", "snapshot"), SETTINGS),
)
def test_drafts_change_no_token_and_are_those_of_whole_sequences(model, k, rollback, way):
    """The heads' own drafts, some of which others replace, so that all lengths are accepted."""
    few = dict(num_blocks=ROOM[k]) if way == "preempted" else {}
    llm = make_llm(model, k, state_rollback=rollback, **SETTINGS[way], **few)
    recorder = llm.engine.executor.drafter = Recorder(llm.engine.executor.drafter)
    outputs = generate(guide(llm, PROMPTS, TOKENS), PROMPTS, greedy(TOKENS))
    assert outputs == [decode(model, prompt, TOKENS) for prompt in PROMPTS]
    assert len(recorder.drafts) > 10
    wrong = [
        known
        for known, made in recorder.drafts.items()
        if made != teacher_forced_drafts(model, known, k)
    ]
    assert not wrong
    assert (llm.stats().preemptions > 0) == (way == "preempted")
    acceptance = llm.stats().acceptance
    assert 0 < acceptance.accepted < acceptance.drafted
