"""A request whose logits become NaN or infinite ends with an error that names it, and nobody else
notices."""

import math
import re

import pytest
import torch

from mtpkit.engine import SamplingParams
from mtpkit.engine.requests.request import RequestError, require_whole
from mtpkit.engine.requests.tree import parse_tree
from mtpkit.engine.scheduling.adaptive import AdaptiveSpeculation
from mtpkit.engine.steps.plan import Drafts
from mtpkit.kernels import NO_TOKEN
from mtpkit.model import build_model
from tests.engine.fakes import HashModel, extend_hash, fake_engine, run
from tests.engine.planned import planned_rows
from tests.engine.tiny import (
    VOCAB_SIZE,
    decode,
    generate,
    greedy,
    headless_model,
    make_llm,
    make_prompts,
    tiny_model,
)
from tests.shared import covering

BROKEN = {"nan": math.nan, "inf": math.inf, "masked": -math.inf}
PROMPTS = {"doomed": [3, 1, 4], "a": [1], "b": [2, 7, 1, 8, 2, 8], "c": [5, 5], "d": [9, 2, 6, 5]}


class BreakingModel(HashModel):
    """Logits after some histories are broken."""

    def __init__(self) -> None:
        super().__init__()
        self.breaks: dict[int, float] = {}

    def break_after(self, tokens: list[int], value: float) -> None:
        key = 0
        for token_id in tokens:
            key = extend_hash(key, token_id)
        self.breaks[key] = value

    def logits(self, values: list[int]) -> torch.Tensor:
        rows = super().logits(values)
        for row, key in enumerate(values):
            if key in self.breaks:
                rows[row, 3 if self.breaks[key] != -math.inf else slice(None)] = self.breaks[key]
        return rows

    def next_token(self, token_ids: list[int]) -> int:
        return HashModel().next_token(token_ids)


def params_of(name: str, temperature: float, max_tokens: int = 20, **settings) -> SamplingParams:
    seed = sorted(PROMPTS).index(name)
    return SamplingParams(
        temperature=temperature, max_tokens=max_tokens, seed=seed, ignore_eos=True, **settings
    )


def serve(engine, temperature: float, **settings) -> dict:
    for name, prompt in PROMPTS.items():
        engine.add_request(prompt, params_of(name, temperature, **settings), name)
    return run(engine)


DRAFTS = ((0, "never"), (1, "sometimes"), (2, "always"), (3, "always"), (3, "sometimes"))


# One step sees the value, another that it broke, and a third what became of it: no more than three
# of these matter.
@pytest.mark.parametrize(
    ("after", "value", "temperature", "drafts", "ahead"),
    covering((0, 1, 6), BROKEN, (0.0, 0.8), DRAFTS, (False, True), meet=3),
)
def test_one_request_breaks_and_the_others_go_on(after, value, temperature, drafts, ahead):
    """More requests than slots, so that the broken one's slot and blocks are used again."""
    k, drafts = drafts
    model = BreakingModel()
    want = {
        name: model.decode(prompt, params_of(name, temperature)) for name, prompt in PROMPTS.items()
    }
    model.break_after(PROMPTS["doomed"] + want["doomed"][:after], BROKEN[value])
    engine = fake_engine(
        model,
        drafts,
        num_speculative_tokens=k,
        async_scheduling=ahead,
        max_num_seqs=2,
        num_blocks=24,
    )
    finished = serve(engine, temperature)
    engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.size

    doomed = finished.pop("doomed")
    completion = doomed.outputs[0]
    assert (completion.token_ids, completion.finish_reason) == (want.pop("doomed")[:after], "error")
    assert doomed.error == completion.error and doomed.error.startswith(
        f"request doomed: the logits for position {3 + after}, after {after} output tokens, are NaN"
        " or infinite"
    )
    assert {name: output.outputs[0].token_ids for name, output in finished.items()} == want
    assert all(
        o.outputs[0].finish_reason == "length" and o.error is None for o in finished.values()
    )

    stats = doomed.stats
    total = engine.stats().acceptance
    # the prompt gives the first token, each step 1 + accepted
    assert stats.steps + stats.accepted <= max(0, after - 1)
    assert stats.drafted == k * stats.steps
    for name in ("steps", "drafted", "accepted"):
        assert getattr(total, name) == sum(
            getattr(o.stats, name) for o in (doomed, *finished.values())
        )
    assert engine.stats().generated_tokens == after + 20 * len(finished)


