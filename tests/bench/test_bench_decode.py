"""The decode benchmark: what is timed, what is refused; the engine is real, or a stand-in with its
own clock."""

import functools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mtpkit.bench import decode_run, plain
from mtpkit.bench.decode import DecodeConfig, DecodeRow, kernel_shares, measure_decode
from mtpkit.bench.machine import Machine
from mtpkit.bench.report import Result
from mtpkit.bench.roofline import Roofline
from mtpkit.bench.shapes import open_model
from mtpkit.bench.sizes import NEMOTRON_H_TINY
from mtpkit.bench.timing import Kernel, Trace
from mtpkit.engine.ranks import Ranks
from mtpkit.engine.requests.options import EngineOptions
from mtpkit.engine.requests.stats import AcceptanceStats
from mtpkit.engine.steps import verifier
from mtpkit.errors import MtpkitError, UserError
from mtpkit.kernels.linear import FP8
from mtpkit.model import build_model
from mtpkit.model.formats import weight as products
from mtpkit.model.layers import attention, moe, recurrent
from mtpkit.model.layers.mamba import MambaMixer
from mtpkit.model.state import Committed


@pytest.fixture(scope="module")
def models():
    return {}


@pytest.fixture
def model(models, device):
    if device not in models:
        models[device] = open_model("nemotron-h-tiny", torch.device(device))
    return models[device]


def test_every_batch_size_and_k_is_measured(model, device):
    config = DecodeConfig(
        batch_size=(1, 3),
        num_speculative_tokens=(0, 2),
        prompt_length=20,
        max_tokens=48,
        repeats=1,
        acceptance=(0.9, 0.5),
    )
    kept = []
    result = measure_decode(model, config, name="tiny", keep=kept.append)
    assert [(row.batch_size, row.k) for row in result.rows] == [(1, 0), (1, 2), (3, 0), (3, 2)]
    assert [len(part.rows) for part in kept][:4] == [1, 2, 3, 4]
    for row in result.rows:
        assert 0 < row.limit_share < 1 and row.tokens_per_s > 0 and row.step_ms > 0
        # What a step brings, its time and the rate are three views of the same window.
        made = row.batch_size * row.acceptance_length / row.step_ms * 1e3
        assert row.tokens_per_s == pytest.approx(made, rel=0.1)
        assert row.acceptance_length == 1 if row.k == 0 else 1.3 < row.acceptance_length < 3
        assert (row.host_gap_share is None) == (device == "cpu")
    text = json.loads(json.dumps(result.to_dict()))
    assert text["settings"]["synthetic"] and text["settings"]["model"] == "tiny"
    assert {"device", "commit", "date", "copy_bandwidth", "read_bandwidth", "matrix_rate"} <= set(
        text
    )
    assert "tiny, head *, synthetic acceptance 0.9 0.5" in result.title


def test_a_cache_in_fp8_is_measured(device):
    """It passes the check in fp32, whose plain pass rounds keys and values too, and the limit is
    that of its bytes."""
    config = DecodeConfig(
        batch_size=(2,), num_speculative_tokens=(0, 2), prompt_length=20, max_tokens=24, repeats=1
    )
    engine = EngineOptions(kv_cache_dtype="fp8_e4m3")
    model = build_model(NEMOTRON_H_TINY.replace(init_std=0.3), torch.float32, device, seed=1)
    result = measure_decode(model, replace(config, engine=engine), name="tiny")
    assert [row.k for row in result.rows] == [0, 2]
    fewer = Roofline(NEMOTRON_H_TINY, torch.float32, kv_dtype=FP8).decode(2, context_len=20 + 12)
    rates = result.machine.copy_bandwidth, result.machine.matrix_rate
    row = result.rows[0]
    assert row.tokens_per_s / row.limit_share == pytest.approx(fewer.limit_tokens_per_s(*rates))


