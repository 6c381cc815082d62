"""Broken on purpose, the engine fails the comparisons of the other tests."""

from dataclasses import replace

import pytest
import torch

from mtpkit.engine.device import executor as executor_module
from mtpkit.engine.drafting import repeated
from mtpkit.engine.drafting.distinct import Window, _Rows
from mtpkit.engine.drafting.repeated import RepeatedDrafter
from mtpkit.engine.steps.batch import BatchBuilder
from mtpkit.engine.steps.device_state import DeviceState
from mtpkit.engine.steps.plan import Earlier, Verdict
from mtpkit.engine.steps.processor import Chosen
from mtpkit.engine.steps.processors import Penalties
from mtpkit.model.state import Committed
from tests.engine.tiny import (
    decode,
    generate,
    guide,
    make_llm,
    make_prompts,
    penalised,
    record_drafts,
    teacher_forced_drafts,
    tiny_model,
)

PROMPTS = make_prompts()


def tokens_survive(heads="repeated", **settings) -> bool:
    model = tiny_model(heads)
    llm = guide(make_llm(model, 3, **settings), PROMPTS)
    return generate(llm, PROMPTS, poison=False) == [decode(model, prompt, 20) for prompt in PROMPTS]


def drafts_survive(heads: str, mtp_pattern: str = "*-", **settings) -> bool:
    model = tiny_model(heads, mtp_pattern=mtp_pattern)
    drafts = record_drafts(make_llm(model, 3, **settings), PROMPTS, 10)
    return all(got == teacher_forced_drafts(model, known, 3) for known, got in drafts.items())


def test_nothing_is_broken_without_sabotage():
    assert tokens_survive() and drafts_survive("repeated") and drafts_survive("distinct")


ROLLBACKS = pytest.mark.parametrize("rollback", ["replay", "snapshot"])


@ROLLBACKS
@pytest.mark.parametrize("off", [None, -1, 1, "everything stands"])
def test_recurrent_states_of_distinct_heads_that_are_taken_back_wrongly(monkeypatch, rollback, off):
    """By a token too few or too many, or not at all."""
    after = Committed.after

    def wrong(self, context_lens, width, new, widest=None):
        right = after(self, context_lens, width, new, widest)
        for counter, counts in right.counts.items():
            if counter.behind and off is not None:
                most = counter.after(self.counts[counter], width, torch.full_like(new, width))
                counts.copy_(
                    most if isinstance(off, str) else (counts + off).clamp(min=0).minimum(most)
                )
        return right

    monkeypatch.setattr(Committed, "after", wrong)
    assert drafts_survive("distinct", "M*", state_rollback=rollback) == (off is None)


@ROLLBACKS
@pytest.mark.parametrize("off", [0, -1])
def test_recurrent_states_of_distinct_heads_that_a_chunk_leaves_too_early(
    monkeypatch, rollback, off
):
    chunks = _Rows._with_chunks

    def early(self, batch, starts, ends):
        return chunks(self, batch, starts, starts.maximum(ends + off))

    monkeypatch.setattr(_Rows, "_with_chunks", early)
    assert drafts_survive("distinct", "M*", state_rollback=rollback) == (off == 0)


@ROLLBACKS
def test_recurrent_states_of_distinct_heads_that_are_not_zero_at_position_0(monkeypatch, rollback):
    chunks = _Rows._with_chunks

    def without_empty_ones(self, batch, starts, ends):
        rows = chunks(self, batch, starts, ends)
        lens = rows.inputs.query_start.diff()
        return rows._replace(
            inputs=replace(
                rows.inputs, state_slots=torch.where(lens > 0, rows.inputs.state_slots, -1)
            )
        )

    monkeypatch.setattr(_Rows, "_with_chunks", without_empty_ones)
    assert not drafts_survive("distinct", "M*", state_rollback=rollback)


@ROLLBACKS
def test_state_left_unrestored_after_a_rejection(monkeypatch, rollback):
    after = Committed.after

    def keep_all(self, context_lens, width, new, widest=None):
        return after(self, context_lens, width, torch.full_like(new, width), widest)

    monkeypatch.setattr(Committed, "after", keep_all)
    assert not tokens_survive(state_rollback=rollback)


def test_rows_swapped_between_verify_and_commit(monkeypatch):
    verify = executor_module.verify

    def swapped(logits, batch):
        verdict = verify(logits, batch)
        order = torch.arange(len(verdict.accepted))
        if batch.shape.decode_rows >= 2:
            order[:2] = order[:2].flip(0)
        return Verdict(verdict.accepted[order], verdict.token_ids[order])

    monkeypatch.setattr(executor_module, "verify", swapped)
    assert not tokens_survive()


