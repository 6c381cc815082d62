"""With a prefix cache requests get the tokens, logits and drafts that they get without one."""

from types import SimpleNamespace

import pytest
import torch

from mtpkit.engine import LLM, SamplingParams, memory
from mtpkit.engine.device import runner
from mtpkit.errors import UserError
from mtpkit.model import build_model
from tests.engine.prefix.compare import Pair, multi_turn
from tests.engine.test_rank_trees import DRAWN, GROWN_SHAPE
from tests.engine.test_trees import FIXED, watched
from tests.engine.tiny import (
    decode,
    generate,
    greedy,
    guide,
    make_llm,
    make_prompts,
    ruled_model,
    tiny_config,
    tiny_model,
)

(START,) = make_prompts((21,))
KINDS = [("M-*M-", "*-"), ("G-*G-", "*-"), ("*-*-", "*-"), ("+-M-+-", "+-")]
SEEDED = SamplingParams(temperature=0.9, top_k=20, seed=3, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize(("pattern", "mtp_pattern"), KINDS)
@pytest.mark.parametrize(("heads", "k"), [("repeated", 0), ("repeated", 3), ("distinct", 3)])
def test_every_kind_of_state(pattern, mtp_pattern, heads, k):
    pair = Pair(tiny_model(heads, pattern, mtp_pattern), k)
    multi_turn(pair, START, 4, greedy(6))
    pair.check()
    assert pair.hits > 60


@pytest.mark.parametrize(
    ("heads", "k", "rollback", "ahead"),
    [
        ("repeated", 1, "snapshot", True),
        ("repeated", 4, "replay", True),
        ("repeated", 4, "snapshot", False),
        ("distinct", 2, "replay", False),
        ("distinct", 2, "snapshot", True),
    ],
)
def test_ten_turns_with_drafts_that_are_right_and_wrong(heads, k, rollback, ahead):
    history = START

    def guided(llm):
        return guide(llm, [history], 90)

    pair = Pair(tiny_model(heads), k, guided, state_rollback=rollback, async_scheduling=ahead)
    multi_turn(pair, history, 10, greedy(7), added=0)
    pair.check()
    rows = [llm.stats().acceptance for llm in (pair.off, pair.on)]
    assert rows[0] == rows[1] and rows[0].accepted > 10
    shareable = sum(21 + 7 * turn for turn in range(9)) + 6 * 9
    assert pair.hits >= 0.95 * shareable


@pytest.mark.parametrize(
    ("pattern", "mtp_pattern", "k"),
    [("G-*G-", "*-", 1), ("*-*-", "*-", 4), ("+-M-+-", "+-", 2), ("+-+-", "+-", 0)],
)
def test_ten_turns_of_every_kind_of_state(pattern, mtp_pattern, k):
    history = START
    pair = Pair(
        tiny_model("repeated", pattern, mtp_pattern),
        k,
        lambda llm: guide(llm, [history], 50) if k else llm,
    )
    multi_turn(pair, history, 10, greedy(4), added=0)
    pair.check()
    assert pair.hits >= 0.9 * sum(21 + 4 * turn for turn in range(10))
    assert pair.on.stats().acceptance.accepted > (10 if k else -1)


PUBLISHED = {
    "mimo": dict(reads_of_base="before_final_norm"),
    "glm4_moe as vLLM runs it": dict(zero_first_embedding=True, reads_of_depth="before_final_norm"),
    "deepseek_v3 as vLLM runs it": dict(zero_first_embedding=True),
    "a window": dict(attention_window=7, attention_sinks=2),
}
"""Rules by which heads read, as families and servers have them, and a window."""


@pytest.mark.parametrize(("heads", "k"), [("repeated", 3), ("distinct", 4)])
@pytest.mark.parametrize("rules", PUBLISHED)
def test_heads_that_read_by_other_rules(rules, heads, k):
    model = ruled_model(heads, **PUBLISHED[rules])
    # in fp32 log-probs of logits of 24 are 2e-5 away from those in fp64, whoever computes them
    with torch.no_grad():
        model.output_layer.weight.mul_(0.1)
    pair = Pair(model, k)
    multi_turn(pair, START, 4, greedy(6))
    pair.check()
    assert pair.hits > 60


@pytest.mark.parametrize(
    ("heads", "pattern", "mtp_pattern", "rollback"),
    [
        ("repeated", "M-*M-", "*-", "replay"),
        ("distinct", "M-*M-", "*-", "snapshot"),
        ("repeated", "*-*-", "*-", "replay"),
        ("repeated", "+-+-", "+-", "replay"),
    ],
)
def test_trees_of_drafts(heads, pattern, mtp_pattern, rollback):
    """Wide enough that some are right: an output's last tokens are those of an accepted path."""
    settings = dict(
        speculative_token_tree="[8, 6]", max_num_batched_tokens=800, state_rollback=rollback
    )
    pair = Pair(tiny_model(heads, pattern, mtp_pattern), 2, async_scheduling=True, **settings)
    histories = make_prompts((21, 9, 4))
    for turn in range(3):
        outputs = pair.run(histories, greedy(9))
        histories = [
            history + output + [turn] for history, output in zip(histories, outputs, strict=True)
        ]
    pair.check()
    assert pair.on.stats().acceptance.accepted > (5 if mtp_pattern == "*-" else 1)
    assert pair.hits == sum(21 + 9 + 4 + 10 * 3 * turn - 3 * 2 for turn in (1, 2))
    assert len(pair.seen[1].states) > 3 * 3 * 2 * (1 + 8)  # of both depths


@pytest.mark.parametrize(
    ("k", "settings"), [(3, FIXED), (3, GROWN_SHAPE | dict(state_rollback="snapshot")), (2, DRAWN)]
)
@pytest.mark.parametrize(("pattern", "mtp_pattern"), [("M-*M-", "*-"), ("G-*G-", "M-")])
def test_conversations_with_trees(pattern, mtp_pattern, k, settings):
    """Paths of which some go through second children, or by what chance draws, were accepted."""
    model = tiny_model("repeated", pattern, mtp_pattern)
    drawn = settings is DRAWN
    params = SEEDED if drawn else greedy(8)
    said = [] if drawn else [multi_turn(Pair(model, 0), START, 5, params)]

    def guided(llm):
        watched(llm, said)
        return llm

    pair = Pair(model, k, guided, **settings)
    multi_turn(pair, START, 5, params)
    pair.check()
    acceptance = pair.on.stats().acceptance
    assert pair.hits > 40 and pair.seen[1].states and acceptance.accepted > (0 if drawn else 10)
    assert drawn or sum(ranks[1] for ranks in acceptance.ranks_per_depth) > 3


@pytest.mark.parametrize("k", [0, 3])
def test_seeded_sampling(k):
    pair = Pair(tiny_model(), k)
    multi_turn(pair, START, 5, SEEDED)
    pair.check()
    assert pair.hits > 100


@pytest.mark.parametrize(
    ("heads", "length"), [("distinct", 1), ("repeated", 15), ("distinct", 16), ("repeated", 17)]
)
def test_prompts_at_the_edges_of_blocks_and_checkpoints(heads, length):
    """That are the same, end one token before, or go on by one, and that differ in the last token:
    16 is two blocks."""
    pair = Pair(tiny_model(heads), 3)
    (prompt,) = make_prompts((length,))
    last = (prompt[-1] + 1) % 61
    others = [
        prompt,
        prompt,
        [*prompt, 5],
        [*prompt, 6],
        [*prompt[:-1], last],
        prompt[:-1],
        [*prompt, 5, 6],
    ]
    pair.run([one for one in others if one], greedy(4), together=False)
    pair.check()
    assert pair.hits >= length * 4


def test_an_identical_prompt_needs_no_forward_pass(monkeypatch):
    pair = Pair(tiny_model(), 3)
    pair.run([START], greedy(1))
    monkeypatch.setattr(runner, "base_forward", lambda *given: pytest.fail("the base ran"))
    (output,) = pair.on.generate([{"prompt_token_ids": START}], greedy(1))
    assert output.num_cached_tokens == len(START)


@pytest.mark.parametrize(
    ("settings", "ahead"),
    [
        ({"num_blocks": 14}, True),
        ({"prefix_cache_bytes": 20000}, False),
        ({"prefix_cache_bytes": 0}, True),
    ],
)
def test_eviction_and_preemption_under_load(settings, ahead):
    pair = Pair(
        tiny_model(), 3, max_num_seqs=3, async_scheduling=ahead, **{"num_blocks": 200, **settings}
    )
    prompts = make_prompts((21, 4, 30, 9))
    first = pair.run([*prompts, [*prompts[0], 3], prompts[2][:20]], greedy(12))
    again = [prompt + output[:9] for prompt, output in zip(prompts, first, strict=False)]
    pair.run([*again, *prompts], greedy(12))
    pair.run([START, *again, START], greedy(12), together=False)
    pair.check()
    if settings.get("prefix_cache_bytes") == 0:
        assert not pair.hits
    if "num_blocks" in settings:
        assert pair.on.stats().preemptions and pair.on.engine.scheduler.blocks.num_evicted


def test_a_preempted_request_goes_on_from_its_last_checkpoint():
    """That of its prompt: what it had decoded was given up first."""
    pair = Pair(tiny_model(), 2, num_blocks=12, prefix_cache_interval=16, max_num_seqs=2)
    prompts = make_prompts((33, 20))
    pair.run(prompts, greedy(24))
    pair.check()
    off = pair.off.stats()
    on = pair.on.stats()
    assert off.preemptions and on.preemptions and pair.hits == 0
    assert on.prefilled_tokens < off.prefilled_tokens - 16


@pytest.mark.parametrize("mtp_pattern", ["*-", "M*"])
def test_a_request_that_is_preempted_at_its_first_token(mtp_pattern):
    """All that its prefill computes again is in the cache: only heads that keep recurrent state
    compute some."""
    pair = Pair(tiny_model(mtp_pattern=mtp_pattern), 2)
    tokens = []
    for llm in (pair.off, pair.on):
        llm.engine.add_request(START, greedy(9))
        llm.engine.step()
        (request,) = llm.engine.scheduler.running
        assert request.num_output == 1
        llm.engine.scheduler.admission.preempt(request)
        while llm.engine.has_unfinished:
            llm.engine.step()
        tokens.append(request.output_token_ids)
    assert tokens[0] == tokens[1]
    pair.check()
    assert pair.on.stats().prefilled_tokens == len(START) * (1 if mtp_pattern == "*-" else 2)


@pytest.mark.parametrize("ahead", [False, True])
def test_outputs_that_end_by_a_stop_string_or_too_many_tokens(ahead):
    """Of those the device knows nothing: no step may be under way, and all its tokens must
    stand."""

    class Letters:
        def encode(self, text):
            return [ord(letter) % 61 for letter in text]

        def decode(self, token_ids, skip_special_tokens=True):
            return "".join(chr(97 + token_id % 8) for token_id in token_ids)

    pair = Pair(tiny_model(), 3, tokenizer=Letters(), async_scheduling=ahead)
    for params in (
        SamplingParams(temperature=0, max_tokens=20, stop=["a"], ignore_eos=True),
        SamplingParams(
            temperature=0, max_tokens=20, stop_token_ids=[*range(20, 60)], ignore_eos=True
        ),
        SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[*range(14)], ignore_eos=True),
    ):
        ends = set()
        for start in make_prompts((9, 13, 4)):
            (output,) = pair.run([start], params)
            ends.add(len(output))
            pair.run([start + output, [*start, *output, 7]], params, together=False)
        assert ends != {20}
    pair.check()


