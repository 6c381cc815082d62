"""Steps as CUDA graphs give the tokens of plain decoding, whatever fills the batch."""

import collections
import functools
import itertools
import math
import sys

import pytest
import torch
from triton.runtime.jit import JITFunction

from mtpkit.engine import SamplingParams
from mtpkit.engine.device import runner
from mtpkit.engine.device.graphs import bucket_size
from mtpkit.engine.steps.processors import GREEDY, for_graph
from mtpkit.kernels.dispatch import CHOICE
from mtpkit.model import build_model
from mtpkit.model.hybrid import one_layer_per_kind
from tests.engine.replayed import TruthOnDevice, replay_on_cpu
from tests.engine.tiny import (
    PROMPT_LENGTHS,
    VOCAB_SIZE,
    decode,
    generate,
    greedy,
    make_llm,
    make_prompts,
    penalised,
    tiny_config,
    tiny_model,
)
from tests.shared import covering

MAX_TOKENS = 24
HEADS = [("repeated", "*-"), ("distinct", "*-"), ("distinct", "M-"), ("distinct", "*M")]


def most_drafts(model) -> int:
    """The largest K of the tests that the heads of `model` can draft."""
    config = model.mtpkit_config
    return 5 if config.mtp.repeated else config.mtp.num_depths


def states_of(engine) -> list[torch.Tensor]:
    """All tensors with a slot for each request: of recurrent layers and of the engine."""
    executor = engine.executor
    layers = [
        tensor
        for state in executor.states.all()
        if state.unit == "slot"
        for tensor in state.tensors.values()
    ]
    return layers + executor.state.tensors


def test_buckets_hold_their_rows():
    sizes = [bucket_size(rows) for rows in range(1, 300)]
    assert all(rows <= size <= max(rows + 3, rows * 1.4 + 1) for rows, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes) and all(bucket_size(size) == size for size in sizes)
    assert [bucket_size(n) for n in (1, 3, 5, 17, 64, 65, 128)] == [1, 3, 8, 24, 64, 80, 128]


def test_no_step_finds_blocks_of_an_earlier_one(monkeypatch):
    """Where a step of few blocks follows a step of many, the rest of its tables is the null
    block."""
    replay_on_cpu(monkeypatch)
    llm = make_llm(tiny_model(), 1, block_size=2, max_num_seqs=2)
    graphs = llm.engine.executor.graphs
    widths = []
    fill = graphs._fill

    def filled(shape, numbers, tables):
        fill(shape, numbers, tables)
        widths.append(tables.shape[1])
        assert (graphs._tables[: shape.rows, widths[-1] :] == graphs.null_block).all()

    monkeypatch.setattr(graphs, "_fill", filled)
    for length in (3, 21, 5):
        generate(llm, make_prompts([length]), greedy(4))
    assert widths[-1] < 6 and any(10 < width < graphs._tables.shape[1] for width in widths)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """The device of a model; on a CPU steps are run again where a GPU replays them."""
    if request.param == "cpu":
        replay_on_cpu(monkeypatch)
    return request.param


def device_of(model) -> torch.device:
    return next(model.parameters()).device


def graphed(model, k, prompts, **settings):
    llm = make_llm(model, k, **{"max_num_seqs": len(prompts), "num_blocks": 400} | settings)
    assert llm.engine.executor.graphs is not None
    if k:
        width = max(map(len, prompts)) + MAX_TOKENS + 4 * k
        truth = [prompt + decode(model, prompt, width - len(prompt)) for prompt in prompts]
        llm.engine.executor.drafter = TruthOnDevice(
            llm.engine.executor.drafter, truth, device_of(model)
        )
    return llm


DEPTHS = [
    (heads, pattern, k)
    for heads, pattern in HEADS
    for k in (0, 1, 3, 5)
    if k <= 3 or heads == "repeated"
]


