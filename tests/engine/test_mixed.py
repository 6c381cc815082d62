"""Steps that carry decode rows and chunks of prompts together change no token and no draft."""

from dataclasses import replace

import pytest
import torch

from mtpkit.engine import SamplingParams
from mtpkit.engine.device import executor as executor_module
from mtpkit.engine.steps.batch import BatchBuilder
from mtpkit.engine.steps.plan import Verdict
from tests.engine.planned import planned_rows
from tests.engine.replayed import replay_on_cpu
from tests.engine.tiny import (
    decode,
    generate,
    greedy,
    guide,
    make_llm,
    make_prompts,
    penalised,
    record_drafts,
    teacher_forced_drafts,
    tiny_model,
)
from tests.shared import covering

PROMPTS = make_prompts((1, 4, 8, 9, 21, 3, 33))
DRAWN = SamplingParams(temperature=0.8, seed=4, top_k=30, max_tokens=14, ignore_eos=True)


SHAPES = ("exact", "filled")
HEADS = (("repeated", "*-", 0), ("repeated", "*-", 3), ("distinct", "M*", 3))


@pytest.fixture(params=SHAPES)
def shapes(request, monkeypatch):
    """Steps of the sizes of their plans, or filled up with null rows as in CUDA graphs."""
    if request.param == "filled":
        replay_on_cpu(monkeypatch)
    return request.param


def watch(llm) -> list[tuple[int, int]]:
    """[decode rows, chunk tokens] of each launch."""
    seen = []
    launch = llm.engine.executor.launch

    def noted(plan):
        seen.append((plan.num_decode_rows, plan.num_chunk_tokens))
        return launch(plan)

    llm.engine.executor.launch = noted
    return seen


def watch_preemptions(llm) -> list[tuple[str, bool]]:
    """Of each request that loses its blocks: whether it is in the middle of its prompt or of its
    answer, and whether the newest step that it was in carried decode rows and chunks."""
    lost = []
    newest = {}
    engine = llm.engine
    launch = engine.executor.launch
    preempt = engine.scheduler.admission.preempt

    def noted_launch(plan):
        newest.update(
            {row.request.request_id: bool(plan.decode_rows and plan.chunks) for row in plan.rows}
        )
        return launch(plan)

    def noted_preempt(request):
        lost.append(("answer" if request.decoding else "prompt", newest[request.request_id]))
        preempt(request)

    engine.executor.launch = noted_launch
    engine.scheduler.admission.preempt = noted_preempt
    return lost


# Chunks of a length are split alike for whatever heads and rows: no step depends on all four at
# once.
@pytest.mark.parametrize(
    ("shapes", "kind", "mixed", "budget"),
    covering(SHAPES, HEADS, (0, 3, 512), (5, 12, 64), meet=3),
    indirect=["shapes"],
)
def test_mixing_changes_no_token(shapes, kind, mixed, budget):
    heads, mtp_pattern, k = kind
    model = tiny_model(heads, mtp_pattern=mtp_pattern)
    settings = {"max_num_batched_tokens": budget, "max_mixed_tokens": mixed, "max_num_seqs": 4}
    llm = make_llm(model, k, async_scheduling=True, **settings)
    seen = watch(llm)
    assert generate(llm, PROMPTS) == [decode(model, prompt, 20) for prompt in PROMPTS]
    together = [chunk for rows, chunk in seen if rows and chunk]
    assert max(together, default=0) <= mixed
    if budget == 5:  # a chunk of a token or two beside whatever decodes
        assert bool(together) == (mixed > 0)


CHOICES = {
    "drawn": DRAWN,
    "drawn, penalised": replace(DRAWN, repetition_penalty=1.3, presence_penalty=0.5),
    "penalised": penalised(14),
}


@pytest.mark.parametrize(
    ("shapes", "params", "drafts"), covering(SHAPES, CHOICES, (0, 3, "drawn")), indirect=["shapes"]
)
def test_mixing_changes_no_draw(shapes, params, drafts):
    """A seed gives one output, whatever shares the steps; with drawn drafts, for one K."""
    params = CHOICES[params]
    outputs = []
    for settings in ({"max_mixed_tokens": 0}, {}, {"max_num_batched_tokens": 9}):
        k = 3 if drafts == "drawn" else drafts
        llm = make_llm(
            tiny_model(), k, draft_sampling=drafts == "drawn", max_num_seqs=4, **settings
        )
        outputs.append(generate(llm, PROMPTS, params, poison=False))
    assert outputs[0] == outputs[1] == outputs[2]
    if drafts != "drawn":
        assert outputs[0] == generate(make_llm(tiny_model(), 0), PROMPTS, params, poison=False)


