"""Broken on purpose, the engine fails the comparisons of the other tests."""

import pytest
import torch

from mtpkit.engine import engine as engine_module
from mtpkit.engine.drafting import repeated
from mtpkit.engine.drafting.distinct import DistinctDrafter, _Window
from mtpkit.engine.drafting.repeated import RepeatedDrafter
from mtpkit.engine.slots import Slots
from mtpkit.engine.step import Verdict
from mtpkit.model.state import Committed
from tests.engine.tiny import (
    decode,
    generate,
    guide,
    make_llm,
    make_prompts,
    record_drafts,
    teacher_forced_drafts,
    tiny_model,
)

PROMPTS = make_prompts()


def tokens_survive(heads="repeated", **settings) -> bool:
    model = tiny_model(heads)
    llm = guide(make_llm(model, 3, **settings), PROMPTS)
    return generate(llm, PROMPTS, poison=False) == [decode(model, prompt, 20) for prompt in PROMPTS]


def drafts_survive(heads: str) -> bool:
    model = tiny_model(heads)
    drafts = record_drafts(make_llm(model, 3), PROMPTS, 10)
    return all(got == teacher_forced_drafts(model, known, 3) for known, got in drafts.items())


def test_nothing_is_broken_without_sabotage():
    assert tokens_survive() and drafts_survive("repeated") and drafts_survive("distinct")


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_state_left_unrestored_after_a_rejection(monkeypatch, rollback):
    after = Committed.after

    def keep_all(self, width, last, new):
        return after(self, width, torch.full_like(last, width - 1), width)

    monkeypatch.setattr(Committed, "after", keep_all)
    assert not tokens_survive(state_rollback=rollback)


def test_rows_swapped_between_verify_and_commit(monkeypatch):
    verify = engine_module.verify

    def swapped(logits, batch):
        verdict = verify(logits, batch)
        order = torch.arange(len(verdict.accepted))
        if batch.plan.num_decode_rows >= 2:
            order[:2] = order[:2].flip(0)
        return Verdict(verdict.accepted[order], verdict.token_ids[order])

    monkeypatch.setattr(engine_module, "verify", swapped)
    assert not tokens_survive()


def test_accepted_count_of_another_request_picks_the_state(monkeypatch):
    store = Slots.store

    def store_then_swap(self, batch, verdict, drafts):
        store(self, batch, verdict, drafts)
        for values in (self.committed.last, *self.committed.counts.values()):
            first, second = values[batch.inputs.state_slots[:2]] if len(batch.inputs.state_slots) > 1 else (0, 0)
            if batch.plan.num_decode_rows > 1:
                values[batch.inputs.state_slots[:2]] = torch.stack([second, first])

    monkeypatch.setattr(Slots, "store", store_then_swap)
    assert not tokens_survive()


@pytest.mark.parametrize("heads", ["repeated", "distinct"])
def test_head_input_shifted_by_one(monkeypatch, heads):
    monkeypatch.setattr(repeated, "shifted_token_ids", lambda batch, verdict: batch.token_ids)
    token_ids = _Window.token_ids
    monkeypatch.setattr(_Window, "token_ids", lambda self, depth: token_ids(self, depth - 1))
    assert not drafts_survive(heads)
    assert tokens_survive(heads)  # bad drafts cost speed, never tokens


def test_entries_made_from_drafts_left_in_distinct_caches(monkeypatch):
    """Without the window before the step, deeper caches keep what was made from rejected drafts."""
    init = _Window.__init__

    def no_window(self, batch, verdict, depths, block_size):
        init(self, batch, verdict, depths, block_size)
        before = self.positions < batch.inputs.context_lens[self.rows]
        self.inputs.kv_slots[before] = -1

    monkeypatch.setattr(_Window, "__init__", no_window)
    assert not drafts_survive("distinct")


def test_draft_entries_at_the_wrong_cache_position(monkeypatch):
    one_token = RepeatedDrafter._one_token
    monkeypatch.setattr(
        RepeatedDrafter, "_one_token", lambda self, batch, positions: one_token(self, batch, positions - 1)
    )
    assert not drafts_survive("repeated")


def test_hidden_states_of_another_slot(monkeypatch):
    draft = DistinctDrafter.draft

    def with_rolled_tails(self, *args):
        self._tails = self._tails.roll(1, 0)
        return draft(self, *args)

    monkeypatch.setattr(DistinctDrafter, "draft", with_rolled_tails)
    assert not drafts_survive("distinct")
