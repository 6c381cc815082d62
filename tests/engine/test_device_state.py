"""What the device knows of a request is what the host knows, and a slot keeps nothing of the
request before."""

import numpy as np
import pytest
import torch

from mtpkit import SamplingParams
from mtpkit.engine import Engine, EngineConfig
from mtpkit.engine.requests.tree import DynamicTree
from mtpkit.engine.steps.device_state import DeviceState
from mtpkit.engine.steps.host_drafts import HostDrafts
from mtpkit.engine.steps.vocabulary import SplitVocabulary, Vocabulary
from mtpkit.model import SequenceInput, base_forward
from tests.engine.tiny import (
    VOCAB_SIZE,
    generate,
    guide,
    make_llm,
    make_prompts,
    penalised,
    tiny_model,
)
from tests.model.toy import move_slot

PROMPTS = make_prompts()
LONGER = generate(make_llm(tiny_model(), 0), PROMPTS, penalised(30))
TRUTH = [prompt + tokens for prompt, tokens in zip(PROMPTS, LONGER, strict=True)]

MIXED = [
    {"top_k": 2},
    {},
    {"top_p": 0.3},
    {"temperature": 2.0},
    {"min_p": 0.4},
    {"temperature": 0.0},
    {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "temperature": 0.7},
    {"temperature": 1.5},
]
"""Every filter is followed by a request without it."""


def assert_same_as_alone(params, k: int, slots: int) -> None:
    """Requests one after another in a few slots give what each gives in an engine of its own."""
    prompts = [[2 * i + 1, 2 * i + 2] for i in range(len(params))]
    want = [
        make_llm(tiny_model(), 0).generate([p], one)[0]
        for p, one in zip(prompts, params, strict=True)
    ]
    got = make_llm(tiny_model(), k, max_num_seqs=slots).generate(prompts, params)
    assert [output.outputs[0].token_ids for output in got] == [
        output.outputs[0].token_ids for output in want
    ]


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("slots", [1, 2])
def test_requests_of_all_kinds_in_slots_that_others_had(slots, k):
    lengths = [4, 9, 14] * 3
    sampled = enumerate(zip(MIXED, lengths, strict=False))
    assert_same_as_alone(
        [
            SamplingParams(seed=i, max_tokens=n, ignore_eos=True, **sampling)
            for i, (sampling, n) in sampled
        ],
        k,
        slots,
    )


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize(("name", "value"), [("top_k", 1), ("top_p", 0.1), ("min_p", 0.9)])
def test_a_filter_goes_with_its_request(name, value, k):
    """The third request takes the first one's slot while the second's filter is still computed for
    both rows."""
    filtered = {name: value}
    free = {"temperature": 2.0}
    sampled = enumerate([(filtered, 3), (filtered, 30), (free, 15)])
    assert_same_as_alone(
        [
            SamplingParams(seed=i, max_tokens=n, ignore_eos=True, **sampling)
            for i, (sampling, n) in sampled
        ],
        k,
        slots=2,
    )


def test_a_slot_that_nobody_had_can_be_sampled():
    """Null rows of CUDA graphs are: filters of 0 would leave them no token."""
    columns = DeviceState.allocate(
        3, EngineConfig(64, 2), Vocabulary(11), torch.device("cpu")
    ).columns
    want = {"temperature": 0.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}
    assert {name: columns[name].tolist() for name in want} == {
        name: [value] * 3 for name, value in want.items()
    }
    assert columns["repetition"].tolist() == [1.0] * 3 and not columns["frequency"].any()


def running(llm):
    """After each step: the requests that decode, as the host and the device both know them."""
    for prompt in PROMPTS:
        llm.engine.add_request(prompt, penalised(16))
    while llm.engine.has_unfinished:
        llm.engine.step()
        yield from (request for request in llm.engine.scheduler.running if request.decoding)


@pytest.mark.parametrize(
    "settings", [{}, {"block_size": 2, "num_blocks": 30}, {"max_num_batched_tokens": 9}]
)
def test_counts_are_those_of_prompt_and_output(settings):
    llm = guide(make_llm(tiny_model(), 3, **settings), PROMPTS, truth=TRUTH)
    columns = llm.engine.executor.state.columns
    seen = 0
    for request in running(llm):
        output = torch.tensor(request.output_token_ids)
        assert torch.equal(
            columns["output_counts"][request.slot],
            torch.bincount(output, minlength=VOCAB_SIZE).int(),
        )
        assert set(columns["in_prompt"][request.slot].nonzero().flatten().tolist()) == set(
            request.prompt_token_ids
        )
        seen += 1
    assert seen > 20 and llm.stats().acceptance.accepted
    assert (llm.stats().preemptions > 0) == ("num_blocks" in settings)