def test_chunks_end_where_others_went_on_and_at_intervals():
    """In the middle of prompts, in steps that decode others, too."""
    pair = Pair(tiny_model(), 2, max_num_batched_tokens=12, prefix_cache_interval=16)
    long, *short = make_prompts((50, 4, 9))
    pair.run([short[0], long, short[1]], greedy(10))
    forks = [long[:30] + [n] * 9 for n in (1, 2, 3)]
    pair.run(forks, greedy(6), together=False)
    pair.check()
    assert pair.hits == 16 + 24 + 24


def test_a_checkpoint_before_the_generation_prompt():
    """The next turn's history is rendered without it."""
    pair = Pair(tiny_model("distinct"), 3)
    for llm in (pair.off, pair.on):
        llm.engine.add_request(START, greedy(5), checkpoint_at=18)
        while llm.engine.has_unfinished:
            llm.engine.step()
    pair.run([[*START[:18], 9, 9, 9]], greedy(5))
    pair.check()
    assert pair.hits == 18


@pytest.mark.parametrize(
    ("heads", "mtp_pattern", "k", "rollback"),
    [
        ("repeated", "M*", 3, "replay"),
        ("repeated", "G-", 2, "snapshot"),
        ("distinct", "M*", 3, "snapshot"),
        ("distinct", "G-", 3, "replay"),
    ],
)
def test_heads_with_recurrent_state(heads, mtp_pattern, k, rollback):
    """Only what is followed by the same token is gone on from."""
    history = START
    pair = Pair(
        tiny_model(heads, mtp_pattern=mtp_pattern),
        k,
        lambda llm: guide(llm, [history], 60),
        state_rollback=rollback,
    )
    multi_turn(pair, history, 4, greedy(9), added=0)
    pair.check()
    assert pair.hits == 29 + 38 + 47
    first = pair.seen[0].logits
    follower = next(known[21] for known in first if len(known) == 22)
    pair.run([START, [*START, (follower + 1) % 61], [*START, follower]], greedy(4), together=False)
    pair.check()
    # The same prompt is cut after its second block; then another token follows, and the one that
    # did before.
    assert pair.hits == 29 + 38 + 47 + 16 + 21