def test_logits_after_a_rejected_draft_do_not_matter():
    model = BreakingModel()
    want = {name: model.decode(prompt, params_of(name, 0.0)) for name, prompt in PROMPTS.items()}
    for name, prompt in PROMPTS.items():
        for end in range(20):
            wrong = [*prompt, *want[name][:end], (want[name][end] + 1) % model.vocab_size]
            model.break_after(wrong, math.nan)
    engine = fake_engine(model, "never", num_speculative_tokens=2)
    assert {
        name: output.outputs[0].token_ids for name, output in serve(engine, 0.0).items()
    } == want


def test_tokens_that_end_the_request_come_before_the_error():
    """All drafts are right and the logits after the third token are broken, but that token ends the
    request."""
    model = BreakingModel()
    full = model.decode(PROMPTS["doomed"], params_of("doomed", 0.0))
    model.break_after(PROMPTS["doomed"] + full[:3], math.nan)
    for settings, reason in (
        ({"max_tokens": 3}, "length"),
        ({"stop_token_ids": [full[2]]}, "stop"),
    ):
        engine = fake_engine(model, "always", num_speculative_tokens=3)
        output = serve(engine, 0.0, **settings)["doomed"]
        assert output.outputs[0].finish_reason == reason and output.error is None


@pytest.mark.parametrize("ahead", [False, True])
def test_what_a_broken_request_accepts_moves_no_k(ahead):
    """Neither in the step that broke, nor in the one that was under way by then."""
    model = BreakingModel()
    want = model.decode(PROMPTS["doomed"], params_of("doomed", 0.0))
    model.break_after(PROMPTS["doomed"] + want[:5], math.nan)
    engine = fake_engine(model, "always", num_speculative_tokens=3, async_scheduling=ahead)
    seen = []
    engine.speculation.observe = lambda accepted, fresh, rates: seen.extend(
        zip(accepted, fresh, strict=True)
    )
    engine.add_request(PROMPTS["doomed"], params_of("doomed", 0.0), "doomed")
    output = run(engine)["doomed"]
    assert output.error and seen == [(3, 3)] and output.stats.steps == 1


def test_penalties_and_temperatures_of_any_size_are_no_error():
    model = HashModel()
    for repetition, temperature in (
        (1e-44, 0.0),
        (1e-40, 1.0),
        (3e38, 0.5),
        (1.5, 1e-5),
        (1.0, 3e38),
        (1.0, 2e-5),
    ):
        engine = fake_engine(model, num_speculative_tokens=2)
        outputs = serve(engine, temperature, repetition_penalty=repetition, frequency_penalty=2.0)
        assert all(output.outputs[0].finish_reason == "length" for output in outputs.values())


class BadDrafts:
    """A drafter whose heads break at a depth for the requests that know a token sequence."""

    def __init__(self, inner, depth: int) -> None:
        self.inner = inner
        self.depth = depth

    def draft(self, hidden, batch, verdict) -> Drafts:
        token_ids = self.inner.draft(hidden, batch, verdict).token_ids.clone()
        for row, planned in enumerate(planned_rows()[: batch.shape.sampling_rows]):
            known = self.inner.known._by_slot[int(batch.inputs.state_slots[row])]
            if planned.request.request_id == "doomed" and len(known) >= 7:
                token_ids[row, self.depth - 1 :] = NO_TOKEN
        return Drafts(token_ids)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_heads_that_break_end_the_request_after_its_own_tokens(depth, ahead):
    model = HashModel()
    want = {name: model.decode(prompt, params_of(name, 0.0)) for name, prompt in PROMPTS.items()}
    engine = fake_engine(
        model, "sometimes", num_speculative_tokens=3, async_scheduling=ahead, max_num_seqs=2
    )
    engine.executor.drafter = BadDrafts(engine.executor.drafter, depth)
    finished = serve(engine, 0.0)
    doomed = finished.pop("doomed").outputs[0]
    count = len(doomed.token_ids)
    assert (
        doomed.finish_reason == "error"
        and 4 <= count < 20
        and doomed.token_ids == want.pop("doomed")[:count]
    )
    told = re.match(
        r"request doomed: draft (\d+) for position (\d+), after (\d+) output tokens, has logits",
        doomed.error,
    )
    assert told and "MTP heads" in doomed.error
    number, position, made = map(int, told.groups())
    assert (number, position) == (depth, 2 + made + depth)
    # The first draft counts at once, a later one as soon as all before it and the base's next
    # choice are in the output.
    assert count == made if depth == 1 else count >= made + depth
    assert {name: output.outputs[0].token_ids for name, output in finished.items()} == want