def test_requests_may_have_penalties(model, monkeypatch):
    """What is timed has them: it passes the check with a plain pass that has them too, and no check
    without."""
    penalties = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 5.0}
    config = DecodeConfig(
        batch_size=(2,),
        num_speculative_tokens=(0, 2),
        prompt_length=20,
        max_tokens=80,
        repeats=1,
        penalties=penalties,
    )
    result = measure_decode(model, config)
    assert len(result.rows) == 2 and penalties.items() <= result.to_dict()["settings"].items()
    monkeypatch.setattr(plain, "_penalised", lambda logits, *_: logits)
    with pytest.raises(
        MtpkitError, match=r"K = 0: .* tokens are not those of a plain forward pass"
    ):
        measure_decode(model, config)


@pytest.mark.parametrize(
    ("tree", "drafts"),
    [({"speculative_token_tree": "[2, 2]"}, None), ({"speculative_eagle_topk": 2}, (0, 2))],
)
def test_trees_are_timed(device, tree, drafts):
    """A fixed one accepts along its first children as asked for; K is its depth."""
    # outputs differ at near ties in bfloat16
    model = open_model("nemotron-h-tiny", torch.device(device), "float32")
    config = DecodeConfig(
        batch_size=(2,),
        num_speculative_tokens=drafts,
        prompt_length=20,
        max_tokens=60,
        repeats=1,
        acceptance=(0.9, 0.5),
        engine=tree,
    )
    result = measure_decode(model, config)
    assert [row.k for row in result.rows] == [0, 2]
    assert result.to_dict()["settings"]["speculative_token_tree"] == tree.get(
        "speculative_token_tree"
    )
    assert 1 < result.rows[1].acceptance_length < 3
    real = measure_decode(model, replace(config, acceptance=None))
    assert real.rows[1].same_tokens == 1


@pytest.mark.parametrize("acceptance", [None, (0.9, 0.5)])
def test_auto_among_a_tree_and_chains_is_timed(device, acceptance):
    model = open_model("nemotron-h-tiny", torch.device(device), "float32")
    config = dict(
        batch_size=(2,),
        num_speculative_tokens=(0, "auto"),
        prompt_length=20,
        max_tokens=40,
        repeats=1,
        acceptance=acceptance,
    )
    result = measure_decode(
        model, DecodeConfig(engine={"speculative_token_tree": [2, 2]}, **config)
    )
    assert [row.k for row in result.rows] == [0, "auto"]
    assert result.rows[1].same_tokens == (1 if acceptance is None else None)


def test_distinct_heads_are_named(device):
    model = open_model("nemotron-h-tiny", torch.device(device), distinct=True)
    config = DecodeConfig(
        batch_size=(2,), num_speculative_tokens=(3,), prompt_length=20, max_tokens=40, repeats=1
    )
    result = measure_decode(model, config)
    assert "distinct heads *" in result.title and result.settings["mtp_use_repeated_layer"] is False


def test_nothing_is_timed_after_something_was_traced(model, device, monkeypatch):
    """A tracer slows what comes after it."""
    order = []

    def trace(function, device):
        function()
        order.append("trace")
        return Trace([Kernel("gemm", 0, 0.3, 1), Kernel("scan", 0.4, 1, 2)])

    run = decode_run.Contender.run
    monkeypatch.setattr(decode_run.Contender, "run", lambda self: order.append("run") or run(self))
    monkeypatch.setattr(decode_run, "trace_kernels", trace)
    monkeypatch.setattr("mtpkit.bench.decode.can_trace", lambda device: True)
    config = DecodeConfig(
        batch_size=(2,),
        num_speculative_tokens=(0, 1),
        prompt_length=8,
        max_tokens=60,
        repeats=2,
        acceptance=(0.5,),
    )
    kept = []
    result = measure_decode(model, config, keep=kept.append)
    assert order == ["run"] * 4 + ["trace"] * 4
    assert [[row.kernel_ms for row in part.rows] for part in kept][:2] == [[None], [None, None]]
    assert result.rows == kept[-1].rows and [row.k for row in result.rows] == [0, 1]
    for row in result.rows:
        assert row.host_gap_share == pytest.approx(0.1) and row.kernel_ms == pytest.approx(90)
        assert row.kernels == pytest.approx({"scan": 60, "gemm": 30})
    # "auto" goes on as it was timed: an engine that is made after a trace measures other times.
    monkeypatch.setattr(
        decode_run.Contender,
        "trace",
        lambda self: order.append(self.llm.engine.speculation) or ([], 0),
    )
    monkeypatch.setattr(
        decode_run.Contender,
        "run",
        lambda self: order.append(self.llm.engine.speculation) or run(self),
    )
    order.clear()
    measure_decode(model, replace(config, num_speculative_tokens=("auto",), repeats=1))
    assert len(order) == 2 and order[0] is order[1]
    monkeypatch.setattr(decode_run.Contender, "run", lambda self: order.append("run") or run(self))
    order.clear()
    row, _ = measure_decode(model, replace(config, trace=False)).rows
    assert order == ["run"] * 4 and row.host_gap_share is None and not row.kernels