def test_steps_that_are_timed_end_no_request():
    """Free slots of earlier requests, which have ended, are used for it."""
    llm = make_llm(tiny_model(), 2, enable_prefix_caching=True, max_num_seqs=2)
    llm.generate([[1], [2, 3]], greedy(3))
    ends = llm.engine.executor.state.ends
    assert ends is not None and ends.reached.any()
    llm.engine.adapt([2], repeats=2)
    assert not ends.reached.any()


def test_the_plan_counts_checkpoints():
    llm = make_llm(tiny_model(), 3, enable_prefix_caching=True, max_num_seqs=3)
    plan = llm.memory_plan
    store = llm.engine.executor.checkpoints
    assert plan.num_checkpoints == 16 and plan.prefix_bytes == sum(
        tensor.nbytes for tensor in store.tensors
    )
    assert "prefix cache 0.00 GB (16 checkpoints x" in str(plan)
    assert make_llm(tiny_model(), 3).memory_plan.prefix_bytes == 0
    half = make_llm(
        tiny_model(),
        3,
        enable_prefix_caching=True,
        prefix_cache_bytes=plan.checkpoint_bytes * 2 - 1,
    )
    assert half.memory_plan.num_checkpoints == 1
    assert (
        make_llm(
            tiny_model(), 3, enable_prefix_caching=True, max_num_seqs=9
        ).memory_plan.num_checkpoints
        == 18
    )


