"""What streamed outputs hold: all so far, what is new, or nothing before the end; and their
times."""

import time
from dataclasses import replace

import pytest

from mtpkit import SamplingParams
from mtpkit.engine import RequestOutputKind
from tests.engine.tiny import VOCAB_SIZE, make_llm, make_prompts, tiny_model

PROMPTS = make_prompts((1, 5, 9, 3))
PIECES = (b"a", b"\xe2\x82", b"\xac", b" z", b"\xc3", b"\xa9", b"bc")
"""Bytes of the tokens, in turn; some are parts of a character."""


class Tokenizer:
    """Texts of `PIECES`."""

    def encode(self, text: str) -> list[int]:
        raise AssertionError("prompts are token ids")

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        data = b"".join(PIECES[token_id % len(PIECES)] for token_id in token_ids)
        return data.decode(errors="replace")


def sampled(kind: RequestOutputKind, **settings) -> SamplingParams:
    """Drawn tokens, of which many are parts of a character."""
    known = dict(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    return SamplingParams(**known | settings, output_kind=kind)


def streams(k: int, params: SamplingParams, **settings) -> dict[str, list]:
    """All outputs of each request, in their order."""
    # Few blocks: requests are preempted, and go on where their text was.
    llm = make_llm(tiny_model(), k, **{"tokenizer": Tokenizer(), "num_blocks": 14} | settings)
    found: dict[str, list] = {}
    for output in llm.stream(PROMPTS, params):
        found.setdefault(output.request_id, []).append(output)
    if "num_blocks" not in settings:
        assert llm.stats().preemptions > 0
    return found


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("stop", [None, "bc z"])
def test_what_is_new_adds_up_to_the_whole(k, stop):
    whole = streams(k, sampled(RequestOutputKind.CUMULATIVE, stop=stop))
    new = streams(k, sampled(RequestOutputKind.DELTA, stop=stop))
    final = streams(k, sampled(RequestOutputKind.FINAL_ONLY, stop=stop))
    assert whole.keys() == new.keys() == final.keys() and len(whole) == len(PROMPTS)
    for name, outputs in whole.items():
        last = outputs[-1].outputs[0]
        parts = [one.outputs[0] for one in new[name]]
        assert len(parts) > 3
        assert [token for one in parts for token in one.token_ids] == last.token_ids
        assert "".join(one.text for one in parts) == last.text
        assert [one.finish_reason for one in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].finish_reason == last.finish_reason
        assert [one.outputs[0] for one in final[name]] == [last]
    texts = "".join(outputs[-1].outputs[0].text for outputs in whole.values())
    assert "€" in texts and "é" in texts
    ends = {outputs[-1].outputs[0].finish_reason for outputs in whole.values()}
    assert ends == ({"length"} if stop is None else {"length", "stop"})


def test_calls_that_do_not_stream_return_whole_outputs():
    llm = make_llm(tiny_model(), 2, tokenizer=Tokenizer())
    kinds = [sampled(kind) for kind in RequestOutputKind]
    outputs = [llm.generate(PROMPTS, params) for params in kinds]
    assert [[one.outputs for one in some] for some in outputs] == [
        [one.outputs for one in outputs[0]]
    ] * 3
    assert all(len(one.outputs[0].token_ids) == 40 for one in outputs[0])


def test_times_are_in_order():
    began = time.time()
    llm = make_llm(tiny_model(), 2, max_num_seqs=1)
    params = [replace(sampled(RequestOutputKind.DELTA), max_tokens=count) for count in (3, 6, 9, 1)]
    last = {one.request_id: one for one in llm.stream(PROMPTS, params)}
    ended = time.time()
    earlier = began
    for name in sorted(last, key=int):
        metrics = last[name].metrics
        order = [began, metrics.arrival_time, metrics.first_scheduled_time]
        order += [metrics.first_token_time, metrics.finished_time, ended]
        assert order == sorted(order)
        # One slot: a request is scheduled once the one before it has ended.
        assert metrics.first_scheduled_time >= earlier
        earlier = metrics.finished_time


def test_a_refused_prompt_has_no_times_of_running():
    llm = make_llm(tiny_model(), 2)
    refused, served = llm.generate([[VOCAB_SIZE], [1]], sampled(RequestOutputKind.CUMULATIVE))
    assert refused.error and refused.metrics.first_scheduled_time is None
    assert refused.metrics.first_token_time is None
    assert served.metrics.finished_time is not None