def lost_state(patch):
    prefill = MambaMixer._prefill

    def forget(self, conv_in, dt, step, window, recurrent):
        y = prefill(self, conv_in, dt, step, window, recurrent)
        recurrent.folded[step.state_slots[step.num_decode_rows :]] = 0
        return y

    patch.setattr(MambaMixer, "_prefill", forget)


def no_attention(patch):
    attend = attention.paged_attention
    patch.setattr(
        attention,
        "paged_attention",
        lambda *args, **scales: torch.zeros_like(attend(*args, **scales)),
    )


def blocks_of_others(patch):
    attend = attention.paged_attention
    patch.setattr(
        attention,
        "paged_attention",
        lambda q, k, v, tables, *rest, **scales: attend(q, k, v, tables.flip(0), *rest, **scales),
    )


def kept_rejections(patch):
    after = Committed.after
    patch.setattr(
        Committed,
        "after",
        lambda self, lens, width, new, widest=None: after(
            self, lens, width, torch.full_like(new, width), widest
        ),
    )


def kept_window(patch):
    update = recurrent.causal_conv1d_update
    patch.setattr(
        recurrent,
        "causal_conv1d_update",
        lambda *args: update(*args[:5], torch.zeros_like(args[5]), args[6]),
    )


@functools.cache
def measured(k, dtype):
    """A model and settings that a whole engine passes with."""
    model = open_model("nemotron-h-tiny", torch.device("cpu"), dtype)
    config = DecodeConfig(
        batch_size=(2,),
        num_speculative_tokens=(k,),
        prompt_length=64,
        max_tokens=80,
        repeats=1,
        acceptance=(0.6,),
    )
    measure_decode(model, config)
    return model, config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("sabotage", "k"),
    [(f, k) for f in (lost_state, no_attention, blocks_of_others) for k in (0, 2)]
    + [(kept_rejections, 2), (kept_window, 2)],
)
def test_a_broken_engine_is_not_timed(sabotage, k, dtype, monkeypatch):
    """Random weights are such that the tokens say what state and attention were. Memory that nobody
    wrote is NaN."""
    model, config = measured(k, dtype)
    sabotage(monkeypatch)
    unwritten = sabotage in (blocks_of_others, kept_rejections)
    seen = "are not those of a plain forward pass" + ("|are NaN or infinite" if unwritten else "")
    with pytest.raises(MtpkitError, match=seen):
        measure_decode(model, config)


def test_only_random_prompts_may_be_too_many():
    model = open_model("nemotron-h-tiny", torch.device("cpu"))
    config = DecodeConfig(
        batch_size=(2,), num_speculative_tokens=(0,), max_tokens=4, prompt_length=1 << 40, repeats=1
    )
    with pytest.raises(
        UserError,
        match=r"decode benchmark: the random prompts have .* tokens in all, must be at most",
    ):
        measure_decode(model, config)
    assert len(measure_decode(model, config, prompts=[[1, 2], [3]]).rows) == 1


