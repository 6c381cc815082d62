"""Decoding under each rule of what heads read: the tokens are the base's, the drafts those of whole
sequences."""

import pytest

import mtpkit.model.mtp as recurrence
from mtpkit.errors import UserError
from tests.engine.replayed import replay_on_cpu
from tests.engine.tiny import (
    Recorder,
    decode,
    generate,
    greedy,
    guide,
    make_llm,
    make_prompts,
    record_drafts,
    ruled_model,
    teacher_forced_drafts,
    tiny_model,
)

PROMPTS = make_prompts((1, 2, 9))
TOKENS = 10
MOST = 4
BASE = {"reads_of_base": "before_final_norm"}
DEPTH = {"reads_of_depth": "before_final_norm"}
ZEROED = {"zero_first_embedding": True}
WINDOW = {"attention_window": 5, "attention_sinks": 2}
RULES = {
    "mimo": BASE | ZEROED,
    "glm": DEPTH | ZEROED,
    "deepseek": ZEROED,
    "all before": BASE | DEPTH,
    "window": WINDOW,
    "narrow": {"attention_window": MOST},
}
"""Those of vLLM for three families, and others."""
HEADS = [("repeated", "*-"), ("distinct", "*-"), ("distinct", "M*")]


def same_drafts(model, drafts) -> bool:
    """Whether drafts are those of whole sequences; which of these follow do not depend on K."""
    assert len(drafts) > 10
    return all(
        found == teacher_forced_drafts(model, known, MOST)[: len(found)]
        for known, found in drafts.items()
    )


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("heads", "mtp_pattern"), HEADS)
def test_tokens_and_drafts(heads, mtp_pattern, rules):
    """With prompts in chunks and with preemptions."""
    model = ruled_model(heads, mtp_pattern, **rules)
    want = [decode(model, prompt, TOKENS) for prompt in PROMPTS]
    preemptions = 0
    for k in range(MOST + 1):
        llm = make_llm(model, k, max_num_batched_tokens=k + 3, block_size=2, num_blocks=13)
        if not k:
            assert generate(llm, PROMPTS, greedy(TOKENS)) == want
            continue
        recorder = llm.engine.executor.drafter = Recorder(llm.engine.executor.drafter)
        assert generate(guide(llm, PROMPTS, TOKENS), PROMPTS, greedy(TOKENS)) == want
        assert same_drafts(model, recorder.drafts)
        preemptions += llm.stats().preemptions
    assert preemptions


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("heads", "mtp_pattern"), HEADS)
def test_each_rule_has_drafts_of_its_own(heads, mtp_pattern, rules):
    drafts = record_drafts(make_llm(ruled_model(heads, mtp_pattern, **rules), 3), PROMPTS, TOKENS)
    others = [{}, *(other for other in RULES.values() if other != rules)]
    assert not any(
        same_drafts(ruled_model(heads, mtp_pattern, **other), drafts) for other in others
    )


@pytest.mark.parametrize("heads", ["repeated", "distinct"])
def test_an_engine_may_give_heads_a_window(heads):
    """The drafts are those of heads with this window; by default it has four sinks."""
    for settings, window in [
        (dict(draft_attention_window=5, draft_attention_sinks=2), WINDOW),
        (dict(draft_attention_window=4), {"attention_window": 4, "attention_sinks": 4}),
    ]:
        model = ruled_model(heads)
        drafts = record_drafts(make_llm(model, 3, **settings), PROMPTS, TOKENS)
        assert same_drafts(ruled_model(heads, **window), drafts)
    # And may take one away.
    model = ruled_model(heads, **WINDOW)
    drafts = record_drafts(make_llm(model, 3, draft_attention_window=0), PROMPTS, TOKENS)
    assert same_drafts(ruled_model(heads), drafts)
    assert not same_drafts(ruled_model(heads, **WINDOW), drafts)


def test_windows_that_heads_cannot_have_are_refused():
    narrow = "num_speculative_tokens is 4, but the heads attend to the last 3 positions"
    with pytest.raises(UserError, match=narrow):
        make_llm(ruled_model("repeated"), 4, draft_attention_window=3)
    with pytest.raises(UserError, match="mtp_attention_window 8 is for layers of attention"):
        make_llm(tiny_model("repeated", "M-", "M-"), 2, draft_attention_window=8)


@pytest.mark.parametrize("heads", ["repeated", "distinct"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_steps_that_graphs_replay(heads, device, monkeypatch):
    if device == "cpu":
        replay_on_cpu(monkeypatch)
    model = ruled_model(heads, device=device, **BASE | DEPTH | ZEROED | WINDOW)
    runs = []
    for settings in ({"enforce_eager": True}, {}):
        llm = make_llm(model, 3, max_num_batched_tokens=6, **settings)
        assert bool(llm.engine.executor.graphs) == (not settings)
        runs.append((generate(llm, PROMPTS, poison=False), llm.stats().acceptance))
    assert runs[0] == runs[1] and runs[0][0] == [decode(model, prompt, 20) for prompt in PROMPTS]


def normed_after_all(monkeypatch, depth: int) -> None:
    """The engine's steps hand on the normed state of the base (0) or of depths."""
    forward = recurrence.mtp_forward

    def normed(model, number, hidden, *args, **kwargs):
        if bool(number - 1) == bool(depth):
            hidden = recurrence.normed_states(model, hidden, number - 1)
        return forward(model, number, hidden, *args, **kwargs)

    for kind in ("repeated", "distinct"):
        monkeypatch.setattr(f"mtpkit.engine.drafting.{kind}.mtp_forward", normed)


def keep_first_embedding(monkeypatch) -> None:
    """The engine's steps read the embedding at position 0 after all."""
    original = recurrence.mtp_input
    monkeypatch.setattr(recurrence, "mtp_input", lambda *args: original(*args[:-1], None))


@pytest.mark.parametrize(("heads", "mtp_pattern"), HEADS)
@pytest.mark.parametrize("forgotten", [False, True])
def test_a_first_embedding_that_is_read_is_seen(monkeypatch, heads, mtp_pattern, forgotten):
    model = ruled_model(heads, mtp_pattern, **ZEROED)
    if forgotten:
        keep_first_embedding(monkeypatch)
    drafts = record_drafts(make_llm(model, 3), PROMPTS, TOKENS)
    assert same_drafts(model, drafts) != forgotten


@pytest.mark.parametrize("heads", ["repeated", "distinct"])
@pytest.mark.parametrize("depth", [None, 0, 1])
def test_a_normed_state_in_place_of_the_other_is_seen(monkeypatch, heads, depth):
    model = ruled_model(heads, **BASE | DEPTH)
    if depth is not None:
        normed_after_all(monkeypatch, depth)
    drafts = record_drafts(make_llm(model, 3), PROMPTS, TOKENS)
    assert same_drafts(model, drafts) == (depth is None)
