"""Greedy speculative output equals plain greedy output, token for token, in fp32."""

import itertools

import pytest

from mtpkit.checkpoint import save_hf_model, save_model
from mtpkit.model import build_model, stack_experts
from tests.engine.tiny import (
    PROMPT_LENGTHS,
    decode,
    generate,
    guide,
    make_llm,
    make_prompts,
    tiny_model,
)
from tests.kernels.recurrence import relative
from tests.shared import covering

PROMPTS = make_prompts()
ROLLBACKS = ["replay", "snapshot"]


def truth(model, prompts=PROMPTS, max_tokens=20):
    return [decode(model, prompt, max_tokens) for prompt in prompts]


@pytest.mark.parametrize(
    ("pattern", "mtp_pattern"),
    [("M-*M-", "*-"), ("MM", "*"), ("*-*-", "*-"), ("M*M-", "M-"), ("G-*G-", "G-")],
)
@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_plain_decoding_equals_full_recomputation(pattern, mtp_pattern, rollback):
    model = tiny_model("repeated", pattern, mtp_pattern)
    assert generate(make_llm(model, 0, state_rollback=rollback), PROMPTS) == truth(model)


@pytest.mark.parametrize("rollback", ROLLBACKS)
@pytest.mark.parametrize(
    ("heads", "k"),
    [*(("repeated", k) for k in (1, 2, 3, 4, 5)), *(("distinct", k) for k in (1, 2, 3))],
)
@pytest.mark.parametrize("guided", [False, True])
def test_speculation_changes_no_token(heads, k, rollback, guided):
    model = tiny_model(heads)
    llm = make_llm(model, k, state_rollback=rollback)
    if guided:
        guide(llm, PROMPTS)
    assert generate(llm, PROMPTS) == truth(model)
    if guided:
        assert all(0 < rate < 1 for rate in llm.stats().conditional_acceptance)


@pytest.mark.parametrize("rollback", ROLLBACKS)
@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 10}, {"block_size": 2, "num_blocks": 30}]
)
def test_a_step_ahead_of_the_results(rollback, settings):
    """Steps are launched before the last results are known; with chunks beside them, and with
    preemptions."""
    model = tiny_model()
    llm = guide(
        make_llm(model, 3, state_rollback=rollback, async_scheduling=True, **settings), PROMPTS
    )
    assert llm.engine.config.async_scheduling
    assert generate(llm, PROMPTS) == truth(model)
    assert (llm.stats().preemptions > 0) == ("num_blocks" in settings)


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_batch_of_one(length):
    model = tiny_model()
    (prompt,) = make_prompts((length,))
    assert generate(guide(make_llm(model, 3), [prompt]), [prompt]) == truth(model, [prompt])


@pytest.mark.parametrize("heads", ["repeated", "distinct"])
@pytest.mark.parametrize("budget", [4, 5, 10])
def test_chunked_prefill(heads, budget):
    """21 tokens in chunks of 5, 5, 5, 5, 1; decode rows beside them."""
    model = tiny_model(heads)
    llm = guide(make_llm(model, 3, max_num_batched_tokens=budget), PROMPTS)
    assert generate(llm, PROMPTS) == truth(model)


