"""`benchmarks.structured`: cases are decoded in turns, and constraints are timed alone."""

from dataclasses import replace

import pytest

from benchmarks.structured.__main__ import SCHEMA, Case, alike, kept, measure
from mtpkit import LLM, SamplingParams
from mtpkit.engine import StructuredOutputsParams
from mtpkit.engine.device import executor
from mtpkit.model import build_model
from tests.engine.tiny import tiny_config
from tests.engine.tokenizers import byte_level


def test_free_and_constrained_outputs_are_measured_in_turns():
    model = build_model(tiny_config().replace(vocab_size=300), device="cpu", seed=1)
    small = dict(num_blocks=99, block_size=8, max_num_seqs=2, tokenizer=byte_level())
    engines = [LLM(model, k, **small) for k in (0, 2)]
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    schema = SamplingParams(
        temperature=0, max_tokens=12, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )
    prompts = ["a", "bc", "d"]
    each = alike(engines[0], prompts, replace(schema, max_tokens=9), free)
    assert [params.max_tokens for params in each] == [9, 9, 9]
    assert all(params.ignore_eos and params.structured_outputs is None for params in each)
    cases = [Case("", llm, params) for params in (free, schema) for llm in engines]
    rows = executor.constrained_rows
    measure(cases, prompts, 2)
    assert executor.constrained_rows is rows
    for case in cases:
        assert len(case.rates) == 2 and min(case.rates) > 0
        assert len(case.shares) == 2 and max(case.shares) < 1
    # Without a grammar the host only sees that there is none.
    assert min(cases[3].shares) > 2 * max(cases[1].shares)
    # What the grammar forces is drafted, whatever the heads know.
    assert [case.acceptance_length for case in cases[::2]] == [1, 1]
    assert cases[3].acceptance_length > cases[1].acceptance_length
    assert kept(cases) > 0


def test_what_is_kept_is_a_ratio_of_speedups():
    cases = [Case("", None, None, rates) for rates in ([1, 2], [2, 4], [2, 5], [3, 7.5])]
    assert kept(cases) == pytest.approx(0.75)
