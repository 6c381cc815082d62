"""A step ahead of the host: what decides a step lies on the device, whatever the heads and the
penalties.

On a CPU this is the data flow of CUDA graphs, see `test_graphs`.
"""

import functools

import pytest

from mtpkit.engine import SamplingParams
from tests.engine.tiny import (
    decode,
    generate,
    greedy,
    guide,
    make_llm,
    make_prompts,
    penalised,
    tiny_model,
)

PROMPTS = make_prompts()
HEADS = [
    ("repeated", "*-", 3),
    ("distinct", "*-", 3),
    ("distinct", "*-", 2),
    ("repeated", "M-", 3),
    ("distinct", "M-", 3),
    ("distinct", "*M", 2),
]
SETTINGS = [
    {},
    {"max_num_batched_tokens": 10},
    {"block_size": 2, "num_blocks": 30},  # K >= block size, with preemptions
    {"block_size": 1, "num_blocks": 90, "max_num_batched_tokens": 5, "max_num_seqs": 3},
    {"state_rollback": "snapshot", "max_num_seqs": 2},
]
MIXED = [
    penalised(20),
    greedy(18),
    penalised(20, temperature=0.9, seed=3, top_p=0.9),
    SamplingParams(temperature=0.8, seed=4, max_tokens=15, ignore_eos=True),
    penalised(16, repetition_penalty=1.0, presence_penalty=-1.5, temperature=1.2, seed=9, top_k=20),
]


class Words:
    """Numbers as text."""

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(f"{token_id} " for token_id in token_ids)


@functools.cache
def mixed_alone(heads: str) -> list[list[int]]:
    """Outputs of `MIXED`, which do not depend on an engine's settings."""
    return alone(tiny_model(heads), MIXED)


def alone(model, params) -> list[list[int]]:
    """The output of each prompt decoded without drafts, in an engine of its own, each step after
    the last's results."""
    outputs = []
    for prompt, one in zip(PROMPTS, params, strict=True):
        llm = make_llm(model, 0, tokenizer=Words(), async_scheduling=False)
        outputs.append(llm.generate(prompt, one)[0].outputs[0].token_ids)
    return outputs


def ahead(model, k: int, longest: list[list[int]], **settings):
    """An engine a step ahead of the host, a part of whose drafts continues `longest` outputs."""
    llm = make_llm(model, k, async_scheduling=True, tokenizer=Words(), **settings)
    assert llm.engine.config.async_scheduling
    return guide(
        llm, PROMPTS, truth=[p + tokens for p, tokens in zip(PROMPTS, longest, strict=True)]
    )


def run_all(llm, params) -> list[list[int]]:
    """Outputs of all prompts at once, with slots and blocks that nobody holds broken before each
    step."""
    one = iter(params)
    ids = [llm.engine.add_request(prompt, next(one)) for prompt in PROMPTS]
    finished = {}
    while llm.engine.has_unfinished:
        finished |= {output.request_id: output for output in llm.engine.step() if output.finished}
        llm.engine.scheduler.check_integrity()
    return [finished[request_id].outputs[0].token_ids for request_id in ids]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("heads", "mtp_pattern", "k"), HEADS)
def test_greedy_output_is_that_of_plain_decoding(heads, mtp_pattern, k, settings):
    model = tiny_model(heads, mtp_pattern=mtp_pattern)
    llm = guide(make_llm(model, k, async_scheduling=True, **settings), PROMPTS)
    assert generate(llm, PROMPTS) == [decode(model, prompt, 20) for prompt in PROMPTS]
    assert all(0 < rate < 1 for rate in llm.stats().conditional_acceptance)
    assert (llm.stats().preemptions > 0) == (settings.get("num_blocks") == 30)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("heads", "k"), [("repeated", 0), ("repeated", 3), ("distinct", 3)])
def test_penalised_output_is_that_of_plain_decoding(heads, k, settings):
    """Requests with penalties, greedy and drawn, beside requests without."""
    model = tiny_model(heads)
    want = mixed_alone(heads)
    assert want[0] != decode(model, PROMPTS[0], 20)
    llm = ahead(model, k, want, **settings)
    assert run_all(llm, MIXED) == want
    assert run_all(llm, MIXED) == want  # in slots that others had
    if k:
        assert llm.stats().acceptance.accepted > 10
    assert (llm.stats().preemptions > 0) == (settings.get("num_blocks") == 30)


@pytest.mark.parametrize(("heads", "k"), [("repeated", 3), ("distinct", 3)])
def test_what_ends_a_request_inside_its_drafts(heads, k):
    """Stop tokens and stop strings are seen a step late; counts and earlier positions of the next
    one are its own."""
    model = tiny_model(heads)
    whole = alone(model, [penalised(24)] * len(PROMPTS))
    params = [
        penalised(24, stop_token_ids=[tokens[n]]) if n % 2 else penalised(24, stop=f" {tokens[n]} ")
        for tokens, n in zip(whole, (7, 8, 9, 10, 11), strict=True)
    ]
    want = alone(model, params)
    assert all(
        len(short) < 24 and short == tokens[: len(short)]
        for short, tokens in zip(want, whole, strict=True)
    )
    llm = ahead(model, k, whole, max_num_seqs=2)
    assert run_all(llm, params) == want
    assert run_all(llm, MIXED) == mixed_alone(heads)


@pytest.mark.parametrize("heads", ["repeated", "distinct"])
def test_drawn_drafts_do_not_depend_on_when_the_host_looks(heads):
    model = tiny_model(heads)
    params = [penalised(14, temperature=0.8, seed=index) for index in range(len(PROMPTS))]
    settings = {"draft_sampling": True, "max_num_batched_tokens": 12, "max_num_seqs": 3}
    together, later = (
        make_llm(model, 3, async_scheduling=wait, **settings) for wait in (False, True)
    )
    assert run_all(together, params) == run_all(later, params)
    assert together.stats().acceptance == later.stats().acceptance