@pytest.mark.parametrize("rollback", ROLLBACKS)
@pytest.mark.parametrize(
    ("heads", "k"), [("repeated", 0), ("repeated", 2), ("repeated", 5), ("distinct", 3)]
)
def test_forced_preemption(heads, k, rollback):
    model = tiny_model(heads)
    llm = make_llm(model, k, block_size=2, num_blocks=30, state_rollback=rollback)
    if k:
        guide(llm, PROMPTS)
    assert generate(llm, PROMPTS) == truth(model)
    assert llm.stats().preemptions > 0


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 7, 16])
def test_block_sizes(block_size):
    model = tiny_model()
    llm = guide(make_llm(model, 5, block_size=block_size, num_blocks=400 // block_size), PROMPTS)
    assert generate(llm, PROMPTS) == truth(model)


# Settings decide which tokens a step has, the rollback what is undone after it: each two of these
# and the heads meet.
@pytest.mark.parametrize(
    ("rollback", "depths", "settings"),
    covering(
        ROLLBACKS,
        [("repeated", 1), *(("distinct", k) for k in (1, 2, 3, 4))],
        [{}, {"max_num_batched_tokens": 10}, {"block_size": 2, "num_blocks": 34}],
    ),
)
def test_recurrent_heads(depths, rollback, settings):
    """Prompts of 1 token, of K and of 1 + K among them."""
    heads, k = depths
    model = tiny_model(heads, "M*M-", "M*", distinct=4)
    prompts = make_prompts((1, k, 1 + k, 9, 21))
    llm = guide(
        make_llm(model, k, state_rollback=rollback, async_scheduling=True, **settings), prompts
    )
    assert generate(llm, prompts) == truth(model, prompts)
    assert all(0 < rate < 1 for rate in llm.stats().conditional_acceptance)
    assert (llm.stats().preemptions > 0) == ("num_blocks" in settings)


@pytest.mark.parametrize(
    ("mtp_pattern", "rollback", "way"),
    covering(
        ("G*", "*-"),
        ROLLBACKS,
        [
            (1, {}),
            (2, {"max_num_batched_tokens": 10}),
            (3, {"block_size": 2, "num_blocks": 34}),
            (4, {}),
        ],
    ),
)
def test_gated_delta_nets(way, rollback, mtp_pattern):
    """Chunked prompts beside decode rows, preemption; heads with such layers and without."""
    k, settings = way
    model = tiny_model("repeated", "G*G-", mtp_pattern)
    prompts = make_prompts((1, k, 1 + k, 9, 21))
    llm = guide(
        make_llm(model, k, state_rollback=rollback, async_scheduling=True, **settings), prompts
    )
    assert generate(llm, prompts) == truth(model, prompts)
    assert all(0 < rate < 1 for rate in llm.stats().conditional_acceptance)
    assert (llm.stats().preemptions > 0) == ("num_blocks" in settings)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_mixtures_of_experts(k):
    """Against megatron-core's own pass through the experts, one after another."""
    model = tiny_model("repeated", "ME*E", "*E")
    want = truth(build_model(model.mtpkit_config, device="cpu", seed=1))
    llm = make_llm(model, k, async_scheduling=True)
    if k:
        guide(llm, PROMPTS)
    assert generate(llm, PROMPTS) == want
    if k:
        assert all(0 < rate < 1 for rate in llm.stats().conditional_acceptance)


@pytest.mark.parametrize("save", [save_model, save_hf_model])
def test_a_mixture_that_decodes_is_saved_as_any_other(save, tmp_path):
    """Its experts are views of one tensor; what is loaded is made so again."""
    model = build_model(tiny_model("repeated", "ME*E", "*E").mtpkit_config, device="cpu", seed=1)
    save(model, tmp_path / "apart")
    want = generate(make_llm(model, 2), PROMPTS)
    assert stack_experts(model)
    save(model, tmp_path / "stacked")
    sizes = [
        sum(f.stat().st_size for f in (tmp_path / name).rglob("*")) for name in ("apart", "stacked")
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
    llm = make_llm(tmp_path / "stacked", 2, dtype="float32", device="cpu")
    assert generate(llm, PROMPTS) == want and stack_experts(llm.model)


def test_recycled_slots_and_blocks_leave_no_trace():
    """One slot serves all; once with what the last request left, once with NaN in its place."""
    model = tiny_model()
    for poison in (False, True):
        llm = guide(make_llm(model, 3, max_num_seqs=1, num_blocks=9), PROMPTS)
        assert generate(llm, PROMPTS, poison=poison) == truth(model)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rollback", ROLLBACKS)
@pytest.mark.parametrize("k", [0, 2])
def test_state_in_bf16_stays_near_that_in_fp32(k, rollback, device):
    """Logits of the decode steps, as long as both say the same."""
    model = tiny_model(device=device)
    logits = {}
    for state_dtype in ("float32", "bfloat16"):
        llm = make_llm(
            model, k, state_rollback=rollback, state_dtype=state_dtype, enforce_eager=True
        )
        assert str(llm.engine.layout.sizes.state_dtype) == f"torch.{state_dtype}"
        runner = llm.engine.executor.runner
        seen = []
        run = runner.run
        runner.run = lambda batch, run=run, seen=seen: (
            seen.append((batch, run(batch))) or seen[-1][1]
        )
        generate(llm, [PROMPTS[-1]], poison=False)
        logits[state_dtype] = [(batch.token_ids.tolist(), out.logits) for batch, out in seen]
    pairs = list(zip(*logits.values(), strict=False))
    alike = list(itertools.takewhile(lambda pair: pair[0][0] == pair[1][0], pairs))
    assert len(alike) > 6
    errors = [relative(low, exact.double()) for (_, exact), (_, low) in alike]
    assert max(errors) < 0.1 and sum(error > 0 for error in errors) >= len(alike) - 2


@pytest.mark.gpu
@pytest.mark.parametrize("rollback", ROLLBACKS)
@pytest.mark.parametrize(
    ("heads", "mtp_pattern"), [("repeated", "*-"), ("distinct", "*-"), ("distinct", "M*")]
)
def test_eagerly_on_a_gpu(heads, mtp_pattern, rollback):
    model = tiny_model(heads, mtp_pattern=mtp_pattern, device="cuda")
    llm = make_llm(model, 3, state_rollback=rollback, max_num_batched_tokens=10, enforce_eager=True)
    assert generate(guide(llm, PROMPTS), PROMPTS) == truth(model)