def no_experts(patch):
    patch.setattr(
        products, "expert_mlp", lambda x, *args: torch.zeros_like(x) if args[5] is None else args[5]
    )


def other_experts(patch):
    """Only where they are stacked."""
    run = products.expert_mlp
    patch.setattr(
        products,
        "expert_mlp",
        lambda x, fc1, fc2, ids, *args: run(x, fc1, fc2, (ids + 1) % 8, *args),
    )


def other_choice(patch):
    """In both passes."""
    run = moe.route

    def shifted(logits, *args):
        ids, weights = run(logits, *args)
        return (ids + 1) % logits.shape[1], weights

    patch.setattr(moe, "route", shifted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("sabotage", "says"),
    [
        (no_experts, "differs from megatron-core's own by"),
        (other_experts, "differs from megatron-core's own by"),
        (other_choice, "chooses others than the reference does"),
    ],
)
def test_broken_experts_are_not_timed(sabotage, says, dtype, monkeypatch):
    """Though the plain pass has the same."""
    model = open_model("nemotron-3-tiny", torch.device("cpu"), dtype)
    config = DecodeConfig(
        batch_size=(2,),
        num_speculative_tokens=(2,),
        prompt_length=64,
        max_tokens=40,
        repeats=1,
        acceptance=(0.6,),
    )
    measure_decode(model, config)
    sabotage(monkeypatch)
    with pytest.raises(MtpkitError, match=f"a mixture of experts {says}"):
        measure_decode(model, config)


@pytest.mark.parametrize("pattern", ["*", "*E"])
def test_a_mixture_of_experts_is_measured(device, pattern):
    model = open_model("nemotron-3-tiny", torch.device(device), pattern=pattern)
    config = DecodeConfig(
        batch_size=(3,),
        num_speculative_tokens=(0, 2),
        prompt_length=20,
        max_tokens=48,
        repeats=1,
        acceptance=(0.9, 0.5),
    )
    assert all(0 < row.limit_share < 1 for row in measure_decode(model, config).rows)


def test_drafts_are_verified_where_no_acceptance_is_given(model):
    config = DecodeConfig(
        batch_size=(2,), num_speculative_tokens=(1,), max_tokens=12, repeats=1, acceptance=None
    )
    result = measure_decode(model, config, prompts=[[1, 2, 3], [4], [5, 6]])
    assert "real acceptance" in result.title and not result.settings["synthetic"]
    (row,) = result.rows
    assert row.acceptance_length == 1 + row.conditional_acceptance[0]


def test_outputs_are_compared_with_those_of_k_0(device, monkeypatch):
    model = open_model("nemotron-h-tiny", torch.device(device), "float32")
    prompts = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
    config = DecodeConfig(
        batch_size=(2, 4), num_speculative_tokens=(2, 0), max_tokens=16, repeats=1, acceptance=None
    )
    drafted = {
        row.batch_size: row.same_tokens
        for row in measure_decode(model, config, prompts=prompts).rows
        if row.k
    }
    plain = [
        row.same_tokens
        for row in measure_decode(
            model, replace(config, num_speculative_tokens=(0,)), prompts=prompts
        ).rows
    ]
    unmatched = [
        row.same_tokens
        for row in measure_decode(
            model, replace(config, num_speculative_tokens=(1,)), prompts=prompts
        ).rows
    ]
    assert plain == unmatched == [None, None] and drafted == {2: 1, 4: 1}

    def accept_all(drafts, chosen):
        return torch.full_like(chosen[:, 0], drafts.shape[1]), torch.cat(
            [drafts, chosen[:, -1:]], 1
        )

    monkeypatch.setattr(verifier, "accept_matching", accept_all)
    with pytest.raises(
        MtpkitError, match=r"batch 2, K = 2: \d+ of 16 tokens are not those of a plain forward pass"
    ):
        measure_decode(model, config, prompts=prompts)
    monkeypatch.setattr(decode_run, "check_greedy", lambda *_: None)
    with pytest.raises(MtpkitError, match=r"batch 2, K = 2: 2 of 2 outputs are not those of K = 0"):
        measure_decode(model, config, prompts=prompts)