# How states are rolled back is the graph's, when the host looks at results is not: the two meet in
# every other step.
@pytest.mark.parametrize(
    ("depths", "rollback", "ahead"), covering(DEPTHS, ("replay", "snapshot"), (False, True))
)
def test_graphs_change_no_token(device, depths, rollback, ahead):
    heads, mtp_pattern, k = depths
    model = tiny_model(heads, mtp_pattern=mtp_pattern, device=device)
    prompts = make_prompts()
    llm = graphed(model, k, prompts, state_rollback=rollback, async_scheduling=ahead)
    assert generate(llm, prompts, greedy(MAX_TOKENS)) == [
        decode(model, p, MAX_TOKENS) for p in prompts
    ]
    assert llm.engine.executor.graphs._graphs
    if k:
        assert all(0 < rate < 1 for rate in llm.stats().conditional_acceptance)


@pytest.mark.parametrize(
    "tree", [dict(speculative_token_tree=[8, 3]), dict(speculative_eagle_topk=4)]
)
@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize(
    ("heads", "mtp_pattern"), [("repeated", "*-"), ("distinct", "*-"), ("repeated", "*M")]
)
def test_trees(device, heads, mtp_pattern, rollback, tree):
    """Of attention, Mamba2 and gated delta nets; sampled with a seed, too."""
    model = tiny_model(heads, "MG*-", mtp_pattern, device)
    prompts = make_prompts()
    settings = dict(max_num_seqs=5, num_blocks=400, async_scheduling=True, state_rollback=rollback)
    llm = make_llm(model, 2 if "speculative_eagle_topk" in tree else None, **settings, **tree)
    assert llm.engine.executor.graphs is not None
    assert generate(llm, prompts, greedy(MAX_TOKENS)) == [
        decode(model, p, MAX_TOKENS) for p in prompts
    ]
    assert llm.engine.executor.graphs._graphs and llm.stats().acceptance.accepted > 0
    sampled = SamplingParams(temperature=0.9, seed=3, max_tokens=MAX_TOKENS, ignore_eos=True)
    plain = make_llm(model, 0, **settings)
    assert generate(llm, prompts, sampled) == generate(plain, prompts, sampled)