@pytest.mark.parametrize(
    "settings", [{}, {"block_size": 2, "num_blocks": 30}, {"max_num_batched_tokens": 9}]
)
@torch.inference_mode()
def test_earlier_positions_are_the_newest_committed_ones(settings):
    model = tiny_model("distinct")
    llm = guide(make_llm(model, 3, **settings), PROMPTS, truth=TRUTH)
    earlier = llm.engine.executor.state.earlier
    seen = 0
    for request in running(llm):
        count = request.num_computed
        held = min(2, request.num_computed)
        assert (
            earlier.token_ids[request.slot, 2 - held :].tolist()
            == request.token_ids[count - held : count]
        )
        hidden = base_forward(model, torch.tensor([request.token_ids[:count]]), SequenceInput())[
            -held:, 0
        ]
        torch.testing.assert_close(
            earlier.hidden[request.slot, 2 - held :], hidden, rtol=1e-4, atol=1e-4
        )
        seen += 1
    assert seen > 20


def test_heads_that_read_nothing_earlier_keep_nothing():
    for heads, k in (("repeated", 3), ("distinct", 1), ("repeated", 0)):
        assert make_llm(tiny_model(heads), k).engine.executor.state.earlier is None


def move_request(engine, request) -> None:
    """Put a running request into a free slot; the one that it had is free then."""
    old, (new,) = request.slot, engine.scheduler.slots.allocate(1)
    for tensor in engine.executor.state.tensors:
        tensor[new] = tensor[old]
    move_slot(engine.executor.states, engine.executor.state.committed, old, new)
    request.slot = new
    engine.scheduler.slots.release([old])
    engine.executor.drafter.known.move(old, new)


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize(
    ("heads", "mtp_pattern"),
    [("repeated", "*-"), ("repeated", "M*"), ("distinct", "*-"), ("distinct", "M*")],
)
def test_a_request_moved_to_another_slot_goes_on_with_the_same_tokens(
    heads, mtp_pattern, rollback, monkeypatch
):
    """After every step one request changes its slot, and free slots are NaN; its acceptance stays
    the same too."""
    model = tiny_model(heads, mtp_pattern=mtp_pattern)
    prompts = make_prompts()
    runs = []
    moved = 0

    def step_and_move(self, *args):
        nonlocal moved
        outputs = step(self, *args)
        for request in self.scheduler.running[moved % max(1, len(self.scheduler.running)) :][:1]:
            move_request(self, request)
            moved += 1
        return outputs

    step = Engine.step
    for change in (step, step_and_move):
        monkeypatch.setattr(Engine, "step", change)
        llm = guide(make_llm(model, 3, state_rollback=rollback), prompts)
        runs.append((generate(llm, prompts), llm.stats().acceptance))
    assert runs[0] == runs[1] and moved >= 8


def test_drafts_of_the_host_are_certain_where_it_chose_them():
    """On a rank that holds the tokens 4 .. 7 of 8; other slots, and drafts that were drawn, keep
    their distributions."""
    config = EngineConfig(64, 3, max_num_seqs=3, draft_sampling=True)
    half = object.__new__(SplitVocabulary)
    half.size, half.first, half.width = 8, 4, 4
    state = DeviceState.allocate(3, config, half, torch.device("cpu"))
    state.draft_probs.fill_(0.25)
    before = state.draft_probs.clone()
    token_ids = np.array([[5, 2, 7], [6, 6, 1]])
    chosen = np.array([[True, True, False], [False, False, True]])
    state.write_drafts(HostDrafts([2, 0], token_ids, chosen))

    assert state.tokens.tolist() == [[0, 6, 6, 1], [0] * 4, [0, 5, 2, 7]]
    assert state.draft_probs[2, 0].tolist() == [0, 1, 0, 0]
    # Another rank holds tokens 2 and 1.
    assert not state.draft_probs[2, 1].any() and not state.draft_probs[0, 2].any()
    for slot, place in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 2)):
        assert torch.equal(state.draft_probs[slot, place], before[slot, place])


def test_drafts_of_the_host_bring_the_shape_of_a_tree_that_grows():
    config = EngineConfig(64, 2, DynamicTree(2, 2, 4), max_num_seqs=2)
    state = DeviceState.allocate(2, config, Vocabulary(8), torch.device("cpu"))
    drafts = HostDrafts(
        [1], np.array([[5, 6, 7]]), np.ones((1, 3), np.bool_), np.array([[-1, 0, 0, 2]])
    )
    state.write_drafts(drafts)
    assert state.drafts_at([1, 0]).tolist() == [[5, 6, 7, -1, 0, 0, 2], [0, 0, 0, -1, 0, 1, 2]]
