"""The memory plan's numbers are those of the engine."""

from dataclasses import replace

import pytest
import torch

from mtpkit.engine import memory
from mtpkit.engine.memory import plan_memory
from mtpkit.engine.steps.plan import HeadSpan
from mtpkit.errors import UserError
from mtpkit.model import build_model
from mtpkit.model.formats import ONLINE, WEIGHTS_ALONE
from mtpkit.model.quantized import quantizable_base, quantize_linear
from mtpkit.model.state import Replay
from tests.engine.tiny import (
    VOCAB_SIZE,
    generate,
    greedy,
    held_bytes,
    make_llm,
    tiny_config,
    tiny_model,
)


@pytest.mark.parametrize(("heads", "mtp_pattern"), [("repeated", "*-"), ("distinct", "M*")])
def test_plan_counts_what_is_allocated(heads, mtp_pattern):
    llm = make_llm(tiny_model(heads, mtp_pattern=mtp_pattern), 3, num_blocks=24, max_num_seqs=5)
    plan = llm.memory_plan
    own = sum(tensor.nbytes for tensor in llm.engine.executor.state.tensors)
    assert plan.state_bytes + plan.kv_bytes == held_bytes(llm.engine) + own
    text = str(plan)
    # max_model_len
    assert "24 blocks of 8 tokens" in text and text.endswith("fit at once: 1 of 128 tokens")
    states = [state for state in llm.engine.executor.states.all() if isinstance(state, Replay)]
    rings = sum(state.inputs(name).nbytes for state in states for name in ("x", "B", "dt"))
    assert states and plan.ring_bytes * 5 == rings


def test_lengths_beyond_the_longest_request_are_not_promised():
    text = str(replace(make_llm(tiny_model(), 0, num_blocks=200).memory_plan, max_model_len=4096))
    assert text.endswith("fit at once: 3 of 512 tokens, 0 of 2,048 tokens, 0 of 4,096 tokens")


def test_as_many_requests_fit_as_it_says():
    """As many as fit are never preempted; with two more the blocks run out."""
    for count in (3, 5):
        llm = make_llm(tiny_model(), 0, num_blocks=12, block_size=8, max_num_seqs=8)
        fits = llm.memory_plan.requests_that_fit(4 + 21)
        assert fits == 3
        generate(llm, [[1, 2, 3, 4]] * count, greedy(21))
        assert (llm.stats().preemptions > 0) == (count > fits)


def test_a_request_needs_room_for_what_a_step_reserves_ahead():
    """One token without drafts, 2K with them."""
    plan = make_llm(tiny_model(), 0).memory_plan
    assert [plan.blocks_for(tokens) for tokens in (7, 8, 15, 16)] == [1, 2, 2, 3]
    ahead = replace(plan, lookahead=6)
    assert [ahead.blocks_for(tokens) for tokens in (2, 3, 10, 11)] == [1, 2, 2, 3]
    assert make_llm(tiny_model(), 3).memory_plan.lookahead == 6


def test_what_cannot_fit_is_refused_with_the_numbers():
    engine = make_llm(tiny_model(), 1).engine
    with pytest.raises(UserError, match=r"GB are left for caches.*max_model_len 2000000000 needs"):
        config = engine.config.__class__(**vars(engine.config) | {"max_model_len": 2 * 10**9})
        plan_memory(tiny_model().mtpkit_config, engine.layout, config, torch.device("cpu"), 0.9)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_more_blocks_than_fit_are_refused(device):
    with pytest.raises(
        UserError,
        match=r"GB are left for caches.*num_blocks 2000000000 needs .* GB: lower .*num_blocks",
    ):
        make_llm(tiny_model(device=device), 1, num_blocks=2 * 10**9)


def test_null_rows_are_memory_but_no_requests():
    llm = make_llm(tiny_model(), 3, draft_sampling=True)
    config = replace(llm.engine.config, graphs=True)
    plan = plan_memory(
        tiny_model().mtpkit_config, llm.engine.layout, config, torch.device("cpu"), 0.9, 200
    )
    assert plan.requests_that_fit(8) == config.max_num_seqs == 8
    assert plan.kv_bytes == 201 * plan.block_bytes and plan.state_bytes == 8 * plan.slot_bytes
    state = llm.engine.executor.state
    own = sum(tensor[0].nbytes for tensor in state.tensors)
    assert plan.slot_bytes == llm.engine.layout.slot_bytes + own
    # distributions of drafts, and counts of penalties
    assert own > state.draft_probs[0].nbytes + 5 * VOCAB_SIZE