class BadAfterPreemption(BadDrafts):
    """A drafter whose heads break where a preempted request is computed anew."""

    def draft(self, hidden, batch, verdict) -> Drafts:
        token_ids = self.inner.draft(hidden, batch, verdict).token_ids.clone()
        again = [not row.emits for row in planned_rows()[: batch.shape.sampling_rows]]
        token_ids[torch.tensor(again, dtype=torch.bool), self.depth - 1 :] = NO_TOKEN
        return Drafts(token_ids)


@pytest.mark.parametrize("ahead", [False, True])
def test_heads_that_break_after_a_preemption_end_the_request_too(ahead):
    """The step that computes its tokens anew chooses none, but drafts for the next one."""
    model = HashModel()
    blocks = {"num_blocks": 16, "block_size": 2}
    want = {name: model.decode(prompt, params_of(name, 0.0)) for name, prompt in PROMPTS.items()}
    engine = fake_engine(
        model, "sometimes", num_speculative_tokens=3, async_scheduling=ahead, **blocks
    )
    engine.executor.drafter = BadAfterPreemption(engine.executor.drafter, 1)
    finished = serve(engine, 0.0)
    engine.scheduler.check_integrity()
    preempted = {name for name, output in finished.items() if output.stats.preemptions}
    assert 0 < len(preempted) < len(PROMPTS)
    for name, output in finished.items():
        count = len(output.outputs[0].token_ids)
        assert output.outputs[0].token_ids == want[name][:count]
        assert (output.outputs[0].finish_reason == "error", count < 20) == (name in preempted,) * 2
        where = (
            f"request {name}: draft 1 for position {len(PROMPTS[name]) + count}, after {count}"
            " output tokens"
        )
        assert output.error is None or output.error.startswith(where)