@pytest.mark.parametrize("heads", ["repeated", "distinct"])
def test_mixing_changes_no_draft(heads):
    model = tiny_model(heads)
    drafts = record_drafts(
        make_llm(model, 3, max_num_batched_tokens=14, max_num_seqs=3), PROMPTS, 10
    )
    assert all(got == teacher_forced_drafts(model, known, 3) for known, got in drafts.items())


@pytest.mark.parametrize("k", [0, 3])
def test_preemption_in_the_middle_of_mixed_steps(shapes, k):
    model = tiny_model()
    llm = make_llm(
        model, k, block_size=2, num_blocks=32, max_num_batched_tokens=7, async_scheduling=True
    )
    lost = watch_preemptions(llm)
    assert generate(llm, PROMPTS) == [decode(model, prompt, 20) for prompt in PROMPTS]
    assert len(lost) == llm.stats().preemptions
    assert ("prompt", True) in lost


def test_what_decodes_does_not_depend_on_the_chunk_beside_it(monkeypatch):
    """Logits of decode rows with a chunk beside them and without: only the rounding of a larger
    batch may differ."""
    found = []
    for mixed in (0, 512):
        logits = {}
        verify = executor_module.verify

        def noted(values, batch, logits=logits, verify=verify):
            positions = batch.inputs.positions[batch.logit_indices].tolist()
            rows = zip(batch.logit_rows.tolist(), positions, values, strict=True)
            for row, position, one in rows:
                if row < batch.inputs.num_decode_rows:
                    logits[planned_rows()[row].request.request_id, position] = one.clone()
            return verify(values, batch)

        monkeypatch.setattr(executor_module, "verify", noted)
        llm = make_llm(tiny_model(), 0, max_mixed_tokens=mixed, max_num_batched_tokens=9)
        generate(llm, PROMPTS, poison=False)
        monkeypatch.setattr(executor_module, "verify", verify)
        found.append(logits)
    assert found[0].keys() == found[1].keys() and len(found[0]) > 100
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-4, atol=1e-4)


def mixing_survives(heads: str = "repeated") -> bool:
    model = tiny_model(heads)
    llm = guide(make_llm(model, 3, max_num_batched_tokens=14, max_num_seqs=4), PROMPTS)
    return generate(llm, PROMPTS, poison=False) == [decode(model, prompt, 20) for prompt in PROMPTS]


def test_without_sabotage():
    assert mixing_survives() and mixing_survives("distinct")


def _swapped(values, batch):
    """The values [R, ...] with the last decode row and the first chunk in each other's place."""
    count = batch.inputs.num_decode_rows
    order = torch.arange(len(values))
    if count and batch.inputs.num_chunk_rows:
        order[count - 1], order[count] = count, count - 1
    return values[order]


@pytest.mark.parametrize("what", ["slots", "tables", "verdict"])
def test_a_chunk_in_the_place_of_a_decode_row(monkeypatch, what):
    assemble = BatchBuilder.assemble
    verify = executor_module.verify

    def wrong(self, plan, *args):
        batch = assemble(self, plan, *args)
        field = {"slots": "state_slots", "tables": "block_tables"}[what]
        return replace(
            batch,
            inputs=replace(batch.inputs, **{field: _swapped(getattr(batch.inputs, field), batch)}),
        )

    def wrong_verdict(logits, batch):
        verdict = verify(logits, batch)
        return Verdict(_swapped(verdict.accepted, batch), _swapped(verdict.token_ids, batch))

    if what == "verdict":
        monkeypatch.setattr(executor_module, "verify", wrong_verdict)
    else:
        monkeypatch.setattr(BatchBuilder, "assemble", wrong)
    assert not mixing_survives()


def test_one_token_chunks_and_chunks_of_a_decode_rows_width_beside_decode_rows(shapes):
    """What tells a chunk from a decode row is its place, not its length."""
    model = tiny_model()
    prompts = make_prompts((7, 9, 13, 5))
    for budget in (5, 8):  # beside one decode row of 1 + 3 tokens: chunks of 1, and of 4
        llm = make_llm(model, 3, max_num_batched_tokens=budget, max_num_seqs=2)
        seen = watch(llm)
        assert generate(llm, prompts, greedy(12)) == [
            decode(model, prompt, 12) for prompt in prompts
        ]
        assert (1, budget - 4) in seen