def test_requests_that_run_alone_share_their_beginning():
    """By default, though each of them leaves two checkpoints of its own."""
    llm = make_llm(tiny_model(), 2, enable_prefix_caching=True, max_num_seqs=1)
    prompts = [[*START, 7, 7, index] for index in range(5)]
    cached = [output.num_cached_tokens for output in llm.generate(prompts, greedy(3))]
    assert cached[:1] == [0] and all(cached[2:]), cached


def test_a_prefix_cache_is_the_default():
    llm = LLM(tiny_model(), 3, max_num_seqs=3)
    plan = llm.memory_plan
    assert plan.num_checkpoints == 16
    prompts = [dict(prompt_token_ids=START)]
    first, second = (llm.generate(prompts, greedy(4))[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, len(START))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert LLM(tiny_model(), 3, enable_prefix_caching=False).memory_plan.num_checkpoints == 0


def test_settings_of_no_cache_are_reported(caplog):
    for cached in (True, False):
        make_llm(
            tiny_model(),
            0,
            enable_prefix_caching=cached,
            prefix_cache_bytes=1000,
            prefix_cache_interval=2048,
        )
    size = make_llm(tiny_model(), 0, enable_prefix_caching=True).memory_plan.checkpoint_bytes
    assert [
        one.getMessage()
        for one in caplog.records
        if "cache" in one.getMessage() and one.levelname == "WARNING"
    ] == [
        f"prefix_cache_bytes is 1000, but a checkpoint takes {size}: nothing is cached",
        "prefix_cache_bytes has no effect: enable_prefix_caching is off",
    ]


@pytest.mark.parametrize("forgotten", [True, False])
def test_what_is_left_can_be_forgotten_when_weights_change(forgotten):
    """Neither a checkpoint nor a block of the old weights is found; without, one would be."""
    model = build_model(tiny_config(), device="cpu", seed=1)
    llm = make_llm(model, 3, enable_prefix_caching=True)
    longer = [*START, *START]
    generate(llm, [START, longer], greedy(4), poison=False)
    with torch.no_grad():
        model.embedding.word_embeddings.weight.copy_(model.embedding.word_embeddings.weight.flip(0))
    if forgotten:
        assert llm.reset_prefix_cache()
        assert not llm.engine.scheduler.blocks.num_idle
    llm.reset_stats()
    found = [
        generate(llm, [prompt], greedy(4), poison=False)[0] for prompt in (longer[:30], longer)
    ]
    assert (llm.stats().cached_tokens == 30) == forgotten
    assert (found == [decode(model, prompt, 4) for prompt in (longer[:30], longer)]) == forgotten


def test_requests_under_way_keep_what_they_found():
    llm = make_llm(tiny_model(), 3, enable_prefix_caching=True)
    generate(llm, [START], greedy(4), poison=False)
    llm.engine.add_request(START, greedy(4))
    assert not llm.reset_prefix_cache()
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert llm.stats().cached_tokens == len(START)
    assert llm.reset_prefix_cache() and make_llm(tiny_model(), 3).reset_prefix_cache()


def test_checkpoints_take_what_requests_leave_or_a_tenth(monkeypatch):
    """Of what the states and one request of full length, or the blocks asked for, leave: they are
    never the reason why something does not fit."""
    llm = make_llm(tiny_model(), 3, enable_prefix_caching=True)
    one = llm.memory_plan.blocks_for(128)
    size = llm.memory_plan.checkpoint_bytes
    most = 2 * 8
    others = 7 * one * llm.memory_plan.block_bytes  # blocks of the other requests

    def plan(bytes_left: int, num_blocks: int | None = None, **asked):
        least = llm.memory_plan.state_bytes + (num_blocks or one) * llm.memory_plan.block_bytes
        monkeypatch.setattr(memory, "_CPU_CACHE_BYTES", least + bytes_left)
        monkeypatch.setattr(
            memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=least + bytes_left)
        )
        sizes = (
            llm.model.mtpkit_config,
            llm.engine.layout,
            llm.engine.config,
            torch.device("cpu"),
            0.9,
            num_blocks,
        )
        return memory.plan_memory(*sizes, **asked)

    for count in (0, 1, 5, most, most + 3):
        for missing in (0, 1):
            fitting = min(most, max(0, count - missing))
            found = plan(max(0, count * size - missing), 3 * one)
            assert (found.num_checkpoints, found.num_blocks) == (fitting, 3 * one)
            found = plan(others + count * size - missing)
            assert found.num_checkpoints == max(
                fitting, (others + count * size - missing) // 10 // size
            )
            assert (found.num_blocks >= 8 * one) == (found.num_checkpoints <= count - missing)
            if 10 * count * size <= others:
                found = plan(max(0, 10 * count * size - missing))
                assert found.num_checkpoints == fitting and found.num_blocks >= one
    # With more memory, blocks are kept for as many requests again, and no more.
    found = plan(20 * others)
    assert (found.num_checkpoints, found.num_blocks) == (most, 16 * one)
    with pytest.raises(UserError, match="prefix_cache_bytes"):
        plan(4 * size, prefix_bytes=5 * size)


def test_checkpoints_in_bf16_are_rounded_and_no_more():
    pair = Pair(tiny_model(), 3, prefix_cache_dtype="bfloat16")
    multi_turn(pair, START, 3, greedy(3))
    off, on = pair.seen
    assert pair.hits > 40
    with pytest.raises(AssertionError, match="logits or states differ"):
        pair.check()
    worst = max(float((on.logits[known] - off.logits[known]).abs().max()) for known in on.logits)
    assert worst < 0.1