def plan_of(llm, num_blocks=None, device="cpu", utilization=0.9, **changes):
    config = replace(llm.engine.config, **changes)
    model = llm.model.mtpkit_config
    return plan_memory(
        model, llm.engine.layout, config, torch.device(device), utilization, num_blocks
    )


@pytest.mark.parametrize("graphs", [False, True])
def test_blocks_are_what_the_state_leaves(monkeypatch, graphs):
    """To the byte; the null block is one of them, and one request of full length must fit."""
    llm = make_llm(tiny_model(), 3)
    whole = plan_of(llm, 200)
    one = whole.blocks_for(128)
    for blocks in (one, one + 1, 3 * one, 8 * one, 8 * one + 5):
        needed = whole.state_bytes + (blocks + graphs) * whole.block_bytes
        monkeypatch.setattr(memory, "_CPU_CACHE_BYTES", needed + whole.block_bytes - 1)
        assert plan_of(llm, graphs=graphs).num_blocks == min(blocks, 8 * one)
        monkeypatch.setattr(memory, "_CPU_CACHE_BYTES", needed)
        assert plan_of(llm, graphs=graphs).num_blocks == min(blocks, 8 * one)
    monkeypatch.setattr(
        memory, "_CPU_CACHE_BYTES", whole.state_bytes + (one + graphs) * whole.block_bytes - 1
    )
    with pytest.raises(UserError, match="one request of max_model_len 128 needs"):
        plan_of(llm, graphs=graphs)
    # as many as asked for, whatever is the default
    assert plan_of(llm, 200, graphs=graphs).num_blocks == 200


def test_logits_are_planned_for_in_the_models_dtype_and_in_fp32():
    """Those of all decode tokens and of a chunk for each request, beside the activations of the
    tokens."""
    llm = make_llm(tiny_model(), 3)
    logits = VOCAB_SIZE * (4 + 4)
    eager, graphed = (
        plan_of(llm, 200, graphs=graphs, max_num_batched_tokens=100) for graphs in (False, True)
    )
    assert eager.graphs == 0 and graphed.graphs == graphed.activations
    captured = plan_of(llm, 200, max_num_batched_tokens=128 + 8 * 4)  # chunks beside 8 decode rows
    assert graphed.activations == captured.activations + (8 * 4 + 9 - 5 * 8) * logits
    tokens = [
        plan_of(llm, 200, max_num_batched_tokens=count).activations - 5 * 8 * logits
        for count in (100, 50)
    ]
    assert tokens[0] == 2 * tokens[1] > 100 * 4 * 48  # at least the widest activation of each token


def test_a_matrix_that_products_widen_is_planned_for():
    """The largest one alone, and none whose inputs are quantised, or of a model in fp32."""
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        for kind in (None, WEIGHTS_ALONE, ONLINE):
            model = build_model(tiny_config(), device="cpu", seed=1).to(dtype)
            largest = 2 * max(module.weight.numel() for module in quantizable_base(model))
            for module in [*quantizable_base(model)] if kind else []:
                quantize_linear(module, kind)
            found[dtype, kind] = make_llm(model, 3).memory_plan.activations
    for dtype in (torch.bfloat16, torch.float32):
        plain = found[dtype, None]
        extra = largest if dtype == torch.bfloat16 else 0
        assert found[dtype, WEIGHTS_ALONE] == plain + extra and found[dtype, ONLINE] == plain


def test_a_copy_of_the_lm_head_that_products_widen_is_planned_for():
    model = build_model(tiny_config(), device="cpu", seed=1).to(torch.bfloat16)
    plain, copied = (
        make_llm(model, 3, **settings).memory_plan.activations
        for settings in ({}, {"draft_lm_head_dtype": "fp8_e4m3"})
    )
    assert copied == plain + 2 * VOCAB_SIZE * model.mtpkit_config.hidden_size


