"""The engine's drafts are those of whole sequences without caches, whatever else is in the
batch."""

import pytest

from tests.engine.tiny import (
    make_llm,
    make_prompts,
    record_drafts,
    teacher_forced_drafts,
    tiny_model,
)

PROMPTS = make_prompts((1, 2, 4, 9))
CASES = [("repeated", 1), ("repeated", 3), ("distinct", 1), ("distinct", 2), ("distinct", 3)]


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize(("heads", "k"), CASES)
def test_drafts_equal_those_without_caches(heads, k, guided):
    model = tiny_model(heads)
    drafts = record_drafts(make_llm(model, k, max_num_batched_tokens=13), PROMPTS, 10, guided)
    assert len(drafts) > 10
    for known, token_ids in drafts.items():
        assert token_ids == teacher_forced_drafts(model, known, k), len(known)


@pytest.mark.parametrize(
    ("heads", "mtp_pattern", "k"),
    [*((heads, "*-", k) for heads, k in CASES), ("distinct", "M*", 2), ("distinct", "M*", 3)],
)
def test_drafts_are_the_same_alone_in_a_batch_in_chunks_and_after_preemption(heads, mtp_pattern, k):
    model = tiny_model(heads, mtp_pattern=mtp_pattern)
    alone = {}
    for prompt in PROMPTS:
        alone |= record_drafts(make_llm(model, k), [prompt])
    together = record_drafts(make_llm(model, k), PROMPTS)
    assert together == alone
    assert record_drafts(make_llm(model, k, max_num_batched_tokens=k + 2), PROMPTS) == alone
    small = make_llm(model, k, block_size=2, num_blocks=18)
    assert record_drafts(small, PROMPTS) == alone
    assert small.stats().preemptions > 0


@pytest.mark.parametrize("state_rollback", ["replay", "snapshot"])
@pytest.mark.parametrize("mtp_pattern", ["M-", "*M"])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_recurrent_head_drafts_equal_those_without_caches(k, mtp_pattern, state_rollback):
    model = tiny_model("repeated", "M*M-", mtp_pattern)
    llm = make_llm(model, k, max_num_batched_tokens=13, state_rollback=state_rollback)
    drafts = record_drafts(llm, PROMPTS, 12)
    assert len(drafts) > 10
    for known, token_ids in drafts.items():
        assert token_ids == teacher_forced_drafts(model, known, k)


@pytest.mark.parametrize("state_rollback", ["replay", "snapshot"])
@pytest.mark.parametrize("mtp_pattern", ["M", "*M-"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_distinct_recurrent_heads_draft_as_without_caches(k, mtp_pattern, state_rollback):
    """Prompts of fewer than the K - 1 tokens that the states are behind, of as many, and of more;
    in chunks too."""
    model = tiny_model("distinct", "M*M-", mtp_pattern, distinct=4)
    prompts = make_prompts((1, 2, 3, 4, 5, 9, 21))
    for budget in (40, k + 2):
        llm = make_llm(model, k, max_num_batched_tokens=budget, state_rollback=state_rollback)
        drafts = record_drafts(llm, prompts, 12)
        assert len(drafts) > 30
        for known, token_ids in drafts.items():
            assert token_ids == teacher_forced_drafts(model, known, k), len(known)