@pytest.mark.parametrize(
    "drafts",
    [dict(k=0), dict(k=3), dict(k=None, speculative_token_tree=[2, 2, 1])],
    ids=["plain", "chains", "trees"],
)
def test_rules_about_tokens_and_log_probabilities(device, drafts):
    """Requests that ask beside others that do not, in slots that others had; prompts too."""
    model = tiny_model(device=device)
    prompts = make_prompts()
    asked = [
        dict(logit_bias={3: 2.0, 9: -4.0}, logprobs=3),
        dict(),
        dict(min_tokens=MAX_TOKENS, stop_token_ids=list(range(30)), prompt_logprobs=2),
        dict(allowed_token_ids=list(range(0, VOCAB_SIZE, 2)), logprobs=0, temperature=0.9, seed=2),
    ]
    params = [
        SamplingParams(
            **dict(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True) | asked[index % 4]
        )
        for index in range(len(prompts))
    ]
    settings = dict(max_num_seqs=3, num_blocks=400)
    found, want = (
        make_llm(model, **settings, **each).generate(prompts, params)
        for each in (drafts, dict(k=0, enforce_eager=True))
    )

    def entries(output):
        listed = [*(output.prompt_logprobs or []), *(output.outputs[0].logprobs or [])]
        return [(token, one.logprob) for each in listed for token, one in (each or {}).items()]

    for output, expected in zip(found, want, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        # Near ties may change places.
        assert dict(entries(output)) == pytest.approx(dict(entries(expected)), abs=1e-3)


@pytest.mark.parametrize(
    ("pattern", "mtp_pattern"),
    [("M*M-", "*"), ("M*M-", "*-"), ("M*M-", "M-"), ("ME*E", "*E"), ("G*G-", "G-")],
)
def test_layers_of_every_kind(device, pattern, mtp_pattern):
    model = tiny_model("repeated", pattern, mtp_pattern, device)
    prompts = make_prompts()
    assert generate(graphed(model, 3, prompts), prompts, greedy(MAX_TOKENS)) == [
        decode(model, p, MAX_TOKENS) for p in prompts
    ]


def test_one_layer_of_each_kind_runs_before_a_capture(device):
    model = build_model(tiny_config("repeated", "M*M-*M", "*"), device=device, seed=1)
    prompts = make_prompts()
    runs = collections.Counter()
    for place, layer in enumerate(model.decoder.layers):
        layer.register_forward_pre_hook(lambda *_, place=place: runs.update([place]))
    llm = make_llm(model, 3)
    tokens = generate(llm, prompts, greedy(MAX_TOKENS))
    once = runs[2]  # whatever runs all layers
    assert (
        len(llm.engine.executor.graphs._graphs) <= once
        and [runs[place] for place in (4, 5)] == [once] * 2
    )
    assert {runs[place] - once for place in (0, 1, 3)} == {len(llm.engine.executor.graphs._graphs)}
    assert tokens == [decode(model, prompt, MAX_TOKENS) for prompt in prompts]


class CompiledLate(Exception):
    pass


@pytest.fixture
def nothing_compiled(monkeypatch):
    """No kernel is compiled yet, and to compile one while a graph is captured is an error."""
    compile_kernel = JITFunction._do_compile

    def watched(self, *args, **kwargs):
        if torch.cuda.is_current_stream_capturing():
            raise CompiledLate(self.fn.__name__)
        return compile_kernel(self, *args, **kwargs)

    modules = [module for name, module in sys.modules.items() if name.startswith("mtpkit.kernels.")]
    for value in itertools.chain.from_iterable(vars(module).values() for module in modules):
        if isinstance(kernel := getattr(value, "kernel", value), JITFunction):
            kernel.device_caches.clear()
    monkeypatch.setattr(JITFunction, "_do_compile", watched)


TWICE = [("M-M-*", "*"), ("GE*GE", "*-"), ("+E-+E-", "+")]
"""Bases with two layers of most kinds, and heads without a kind of theirs: heads run before the
capture in any case."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("pattern", "mtp_pattern"), [*TWICE, ("*M*M", "M-")])
def test_kernels_are_compiled_before_a_capture(pattern, mtp_pattern, dtype, nothing_compiled):
    model = build_model(tiny_config("repeated", pattern, mtp_pattern), dtype, "cuda")
    make_llm(model, 3, warm_up=True, max_num_seqs=3, max_num_batched_tokens=40)


@pytest.mark.gpu
@pytest.mark.parametrize(("pattern", "mtp_pattern"), TWICE)
def test_a_kernel_left_for_the_capture_is_seen(pattern, mtp_pattern, nothing_compiled, monkeypatch):
    def first_layer(model):
        short = one_layer_per_kind(model)
        short.decoder.layers = short.decoder.layers[:1]
        return short

    monkeypatch.setattr(runner, "one_layer_per_kind", first_layer)
    with pytest.raises(CompiledLate):
        make_llm(
            tiny_model("repeated", pattern, mtp_pattern, "cuda"), 3, max_num_seqs=3, warm_up=True
        )


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["M*M-", "ME*E"])
def test_plain_twins_run_without_graphs(pattern, monkeypatch):
    monkeypatch.setenv(CHOICE, "reference")
    model = tiny_model("repeated", pattern, "*", "cuda")
    prompts = make_prompts()
    llm = make_llm(model, 3)
    assert llm.engine.executor.graphs is None
    assert generate(llm, prompts, greedy(8)) == [decode(model, p, 8) for p in prompts]


def test_many_batch_sizes_arrivals_and_null_rows(device):
    """Requests that end at different times: batch sizes from 11 down to 1, null rows beside them,
    chunks between."""
    model = tiny_model(device=device)
    prompts = make_prompts((*PROMPT_LENGTHS, 2, 3, 5, 7, 13, 17))
    llm = graphed(model, 3, prompts, max_num_batched_tokens=48)
    params = [greedy(3 + 2 * index) for index in range(len(prompts))]
    engine = llm.engine
    for prompt, one in zip(prompts, params, strict=True):
        engine.add_request(prompt, one)
    finished = {}
    while engine.has_unfinished:
        poison_null(engine)
        finished |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
        engine.scheduler.check_integrity()
    for index, prompt in enumerate(prompts):
        assert finished[str(index)] == decode(model, prompt, params[index].max_tokens)


def poison_null(engine) -> None:
    """The block that null rows own is NaN, and so is all state that no request holds."""
    if engine.executor.builder.device.type == "cuda":
        torch.cuda.synchronize()
    free = list(engine.scheduler.slots.free_ids)
    for state in engine.executor.states.all():
        for tensor in state.tensors.values():
            tensor[[-1] if state.unit == "block" else free] = math.nan


@pytest.mark.parametrize(
    ("heads", "mtp_pattern"), [("repeated", "*-"), ("distinct", "*-"), ("distinct", "M*")]
)
@pytest.mark.parametrize(
    "params", [greedy(8), penalised(8), penalised(8, temperature=0.9, seed=3, top_k=20)]
)
def test_null_rows_leave_all_state_as_it_is(device, heads, mtp_pattern, params):
    """Five requests in a bucket of eight, then nine in one of twelve: the slots that are free stay
    as they are."""
    model = tiny_model(heads, mtp_pattern=mtp_pattern, device=device)
    for count in (5, 9):
        llm = graphed(model, 3, make_prompts(range(2, 2 + count)), max_num_seqs=16)
        engine = llm.engine
        rows = slice(count, 16)
        for tensor in states_of(engine):
            tensor[:16].fill_(7)
        before = [tensor[rows].clone() for tensor in states_of(engine)]
        generate(llm, make_prompts(range(2, 2 + count)), params, poison=False)
        assert bucket_size(count) > count and engine.executor.graphs._graphs
        assert all(
            torch.equal(tensor[rows], old)
            for tensor, old in zip(states_of(engine), before, strict=True)
        )
        # null rows begin anew in each step
        assert int(engine.executor.state.num_computed[-1]) <= 1 + 3


def test_sampling_in_a_graph_equals_sampling_outside(device):
    model = tiny_model(device=device)
    prompts = make_prompts()
    params = SamplingParams(
        temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=5, max_tokens=16, ignore_eos=True
    )
    eager = make_llm(model, 3, enforce_eager=True, async_scheduling=False)
    want = generate(eager, prompts, params, poison=False)
    assert generate(graphed(model, 3, prompts), prompts, params, poison=False) == want
    assert generate(graphed(model, 0, prompts), prompts, params, poison=False) == want


def test_preemption_under_graphs(device):
    model = tiny_model(device=device)
    prompts = make_prompts()
    llm = make_llm(model, 3, block_size=2, num_blocks=30)
    assert generate(llm, prompts) == [decode(model, p, 20) for p in prompts]
    assert llm.stats().preemptions > 0


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float16"])
def test_bf16_models_decode_with_state_in_any_dtype(state_dtype):
    """Prompts in chunks, which hand the state on; the first tokens are those of fp32 up to near
    ties."""
    exact = tiny_model(device="cuda")
    model = build_model(exact.mtpkit_config, dtype=torch.bfloat16, device="cuda", seed=1)
    prompts = make_prompts()
    llm = make_llm(model, 3, state_dtype=state_dtype, max_num_batched_tokens=16, max_num_seqs=4)
    tokens = generate(llm, prompts, greedy(4))
    same = [a[0] == decode(exact, p, 1)[0] for a, p in zip(tokens, prompts, strict=True)]
    assert all(len(t) == 4 for t in tokens) and sum(same) >= len(prompts) - 1


def test_each_k_and_kind_of_sampling_has_its_graph(device):
    """One engine: K changes from step to step, and greedy batches, drawn ones and greedy ones again
    follow another."""
    model = tiny_model(device=device)
    prompts = make_prompts()
    drawn = SamplingParams(
        temperature=0.9, top_k=20, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True
    )
    want = generate(make_llm(model, 0, enforce_eager=True), prompts, drawn, poison=False)
    llm = make_llm(model, 3, num_blocks=400)
    turns = itertools.cycle([3, 0, 1, 3, 2])
    llm.engine.speculation.choose = lambda rows: next(turns)
    for params in (greedy(MAX_TOKENS), drawn, greedy(MAX_TOKENS)):
        exact = (
            want if params is drawn else [decode(model, prompt, MAX_TOKENS) for prompt in prompts]
        )
        assert generate(llm, prompts, params, poison=False) == exact
    keys = {(shape.drafts, use) for shape, use in llm.engine.executor.graphs._graphs}
    assert keys == {
        (k, use) for k in range(4) for use in (GREEDY, for_graph(frozenset({"temperature"})))
    }


TURNS = [
    penalised(20),
    greedy(18),
    penalised(20, temperature=0.9, seed=3, top_p=0.9),
    SamplingParams(temperature=0.8, seed=4, max_tokens=15, ignore_eos=True),
]


@functools.cache
def without_graphs(model) -> list[list[int]]:
    """The output of each prompt with one of `TURNS`, decoded without drafts, eagerly, in an engine
    of its own."""
    outputs = []
    for prompt, one in zip(make_prompts(), itertools.cycle(TURNS), strict=False):
        llm = make_llm(model, 0, enforce_eager=True, async_scheduling=False)
        outputs.append(llm.generate(prompt, one)[0].outputs[0].token_ids)
    return outputs


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 24}, {"block_size": 2, "num_blocks": 40}]
)
@pytest.mark.parametrize(("heads", "k"), [("repeated", 0), ("repeated", 3), ("distinct", 3)])
def test_penalties_in_graphs(device, heads, k, settings):
    """Requests with penalties, greedy and drawn, beside requests without; then all in slots that
    others had."""
    model = tiny_model(heads, device=device)
    prompts = make_prompts()
    params = list(itertools.islice(itertools.cycle(TURNS), len(prompts)))
    want = without_graphs(model)
    assert want[0] != decode(model, prompts[0], 20)
    llm = graphed(model, k, prompts, **settings)
    if k:  # some drafts are right: slots are given to prompts in their order
        truth = [prompt + tokens for prompt, tokens in zip(prompts, want, strict=True)]
        llm.engine.executor.drafter = TruthOnDevice(
            llm.engine.executor.drafter.inner, truth, device
        )
    for _ in range(2):
        outputs = llm.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in outputs] == want
    uses = {use for _, use in llm.engine.executor.graphs._graphs}
    assert any("penalties" in use for use in uses)
    assert not k or llm.stats().acceptance.accepted > 10
    assert (llm.stats().preemptions > 0) == ("num_blocks" in settings)


def test_penalties_get_graphs_of_their_own(device):
    """Greedy and drawn rows, with and without: four kinds of graphs, each captured when it is
    needed first."""
    model = tiny_model(device=device)
    prompts = make_prompts((4, 9))
    llm = make_llm(model, 2)
    shaped = for_graph(frozenset({"temperature"}))
    seen: set[frozenset[str]] = set()
    for params, use in (
        (greedy(6), GREEDY),
        (penalised(6), frozenset({"penalties"})),
        (penalised(6, temperature=1.0, seed=1), shaped | {"penalties"}),
        (SamplingParams(temperature=1.0, seed=1, max_tokens=6, ignore_eos=True), shaped),
    ):
        llm.generate(prompts, params)
        seen.add(use)
        assert {
            use for shape, use in llm.engine.executor.graphs._graphs if not shape.chunk_rows
        } == seen


@pytest.mark.parametrize(("heads", "mtp_pattern"), HEADS)
def test_drafts_in_graphs_are_those_outside(device, heads, mtp_pattern):
    """Acceptance is that of eager decoding: a stale tail or state would cost drafts without
    changing a token."""
    model = tiny_model(heads, mtp_pattern=mtp_pattern, device=device)
    prompts = make_prompts((1, 2, 4, 9, 21))
    k = min(3, most_drafts(model))
    accepted = []
    for settings in ({"enforce_eager": True, "async_scheduling": False}, {}):
        llm = make_llm(model, k, num_blocks=400, **settings)
        assert (llm.engine.executor.graphs is None) == bool(settings)
        assert generate(llm, prompts, greedy(60), poison=False) == [
            decode(model, p, 60) for p in prompts
        ]
        accepted.append((llm.stats().acceptance.steps, llm.stats().acceptance.accepted_per_depth))
    assert accepted[0] == accepted[1]


@pytest.mark.parametrize(("heads", "mtp_pattern"), HEADS)
def test_auto_under_graphs(device, heads, mtp_pattern):
    """Step times are measured, and steps of any K leave the caches of all depths true for the
    next."""
    model = tiny_model(heads, mtp_pattern=mtp_pattern, device=device)
    prompts = make_prompts()
    llm = make_llm(model, "auto", num_blocks=400)
    assert llm.engine.executor.graphs is not None and llm.engine.speculation.step_times
    turns = itertools.cycle(
        min(k, llm.engine.config.num_speculative_tokens) for k in (3, 0, 1, 3, 2, 0, 0)
    )
    llm.engine.speculation.choose = lambda rows: next(turns)
    assert generate(llm, prompts, greedy(MAX_TOKENS)) == [
        decode(model, p, MAX_TOKENS) for p in prompts
    ]


@pytest.mark.parametrize(
    ("heads", "tree"),
    [
        ("repeated", dict(speculative_eagle_topk=2)),
        ("distinct", dict(speculative_token_tree=[2, 1])),
    ],
)
def test_auto_with_trees_under_graphs(device, heads, tree):
    """Steps of trees and of chains of every K are captured before the first request."""
    model = tiny_model(heads, distinct=2, device=device)
    prompts = make_prompts((1, 9))
    sizes = dict(max_num_seqs=2, max_num_batched_tokens=16, num_blocks=400)
    llm = make_llm(model, "auto", warm_up=True, **sizes, **tree)
    captured = set(llm.engine.executor.graphs._graphs)
    shapes = llm.engine.draft_shapes
    assert {shape.drafts for shape, _ in captured} == set(shapes) and len(shapes) == 4
    turns = itertools.cycle(shapes[at] for at in (3, 3, 0, 3, 2, 2, 1, 3, 3, 0))
    llm.engine.speculation.choose = lambda rows: next(turns)
    assert generate(llm, prompts, greedy(MAX_TOKENS)) == [
        decode(model, p, MAX_TOKENS) for p in prompts
    ]
    assert set(llm.engine.executor.graphs._graphs) == captured


@pytest.mark.parametrize("k", [0, 3])
def test_a_request_of_the_full_length_beside_short_ones(device, k):
    """The widest block table that there may be, and stale columns of it under shorter tables
    afterwards."""
    model = tiny_model(device=device)
    prompts = [make_prompts((104,))[0], *make_prompts((3, 30))]
    llm = graphed(model, k, prompts)
    want = [decode(model, prompt, MAX_TOKENS) for prompt in prompts]
    assert len(prompts[0]) + MAX_TOKENS == llm.engine.config.max_model_len
    for _ in range(2):
        assert generate(llm, prompts, greedy(MAX_TOKENS), poison=False) == want
        assert generate(llm, prompts[1:2], greedy(MAX_TOKENS), poison=False) == want[1:2]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize(("k", "temperature"), [(0, 0.0), (3, 0.0), (3, 0.9)])
def test_a_request_of_nan_ends_with_an_error_and_leaves_nothing(
    device, k, temperature, rollback, eager
):
    """One token's embedding is NaN. Others in the same steps, and those that get its slot and
    blocks, do not notice."""
    prompts = make_prompts()
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=MAX_TOKENS, ignore_eos=True)
    settings = {
        "enforce_eager": eager,
        "state_rollback": rollback,
        "max_num_seqs": 3,
        "num_blocks": 60,
    }
    want = generate(
        make_llm(tiny_model(device=device), 0, **settings), prompts, params, poison=False
    )
    bad = next(
        token
        for token in range(20, VOCAB_SIZE)
        if all(token not in tokens for tokens in (*want, *prompts))
    )
    # attention multiplies what a query does not see by zero: a fed draft of NaN would break its own
    # request
    if k:
        settings["draft_vocab"] = [token for token in range(VOCAB_SIZE) if token != bad]
    model = build_model(tiny_model().mtpkit_config, device=device, seed=1)
    with torch.no_grad():
        model.embedding.word_embeddings.weight[bad] = math.nan
    llm = make_llm(model, k, **settings)
    assert llm.engine.config.async_scheduling and (llm.engine.executor.graphs is None) == eager
    mixed = [[bad], prompts[0], [1, 2, bad, 4], prompts[1], [*range(20), bad], prompts[2]]
    outputs = llm.generate(mixed, params)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"] * 3
    assert [output.outputs[0].token_ids for output in outputs[1::2]] == want[:3]
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == want
    llm.engine.scheduler.check_integrity()


def test_everything_is_captured_before_the_first_request(device):
    """Prompts, mixed steps and decode steps of all sizes, greedy and drawn: nothing is left to
    capture."""
    model = tiny_model(device=device)
    prompts = make_prompts()
    llm = make_llm(model, 3, warm_up=True, max_num_batched_tokens=40, max_num_seqs=6)
    captured = set(llm.engine.executor.graphs._graphs)
    drawn = SamplingParams(
        temperature=0.9, top_k=20, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True
    )
    params = [drawn, greedy(7), drawn, greedy(9), greedy(MAX_TOKENS)]
    outputs = llm.generate([*prompts, *prompts], [*params, *params])
    for output, one in zip(outputs, params, strict=False):
        if one is not drawn:
            prompt = list(output.prompt_token_ids)
            assert output.outputs[0].token_ids == decode(model, prompt, one.max_tokens)
    assert set(llm.engine.executor.graphs._graphs) == captured


def test_auto_captures_each_k(device):
    llm = make_llm(
        tiny_model(device=device), "auto", warm_up=True, max_num_seqs=2, max_num_batched_tokens=16
    )
    captured = set(llm.engine.executor.graphs._graphs)
    assert {shape.drafts for shape, _ in captured} == set(
        range(llm.engine.config.num_speculative_tokens + 1)
    )
    turns = itertools.cycle((2, 0, 1))
    llm.engine.speculation.choose = lambda rows: next(turns)
    llm.generate(make_prompts((3,)), greedy(12))
    assert set(llm.engine.executor.graphs._graphs) == captured


@pytest.mark.parametrize("k", [0, 3])
def test_block_tables_name_no_block_of_another_request(device, k):
    """After every step, all entries behind a row's own blocks name the null block, whatever rows
    came before."""
    model = tiny_model("distinct", device=device)
    llm = make_llm(model, k, block_size=2, num_blocks=400, max_num_seqs=6, async_scheduling=False)
    graphs = llm.engine.executor.graphs
    fill = llm.engine.executor.graphs._fill
    wider = 0

    def filled(shape, numbers, tables):
        nonlocal wider
        fill(shape, numbers, tables)
        rest = graphs._tables[: shape.rows, tables.shape[1] :]
        assert (rest == graphs.null_block).all()
        wider = max(wider, tables.shape[1])

    graphs._fill = filled
    prompts = make_prompts((40, 1, 30, 2, 1, 1))
    for given in (prompts[:3], prompts[3:], prompts[1:2], prompts):
        generate(llm, given, greedy(6), poison=False)
    assert wider >= 20
