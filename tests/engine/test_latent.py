"""Latent attention in bases and heads: decoding through its cache changes no token and no draft."""

import pytest
import torch

from mtpkit.model.layers import mla
from mtpkit.model.state import PagedLatent
from tests.engine.replayed import replay_on_cpu
from tests.engine.tiny import (
    decode,
    generate,
    greedy,
    guide,
    held_bytes,
    make_llm,
    make_prompts,
    record_drafts,
    teacher_forced_drafts,
    tiny_model,
)

PROMPTS = make_prompts((1, 5, 9, 21))
HEADS = [("repeated", "+-"), ("distinct", "+E")]


def latent_model(heads: str = "repeated", mtp_pattern: str = "+-"):
    return tiny_model(heads, "+-M+", mtp_pattern, distinct=4)


def truth(model) -> list[list[int]]:
    return [decode(model, prompt, 16) for prompt in PROMPTS]


def said(llm) -> list[list[int]]:
    llm = guide(llm, PROMPTS, 16) if llm.engine.config.num_speculative_tokens else llm
    return generate(llm, PROMPTS, greedy(16))


@pytest.mark.parametrize(("heads", "mtp_pattern"), HEADS)
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
def test_drafts_change_no_token(heads, mtp_pattern, k):
    model = latent_model(heads, mtp_pattern)
    assert said(make_llm(model, k)) == truth(model)


@pytest.mark.parametrize(("heads", "mtp_pattern"), HEADS)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 14, "max_num_seqs": 3, "async_scheduling": True},
        {"block_size": 2, "num_blocks": 30},
        {"block_size": 1, "num_blocks": 120, "max_num_batched_tokens": 9},
    ],
    ids=["chunks", "mixed", "preemption", "more drafts than a block has places"],
)
@pytest.mark.parametrize("shapes", ["exact", "filled"])
def test_chunks_mixed_steps_and_preemption(heads, mtp_pattern, settings, shapes, monkeypatch):
    if shapes == "filled":  # with null rows, as in CUDA graphs
        replay_on_cpu(monkeypatch)
    model = latent_model(heads, mtp_pattern)
    llm = make_llm(model, 3, **settings)
    if shapes == "filled":
        assert generate(llm, PROMPTS, greedy(16)) == truth(model)
        return
    assert said(llm) == truth(model)
    assert (llm.stats().preemptions > 0) == (settings.get("num_blocks") == 30)


@pytest.mark.parametrize(("heads", "mtp_pattern"), HEADS)
def test_drafts_are_those_of_whole_sequences(heads, mtp_pattern):
    model = latent_model(heads, mtp_pattern)
    drafts = record_drafts(
        make_llm(model, 3, max_num_batched_tokens=14, max_num_seqs=3), PROMPTS, 10
    )
    assert len(drafts) > 10
    assert all(got == teacher_forced_drafts(model, known, 3) for known, got in drafts.items())


@pytest.mark.parametrize("broken", ["rotary", "scale", "slots"])
def test_what_goes_wrong_in_the_cache_is_seen(broken, monkeypatch):
    """A key that is not turned, a scale of the latent's width, and entries a place further."""
    store = mla.store_kv
    if broken == "slots":
        monkeypatch.setattr(
            mla, "store_kv", lambda *arguments: store(*arguments[:-1], arguments[-1] ^ 1)
        )
    elif broken == "rotary":

        def zero_key(latent, rotary, *rest):
            store(latent, torch.zeros_like(rotary), *rest)

        monkeypatch.setattr(mla, "store_kv", zero_key)
    else:
        attend = mla.latent_attention
        monkeypatch.setattr(
            mla, "latent_attention", lambda *arguments: attend(*arguments[:5], 0.2, *arguments[6:])
        )
    model = latent_model()
    assert generate(make_llm(model, 0), PROMPTS, poison=False) != [
        decode(model, prompt, 20) for prompt in PROMPTS
    ]


def test_the_memory_plan_counts_one_row_a_token():
    llm = make_llm(latent_model(), 3, num_blocks=24, max_num_seqs=5)
    own = sum(tensor.nbytes for tensor in llm.engine.executor.state.tensors)
    assert llm.memory_plan.state_bytes + llm.memory_plan.kv_bytes == held_bytes(llm.engine) + own
    rows = [
        state.rows for state in llm.engine.executor.states.all() if isinstance(state, PagedLatent)
    ]
    assert [tuple(row.shape[1:]) for row in rows] == [(8, 20 + 4)] * 3