@pytest.mark.parametrize("k", [0, 2])
def test_what_the_base_chose_is_compared_with_a_plain_forward_pass(k, device, monkeypatch):
    """Synthetic acceptance too: after the accepted drafts comes the base's own token."""
    model = open_model("nemotron-h-tiny", torch.device(device), "float32")
    config = DecodeConfig(
        batch_size=(3,),
        num_speculative_tokens=(k,),
        prompt_length=9,
        max_tokens=60,
        repeats=1,
        acceptance=(0.5,),
    )
    measure_decode(model, config)
    own_tokens = verifier.own_tokens
    monkeypatch.setattr(verifier, "own_tokens", lambda *args: (own_tokens(*args) + 1) % 512)
    with pytest.raises(
        MtpkitError, match=rf"batch 3, K = {k}: \d+ of \d+ tokens are not those of a plain forward"
    ):
        measure_decode(model, config)


def test_k_as_the_engine_chooses(model):
    config = DecodeConfig(
        batch_size=(2,), num_speculative_tokens=("auto",), prompt_length=8, max_tokens=40, repeats=1
    )
    result = measure_decode(model, config)
    (row,) = result.rows
    assert row.k == "auto" and len(row.conditional_acceptance) == model.mtpkit_config.mtp.num_depths
    assert 0 < row.limit_share < 1
    # The depths that were hardly tried have the rates that were asked for.
    line = Roofline(NEMOTRON_H_TINY, next(model.parameters()).dtype)
    rates = (result.machine.copy_bandwidth, result.machine.matrix_rate)
    limits = [
        line.decode(2, [0.85] * k, context_len=8 + 20).limit_tokens_per_s(*rates) for k in range(4)
    ]
    assert row.limit_tokens_per_s == pytest.approx(max(limits))


def test_a_pruned_vocabulary_raises_the_limit(model):
    machine = Machine("fake", None, "today", 1e9, 1.2e9, 1e12)
    limits = {}
    for size in (None, 64):
        config = DecodeConfig(prompt_length=4, max_tokens=12, draft_vocab_size=size)
        limits[size] = decode_run.Contender(model, config, 1, 1, None).limit(machine, [0.85])
    assert limits[64] > limits[None]


@pytest.mark.parametrize(
    ("batch", "stages", "alone"), [(1, 2, 1), (2, 2, 1), (4, 2, 2), (5, 2, 3), (3, 4, 1)]
)
def test_each_batch_of_pipeline_stages_reads_the_weights(model, batch, stages, alone, monkeypatch):
    """So the limit of a request is that on one GPU in the largest batch; one batch has one stage at
    a time."""
    machine = Machine("fake", None, "today", 1e9, 1.2e9, 1e15)  # bytes are what takes time
    one, split = (
        decode_run.Contender(model, DecodeConfig(prompt_length=4, max_tokens=12), size, 1, None)
        for size in (alone, batch)
    )
    monkeypatch.setattr(split.llm.ranks, "stage", SimpleNamespace(stages=stages))
    assert split.limit(machine, [0.85]) / batch == pytest.approx(one.limit(machine, [0.85]) / alone)