@pytest.mark.parametrize(("graphs", "rows"), [(False, 8), (True, 8 + 9)])
def test_distributions_of_drawn_drafts_are_planned_for(graphs, rows):
    """Each of the 3 drafts of a row three times, in fp32; with graphs for all rows of a step."""
    llm = make_llm(tiny_model(), 3)
    drawn, best = (
        plan_of(llm, 200, draft_sampling=drawn, graphs=graphs).activations
        for drawn in (True, False)
    )
    assert drawn - best == rows * 3 * 3 * VOCAB_SIZE * 4


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_states_that_depths_change_are_planned_for(rollback):
    """A copy of each row's for the depths after the first of a repeated head, as a step makes
    it."""
    llm = make_llm(tiny_model("repeated", "M*M-", "M-"), 3, state_rollback=rollback)
    engine = llm.engine
    slots = torch.arange(8)
    forked = engine.executor.states.fork_heads(slots).layers
    copied = [
        tensor.nbytes
        for name, states in forked.items()
        for state, kept in zip(states, engine.executor.states[name], strict=True)
        for key, tensor in state.tensors.items()
        if tensor.data_ptr() != kept.tensors[key].data_ptr()
    ]
    assert sum(copied) == 8 * engine.layout.head_slot_bytes > 0
    model = llm.model.mtpkit_config
    of = {
        span.before: plan_memory(
            model, engine.layout, engine.config, torch.device("cpu"), 0.9, 200, span
        ).activations
        for span in (HeadSpan(after=1), HeadSpan(2, 3, 48))
    }
    kept = plan_memory(
        model, replace(engine.layout, specs={}), engine.config, torch.device("cpu"), 0.9, 200
    )
    assert of[0] - kept.activations == sum(copied)
    one = replace(
        engine.config,
        num_speculative_tokens=1,
        max_num_batched_tokens=engine.config.max_num_batched_tokens,
    )
    bare = replace(engine.layout, specs={})
    single = [
        plan_memory(model, layout, one, torch.device("cpu"), 0.9, 200)
        for layout in (engine.layout, bare)
    ]
    assert single[0].activations == single[1].activations, "one draft changes no state"


def test_positions_that_a_drafter_runs_over_again_are_planned_for():
    """2 of each of the 8 requests, and the tokens of a decode row: as if the largest step had 48
    tokens more."""
    llm = make_llm(tiny_model(), 3)
    config = llm.engine.config
    again, without, longer = (
        plan_memory(
            llm.model.mtpkit_config, llm.engine.layout, one, torch.device("cpu"), 0.9, 200, span
        )
        for one, span in (
            (config, HeadSpan(2, 3, 48)),
            (config, HeadSpan(after=1)),
            (
                replace(config, max_num_batched_tokens=config.max_num_batched_tokens + 48),
                HeadSpan(),
            ),
        )
    )
    assert again.activations == longer.activations > without.activations


def test_a_gpu_is_divided_without_one(monkeypatch):
    """Unused memory of the caching allocator counts as free; activations and graphs reduce the
    share."""
    llm = make_llm(tiny_model(), 3)
    gb = 10**9
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * gb, 10 * gb))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * gb)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: gb // 2)
    for graphs in (False, True):
        plan = plan_of(
            llm,
            device="cuda",
            utilization=0.8,
            graphs=graphs,
            max_model_len=10**7,
            max_num_seqs=800,
        )
        assert (plan.total, plan.in_use) == (10 * gb, 2 * gb + gb // 2)
        left = 8 * gb - plan.in_use - plan.activations - plan.graphs - plan.state_bytes
        assert (
            plan.num_blocks == left // plan.block_bytes - graphs
            and 0 <= left - plan.kv_bytes < plan.block_bytes
        )


@pytest.mark.gpu
def test_a_gpu_is_filled_to_the_share_asked_for():
    model = tiny_model(device="cuda")
    before = torch.cuda.memory_allocated()  # of this process: others may use the GPU too
    free, total = torch.cuda.mem_get_info()
    share = (total - free + 2**32) / total
    llm = make_llm(model, 3, num_blocks=None, gpu_memory_utilization=share, max_model_len=10**7)
    plan = llm.memory_plan
    used = torch.cuda.memory_allocated() - before
    planned = plan.in_use + plan.activations + plan.graphs + plan.state_bytes + plan.kv_bytes
    assert share * total - 2 * plan.block_bytes < planned <= share * total
    assert used == pytest.approx(plan.state_bytes + plan.kv_bytes, rel=0.05)