def test_accepted_count_of_another_request_picks_the_state(monkeypatch):
    step = DeviceState.step

    def step_then_swap(self, batch, *args):
        step(self, batch, *args)
        for values in self.committed.counts.values():
            first, second = (
                values[batch.inputs.state_slots[:2]]
                if len(batch.inputs.state_slots) > 1
                else (0, 0)
            )
            if batch.shape.decode_rows > 1:
                values[batch.inputs.state_slots[:2]] = torch.stack([second, first])

    monkeypatch.setattr(DeviceState, "step", step_then_swap)
    assert not tokens_survive()


@pytest.mark.parametrize("heads", ["repeated", "distinct"])
def test_head_input_shifted_by_one(monkeypatch, heads):
    monkeypatch.setattr(repeated, "shifted_token_ids", lambda batch, verdict: batch.token_ids)
    token_ids = Window.token_ids
    monkeypatch.setattr(Window, "token_ids", lambda self, depth: token_ids(self, depth - 1))
    assert not drafts_survive(heads)
    assert tokens_survive(heads)  # bad drafts cost speed, never tokens


def test_entries_made_from_drafts_left_in_distinct_caches(monkeypatch):
    """Without the window before the step, deeper caches keep what was made from rejected drafts."""
    init = Window.__init__

    def no_window(self, batch, *args):
        init(self, batch, *args)
        before = self.positions < batch.inputs.context_lens[self.owner]
        self.inputs.kv_slots[before] = -1

    monkeypatch.setattr(Window, "__init__", no_window)
    assert not drafts_survive("distinct")


def test_draft_entries_at_the_wrong_cache_position(monkeypatch):
    one_token = RepeatedDrafter._one_token
    monkeypatch.setattr(
        RepeatedDrafter,
        "_one_token",
        lambda self, batch, positions: one_token(self, batch, positions - 1),
    )
    assert not drafts_survive("repeated")


def test_hidden_states_of_another_slot(monkeypatch):
    assemble = BatchBuilder.assemble

    def of_another(self, plan, *args):
        batch = assemble(self, plan, *args)
        kept = batch.earlier
        return replace(batch, earlier=Earlier(kept.token_ids.roll(1, 0), kept.hidden.roll(1, 0)))

    monkeypatch.setattr(BatchBuilder, "assemble", of_another)
    assert not drafts_survive("distinct")


@pytest.mark.parametrize("name", ["token_ids", "hidden"])
def test_earlier_positions_that_a_step_does_not_take_up(monkeypatch, name):
    """The tail of a slot stays what it was after the prompt, or what another request left there."""
    step = DeviceState.step

    def stale(self, batch, *args):
        kept = Earlier(**{key: value.clone() for key, value in vars(self.earlier).items()})
        step(self, batch, *args)
        if batch.shape.decode_rows:
            getattr(self.earlier, name).copy_(getattr(kept, name))

    monkeypatch.setattr(DeviceState, "step", stale)
    assert not drafts_survive("distinct")
    assert tokens_survive("distinct")


def counted_right(**settings) -> bool:
    """Whether penalised outputs with drafts, a part of them right, equal those without."""
    model = tiny_model()
    params = penalised(20)
    longer = generate(make_llm(model, 0), PROMPTS, penalised(30), poison=False)
    truth = [prompt + tokens for prompt, tokens in zip(PROMPTS, longer, strict=True)]
    llm = guide(make_llm(model, 3, async_scheduling=True, **settings), PROMPTS, truth=truth)
    return generate(llm, PROMPTS, params, poison=False) == [tokens[:20] for tokens in longer]


SHORT_OF_BLOCKS = {"block_size": 2, "num_blocks": 30}


def test_counts_are_right_without_sabotage():
    assert counted_right() and counted_right(**SHORT_OF_BLOCKS)


@pytest.mark.parametrize("shift", [1, -1])
def test_a_count_added_for_a_rejected_draft_or_lost_for_an_accepted_one(monkeypatch, shift):
    count = Penalties.count

    def wrong(self, columns, slots, chosen):
        placed = chosen.placed
        accepted = (chosen.accepted + shift).clamp(-1, placed.shape[1] - 1)
        drafts = placed.roll(-1, 1) if shift < 0 else placed
        count(self, columns, slots, Chosen(accepted, chosen.token_ids, drafts))

    monkeypatch.setattr(Penalties, "count", wrong)
    assert not counted_right()


def test_counts_lost_at_a_preemption(monkeypatch):
    admit = Penalties.admit

    def forget(self, columns, *args):
        admit(self, columns, *args)
        columns["output_counts"][args[0]] = 0

    monkeypatch.setattr(Penalties, "admit", forget)
    assert counted_right() and not counted_right(**SHORT_OF_BLOCKS)


def test_counts_of_the_request_that_had_the_slot(monkeypatch):
    admit = Penalties.admit

    def keep(self, columns, slots, *args):
        before = columns["output_counts"][slots]
        admit(self, columns, slots, *args)
        columns["output_counts"][slots] += before

    monkeypatch.setattr(Penalties, "admit", keep)
    assert not counted_right(max_num_seqs=1)