class FakeEngine:
    """Computes one prompt a step in 100 s, and decodes all that were computed in 1 s."""

    drafter = speculation = None
    config = SimpleNamespace(num_batches=1)

    def __init__(self, k: int, accepts: int, cut: int) -> None:
        self.k = k
        self.accepts = accepts
        self.cut = cut
        self.clock = 0.0
        self.generated = 0
        self.acceptance = AcceptanceStats.for_depths(k)
        self.waiting = []
        self.running = {}
        self.added = 0

    def add_request(self, prompt, params) -> str:
        self.added += 1
        self.waiting.append(str(self.added))
        self.max_tokens = params.max_tokens
        return self.waiting[-1]

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list:
        changed = list(self.running)
        for name in changed:
            emitted = min(self.accepts + 1, self.max_tokens - self.cut - self.running[name])
            self.running[name] += emitted
            self.generated += emitted
            self.acceptance.steps += 1
            for depth in range(self.k):
                self.acceptance.reached_per_depth[depth] += depth <= self.accepts
                self.acceptance.accepted_per_depth[depth] += depth < self.accepts
        self.clock += 100 if self.waiting else 1
        if self.waiting:
            changed.append(self.waiting.pop(0))
            self.running[changed[-1]] = 1
            self.generated += 1
        outputs = [
            SimpleNamespace(
                request_id=name,
                outputs=[SimpleNamespace(token_ids=[0] * self.running[name])],
                error=None,
            )
            for name in changed
        ]
        ended = [name for name in changed if self.running[name] >= self.max_tokens - self.cut]
        for name in ended:
            del self.running[name]
        return outputs


@pytest.fixture
def fake(monkeypatch):
    """Put a `FakeEngine` in the place of the real one."""

    def use(accepts: int = 0, cut: int = 0) -> list[FakeEngine]:
        engines = []

        def make(model, num_speculative_tokens, max_num_seqs, **_):
            engines.append(FakeEngine(num_speculative_tokens, accepts, cut))
            return SimpleNamespace(
                ranks=Ranks(),
                engine=engines[-1],
                model=model,
                stats=lambda: SimpleNamespace(
                    generated_tokens=engines[-1].generated, acceptance=engines[-1].acceptance
                ),
            )

        monkeypatch.setattr(decode_run, "LLM", make)
        monkeypatch.setattr(decode_run.time, "perf_counter", lambda: engines[-1].clock)
        return engines

    machine = Machine("fake", None, "today", 1e9, 1.2e9, 1e12)
    monkeypatch.setattr("mtpkit.bench.decode.measure_machine", lambda device: machine)
    monkeypatch.setattr(decode_run, "check_greedy", lambda *_: None)
    return use


@pytest.fixture(scope="module")
def tiny():
    """A model around which a `FakeEngine` is made."""
    return build_model(NEMOTRON_H_TINY)


def test_only_steps_in_which_all_decode_are_timed(fake, tiny):
    engines = fake(accepts=1)
    config = DecodeConfig(
        batch_size=(4,),
        num_speculative_tokens=(1,),
        prompt_length=3,
        max_tokens=64,
        acceptance=(1.0,),
        repeats=2,
    )
    (row,) = measure_decode(tiny, config).rows
    assert row.tokens_per_s == pytest.approx(8) and row.step_ms == pytest.approx(1000)
    assert row.acceptance_length == 2
    assert engines[0].added == 4 * 3  # a run to warm up, and the repeats


def test_synthetic_acceptance_must_come_out_as_asked_for(fake, tiny):
    fake(accepts=1)
    config = DecodeConfig(
        batch_size=(64,),
        num_speculative_tokens=(2,),
        prompt_length=3,
        max_tokens=400,
        acceptance=(0.85,),
    )
    with pytest.raises(
        MtpkitError, match=r"batch 64, K = 2: acceptance length 2\.000 over \d+ steps.*make 2\.57"
    ):
        measure_decode(tiny, config)


@pytest.mark.parametrize("asked", [(0.9,), None])
def test_the_limit_is_at_the_acceptance_that_was_drawn(fake, asked, tiny):
    fake(accepts=1)
    config = DecodeConfig(
        batch_size=(1,),
        num_speculative_tokens=(1,),
        prompt_length=3,
        max_tokens=64,
        acceptance=asked,
        repeats=1,
    )
    (row,) = measure_decode(tiny, config).rows
    drawn = Roofline(NEMOTRON_H_TINY, torch.float32).decode(1, [1.0], context_len=3 + 32)
    assert row.conditional_acceptance == [1]
    assert row.limit_tokens_per_s == pytest.approx(drawn.limit_tokens_per_s(1e9, 1e12))
    assert row.limit_share == pytest.approx(row.tokens_per_s / row.limit_tokens_per_s)