class NoSecondDepth:
    """A drafter of trees whose heads find no draft of depth 2 after the first draft, the only one
    with children."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def draft(self, hidden, batch, verdict) -> Drafts:
        drafts = self.inner.draft(hidden, batch, verdict)
        for tensor in (drafts.token_ids[:, 2:], drafts.best[:, 1:]):
            tensor[:] = NO_TOKEN
        return drafts


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("rule", ["never", "always"])
def test_drafts_below_a_sibling_that_the_base_rejects_have_no_effect(rule, ahead):
    """The second draft of depth 1, which is right where the first one is not, has no children."""
    model = HashModel()
    tree = dict(tree=parse_tree([[0], [1], [0, 0]]), num_speculative_tokens=2)
    engine = fake_engine(model, rule, async_scheduling=ahead, **tree)
    engine.executor.drafter = NoSecondDepth(engine.executor.drafter)
    for name, output in serve(engine, 0.0).items():
        want = model.decode(PROMPTS[name], params_of(name, 0.0))
        tokens = output.outputs[0].token_ids
        assert output.stats.accepted_per_depth[0] == output.stats.steps
        if rule == "never":
            assert output.error is None and tokens == want
        else:
            assert "draft 2 for position" in output.error and tokens == want[: len(tokens)]


def broken_model(
    name: str,
    index=slice(None),
    value: float = math.nan,
    heads: str = "repeated",
    device: str = "cpu",
):
    """The tiny model with a weight that is not finite."""
    model = build_model(tiny_model(heads).mtpkit_config, device=device, seed=1)
    with torch.no_grad():
        dict(model.named_parameters())[name][index] = value
    return model


EMBEDDING = "embedding.word_embeddings.weight"
PROMPT_IDS = make_prompts()
MODES = [
    (0, "repeated", {}),
    (1, "repeated", {"state_rollback": "snapshot"}),
    (2, "repeated", {}),
    (3, "repeated", {"async_scheduling": True}),
    (3, "repeated", {"state_rollback": "snapshot", "draft_sampling": True}),
    (3, "repeated", {"synthetic_acceptance": [0.8, 0.8, 0.8]}),
    (3, "distinct", {}),
    (2, "distinct", {"draft_sampling": True, "state_rollback": "snapshot"}),
]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("k", "heads", "settings"), MODES)
def test_a_request_of_nan_leaves_nothing_in_its_slot_or_blocks(k, heads, settings, temperature):
    """One token's embedding is NaN. The requests that have it break beside the others, in the same
    chunks and steps; those that come after them into the same slots and blocks give what an engine
    gives that saw none of it."""
    sampling = SamplingParams(temperature=temperature, max_tokens=14, seed=3, ignore_eos=True)
    settings = {
        "max_num_seqs": 3,
        "num_blocks": 40,
        "block_size": 4,
        "max_num_batched_tokens": 16,
        **settings,
    }
    first = make_llm(
        tiny_model(heads), 0, **{**settings, "draft_sampling": False, "synthetic_acceptance": None}
    )
    seen = {
        token
        for output in first.generate(PROMPT_IDS, sampling)
        for token in output.outputs[0].token_ids
    }
    # most drafts change no token: it is the first
    for bad in sorted(range(20, VOCAB_SIZE), key=seen.__contains__):
        plain = make_llm(tiny_model(heads), k, **settings)
        want = [output.outputs[0].token_ids for output in plain.generate(PROMPT_IDS, sampling)]
        if all(bad not in tokens for tokens in (*want, *PROMPT_IDS)):
            break
    llm = make_llm(broken_model(EMBEDDING, bad, heads=heads), k, **settings)
    doomed = [[bad], [1, 2, bad, 4, 5, 6, 7, 8, 9], [*range(20), bad]]
    mixed = [prompt for pair in zip(doomed, PROMPT_IDS[:3], strict=True) for prompt in pair]
    outputs = llm.generate(mixed, sampling)
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length"] * 3
    assert [o.outputs[0].token_ids for o in outputs[1::2]] == want[:3]
    for output in outputs[::2]:
        assert not output.outputs[0].token_ids and f"request {output.request_id})" in output.error
    assert any(
        t.isnan().any()
        for state in llm.engine.executor.states.all()
        for t in state.tensors.values()
    )
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPT_IDS, sampling)] == want
    llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize(
    "settings", [{}, {"state_rollback": "snapshot"}, {"async_scheduling": False}]
)
@pytest.mark.parametrize("k", [0, 1, 3])
def test_requests_break_at_the_token_that_breaks_them(k, settings, device):
    """After a token whose embedding is NaN, which most of them choose sooner or later; in replayed
    steps on a GPU."""
    prompts = make_prompts((1, 4, 8, 9, 21, 3, 6))
    want = [decode(tiny_model(device=device), prompt, 40) for prompt in prompts]
    bad = max(range(VOCAB_SIZE), key=lambda token: sum(token in tokens[3:30] for tokens in want))
    llm = make_llm(broken_model(EMBEDDING, bad, device=device), k, max_num_seqs=4, **settings)
    broke = 0
    for prompt, tokens, output in zip(
        prompts, want, llm.generate(prompts, greedy(40)), strict=True
    ):
        fed = [*prompt, *tokens[:-1]]
        count = max(0, fed.index(bad) + 1 - len(prompt)) if bad in fed else 40
        assert output.outputs[0].token_ids == tokens[:count]
        assert (output.error is not None) == (bad in fed)
        broke += count not in (0, 40)
    assert broke >= 2


@pytest.mark.parametrize(
    ("k", "settings"), [(0, {}), (3, {}), (3, {"draft_sampling": True}), (1, {"temperature": 1.0})]
)
@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("output_layer.weight", slice(None), math.nan),
        ("output_layer.weight", (7, 3), math.nan),
        ("decoder.layers.0.mixer.in_proj.weight", (0, 0), math.nan),
        ("decoder.final_norm.weight", slice(None), math.inf),
    ],
)
def test_weights_of_the_base_that_are_not_finite_fail_every_request(
    name, index, value, k, settings
):
    settings = dict(settings)
    params = SamplingParams(
        temperature=settings.pop("temperature", 0.0), max_tokens=8, ignore_eos=True
    )
    llm = make_llm(broken_model(name, index, value), k, **settings)
    outputs = llm.generate(PROMPT_IDS, params)
    for number, (prompt, output) in enumerate(zip(PROMPT_IDS, outputs, strict=True)):
        assert (output.finished, output.outputs[0].token_ids) == (True, [])
        assert output.error.startswith(
            f"prompts[{number}] (request {number}): the logits for position {len(prompt)}, "
        )
        assert "of the base" in output.error
    assert llm.stats().acceptance.steps == 0
    with pytest.raises(RequestError, match=r"^prompts\[0\] .*; likewise 4 more requests$"):
        require_whole(outputs)
    require_whole([])


@pytest.mark.parametrize(
    "name", ["mtp.layers.0.eh_proj.weight", "mtp.layers.0.final_layernorm.weight"]
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("draft_sampling", [False, True])
@pytest.mark.parametrize("k", [1, 3])
def test_heads_that_are_not_finite_are_an_error_that_names_them(
    name, k, draft_sampling, temperature
):
    params = SamplingParams(temperature=temperature, max_tokens=8, seed=1, ignore_eos=True)
    model = broken_model(name, 0)
    llm = make_llm(model, k, draft_sampling=draft_sampling)
    first = [
        o.outputs[0].token_ids[:1] for o in make_llm(tiny_model(), 0).generate(PROMPT_IDS, params)
    ]
    outputs = llm.generate(PROMPT_IDS, params)
    assert [o.outputs[0].token_ids for o in outputs] == first
    assert all("draft 1 " in o.error and "MTP heads are not finite" in o.error for o in outputs)
    assert llm.stats().acceptance.steps == 0
    # Nothing is drafted for, or the drafts are not used.
    assert make_llm(model, 0).generate(PROMPT_IDS, params)[0].error is None
    one = SamplingParams(temperature=0, max_tokens=1)
    assert [o.error for o in llm.generate(PROMPT_IDS, one)] == [None] * len(PROMPT_IDS)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "settings", [{}, {"draft_sampling": True}, {"speculative_token_tree": [2, 2, 1]}]
)
def test_a_broken_later_head_matters_once_the_draft_before_it_is_accepted(
    settings, temperature, device
):
    """Until then requests have the tokens of an engine without heads."""
    params = SamplingParams(temperature=temperature, max_tokens=12, seed=5, ignore_eos=True)
    model = broken_model("mtp.layers.1.final_layernorm.weight", heads="distinct", device=device)
    plain = make_llm(tiny_model("distinct", device=device), 0).generate(PROMPT_IDS, params)
    outputs = make_llm(model, 3, **settings).generate(PROMPT_IDS, params)

    for one, output in zip(plain, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        if temperature == 0 or not settings:
            assert tokens == one.outputs[0].token_ids[: len(tokens)]
        assert (output.error is None) == (len(tokens) == 12)
        assert output.error is None or "draft 2 for position" in output.error
        assert output.error is None or output.stats.accepted_per_depth[0] == 1
    assert any(output.error is None or len(output.outputs[0].token_ids) > 2 for output in outputs)


@pytest.mark.parametrize(
    "settings",
    [
        {"k": 3, "speculative_eagle_topk": 8, "speculative_num_draft_tokens": 20},
        {"k": None, "speculative_token_tree": [8, 1]},
    ],
)
def test_heads_need_not_read_every_draft_of_a_tree(settings, device):
    """One token breaks them, so this draft has no children, which does not end a request that has
    other drafts."""
    prompt, *_ = PROMPT_IDS
    want = decode(tiny_model(device=device), prompt, 8)
    for bad in (1, 60):
        assert bad not in (*prompt, *want)
        llm = make_llm(broken_model(EMBEDDING, bad, device=device), **settings)
        (output,) = llm.generate(prompt, greedy(8))
        assert output.error is None and output.outputs[0].token_ids == want


@pytest.mark.parametrize("tree", [[8, 2], [[0], [1], [2], [3], [0, 0], [1, 0], [2, 0], [3, 0]]])
def test_a_broken_later_head_matters_in_drawn_trees_too(tree, device):
    """No draft of its depth is tested, since their distribution is NaN."""
    model = broken_model("mtp.layers.1.final_layernorm.weight", heads="distinct", device=device)
    params = SamplingParams(temperature=3.0, max_tokens=40, seed=5, ignore_eos=True)
    settings = dict(speculative_token_tree=tree, draft_sampling=True)
    for output in make_llm(model, None, **settings).generate(PROMPT_IDS, params):
        assert output.error and "draft 2 for position" in output.error
        assert output.stats.accepted_per_depth[0] == 1


def test_a_stream_ends_the_broken_request_and_goes_on():
    prompts = [[1, 2], [5, 9, 3]]
    seen = {token for prompt in prompts for token in (*prompt, *decode(tiny_model(), prompt, 20))}
    bad = next(token for token in range(VOCAB_SIZE) if token not in seen)
    llm = make_llm(broken_model(EMBEDDING, bad), 0)
    last = {output.request_id: output for output in llm.stream([[bad], *prompts], greedy())}
    assert last["0"].finished and last["0"].outputs[0].finish_reason == "error"
    assert last["0"].error.startswith(
        "prompts[0] (request 0): the logits for position 1, after 0 output tokens,"
    )
    assert [last[name].outputs[0].token_ids for name in "12"] == [
        decode(tiny_model(), p, 20) for p in prompts
    ]


def test_adaptive_speculation_with_rows_that_broke():
    policy = AdaptiveSpeculation({(1, k): 1.0 for k in range(3)})
    before = policy.rates
    policy.observe([], [])
    assert policy.rates == before


def test_a_model_without_heads_breaks_likewise():
    model = headless_model()
    with torch.no_grad():
        model.output_layer.weight[3, 3] = math.nan
    llm = make_llm(model, 0)
    assert all(o.outputs[0].finish_reason == "error" for o in llm.generate(PROMPT_IDS, greedy()))
    assert generate(make_llm(headless_model(), 0), PROMPT_IDS[:1], greedy(3))