def test_the_limit_of_a_quantised_model_is_that_of_its_bytes_and_its_rate(fake, monkeypatch):
    """And the report names the formats."""
    fake(accepts=1)
    machine = Machine("fake", None, "today", 1e9, 1.2e9, 1e9, fp8_rate=4e9)
    monkeypatch.setattr("mtpkit.bench.decode.measure_machine", lambda device: machine)
    config = DecodeConfig(
        batch_size=(1,),
        num_speculative_tokens=(1,),
        prompt_length=3,
        max_tokens=64,
        acceptance=(1.0,),
        repeats=1,
    )
    model = open_model(
        "nemotron-h-tiny", torch.device("cpu"), "float32", weight_format="fp8-blocks"
    )
    result = measure_decode(model, config)
    drawn = Roofline.of(model, EngineOptions()).decode(1, [1.0], context_len=3 + 32)
    assert sum(work.fp8_flops for work in drawn.works) > 0.5 * drawn.flops
    (row,) = result.rows
    assert row.limit_tokens_per_s == pytest.approx(drawn.limit_tokens_per_s(1e9, 1e9, 4e9))
    assert row.limit_tokens_per_s > 1.2 * drawn.limit_tokens_per_s(1e9, 1e9)
    assert "float32 with matrices in fp8, fake" in result.title
    assert result.to_dict()["settings"]["weight_formats"] == ["fp8"]


def test_outputs_must_have_their_length(fake, tiny):
    fake(cut=3)
    config = DecodeConfig(
        batch_size=(1,), num_speculative_tokens=(0,), prompt_length=3, max_tokens=16
    )
    with pytest.raises(MtpkitError, match=r"outputs of \[13\] tokens where 16 were asked for"):
        measure_decode(tiny, config)


def test_too_few_tokens_to_time_are_refused(fake, tiny):
    fake()
    config = DecodeConfig(
        batch_size=(20,), num_speculative_tokens=(0,), prompt_length=3, max_tokens=16
    )
    with pytest.raises(
        UserError, match=r"batch 20, K = 0: no step lies between .* raise max-tokens \(16\)"
    ):
        measure_decode(tiny, config)


def test_kernels_of_a_step_are_kept_in_the_file_and_shown_apart(tmp_path):
    kernels = {"gemm": 3.0, "scan": 1.0}
    row = DecodeRow(4, 3, 100.0, 5.0, 3.2, [0.8], None, 200.0, 0.5, 0.01, 4.0, kernels)
    result = Result("decode", "decoding: tiny", DecodeRow, [row], details=("kernels",))
    result.save(tmp_path)
    assert "kernels" not in result.to_dict()["rows"][0]
    assert json.loads((tmp_path / "decode.json").read_text())["rows"][0]["kernels"] == kernels
    shares = kernel_shares(result, most=1)
    assert [(row.kernel, row.share) for row in shares.rows] == [("gemm", 0.75)]
    assert shares.title == "kernels of a decode step: tiny" and len(shares.tables()[0].rows) == 1


def test_settings_that_cannot_be_measured_are_all_named():
    wrong = (
        r"batch_size is \(0,\), .*num_speculative_tokens is \(-1,\), .*max_tokens is 1,"
        r" .*acceptance is \(2,\), "
    )
    with pytest.raises(UserError, match=wrong):
        DecodeConfig(batch_size=(0,), num_speculative_tokens=(-1,), acceptance=(2,), max_tokens=1)
    with pytest.raises(
        UserError, match=r"batch_size is \(\), must be .*; num_speculative_tokens is \(\), must be"
    ):
        DecodeConfig(num_speculative_tokens=(), batch_size=())
    with pytest.raises(UserError, match=r"penalties\.presence_penalty is 3, must be from -2 to 2"):
        DecodeConfig(penalties={"presence_penalty": 3})
