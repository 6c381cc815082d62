"""Drafts from a part of the vocabulary, and acceptance by chance."""

import json
import statistics
from dataclasses import replace

import pytest
import torch

from mtpkit.engine import SamplingParams
from mtpkit.errors import UserError
from tests.engine.tiny import (
    decode,
    generate,
    greedy,
    make_llm,
    make_prompts,
    record_drafts,
    tiny_model,
)

SOME = [60, 3, 17, 22, 41, 8, 30]
PROMPTS = make_prompts()


@pytest.mark.parametrize("heads", ["repeated", "distinct"])
def test_output_is_the_bases_own_and_drafts_are_among_the_tokens(heads):
    model = tiny_model(heads)
    llm = make_llm(model, 2, draft_vocab=SOME)
    drafts = record_drafts(llm, PROMPTS, guided=False)
    assert {token for made in drafts.values() for token in made} <= set(SOME)
    assert generate(make_llm(model, 2, draft_vocab=SOME), PROMPTS) == [
        decode(model, p, 20) for p in PROMPTS
    ]


def test_drafts_are_the_best_of_those_tokens():
    """With all tokens named, drafts are what they are without a choice."""
    model = tiny_model()
    everything = list(range(model.mtpkit_config.vocab_size))
    chosen = record_drafts(make_llm(model, 2, draft_vocab=everything), PROMPTS, guided=False)
    assert chosen == record_drafts(make_llm(model, 2), PROMPTS, guided=False)


def test_sampled_drafts_keep_to_the_tokens_and_verification_knows():
    """q is zero outside of the tokens: rejection sampling stays exact."""
    llm = make_llm(tiny_model(), 2, draft_vocab=SOME, draft_sampling=True)
    seen = []
    draft = llm.engine.executor.drafter.draft

    def spy(hidden, batch, verdict):
        seen.append(draft(hidden, batch, verdict))
        return seen[-1]

    llm.engine.executor.drafter.draft = spy
    generate(
        llm,
        PROMPTS,
        SamplingParams(temperature=1.0, max_tokens=12, seed=1, ignore_eos=True),
        poison=False,
    )
    outside = torch.ones(llm.model.mtpkit_config.vocab_size, dtype=torch.bool)
    outside[SOME] = False
    drawn = [made for made in seen if len(made.token_ids)]
    assert drawn and all((made.probs[..., outside] == 0).all() for made in drawn)
    assert all(torch.isin(made.token_ids, torch.tensor(SOME)).all() for made in drawn)


def test_a_file_or_a_mistake(tmp_path):
    path = tmp_path / "some.json"
    path.write_text(
        json.dumps({"token_ids": SOME, "vocab_size": 61, "coverage": 0.5, "files": ["x"]})
    )
    llm = make_llm(tiny_model(), 2, draft_vocab=path)
    assert llm.engine.executor.drafter.draft_token_ids.tolist() == sorted(SOME)
    for wrong, message in (([], "is empty"), ([3, 61], "61"), ([3, 3], "3")):
        with pytest.raises(UserError, match=message):
            make_llm(tiny_model(), 2, draft_vocab=wrong)


@pytest.mark.parametrize("sample", [False, True])
def test_synthetic_acceptance_goes_on_with_the_bases_own_token(sample):
    """Nothing accepted: plain decoding. Everything accepted: every (1 + K)-th token is the
    base's."""
    model = tiny_model()
    prompts = make_prompts()
    llm = make_llm(model, 2, synthetic_acceptance=[0.0, 0.0], draft_sampling=sample)
    assert generate(llm, prompts) == [decode(model, prompt, 20) for prompt in prompts]
    llm = make_llm(model, 2, synthetic_acceptance=[1.0, 1.0], draft_sampling=sample)
    for prompt, tokens in zip(prompts, generate(llm, prompts, greedy(16)), strict=True):
        assert tokens != decode(model, prompt, 16)
        for place in range(0, 16, 3):
            assert tokens[place] == decode(model, prompt + tokens[:place], 1)[0]


def test_synthetic_acceptance_has_its_rates():
    llm = make_llm(
        tiny_model(), 3, synthetic_acceptance=[0.9, 0.5, 0.2], num_blocks=400, max_num_seqs=16
    )
    prompts = [[token] for token in range(40)]
    llm.generate(prompts, greedy(60))
    for got, want in zip(llm.stats().conditional_acceptance, [0.9, 0.5, 0.2], strict=True):
        assert got == pytest.approx(want, abs=0.06)


@pytest.mark.parametrize("tree", [None, [2, 2, 1]])
def test_requests_have_synthetic_acceptance_of_their_own(tree):
    """By their seeds, whatever slots they are in and whatever runs beside them."""
    llm = make_llm(
        tiny_model(),
        3,
        synthetic_acceptance=[[0.9, 0.9, 0.9], [0.0, 0.9, 0.9], [1.0, 0.3, 0.0]],
        speculative_token_tree=tree,
        num_blocks=400,
        max_num_seqs=16,
    )
    seeds = list(range(45))[::-1]
    prompts = [[token] for token in seeds]
    params = [replace(greedy(60), seed=seed) for seed in seeds]
    outputs = llm.generate(prompts, params)
    lengths = [
        statistics.mean(
            one.stats.acceptance_length
            for one, seed in zip(outputs, seeds, strict=True)
            if seed % 3 == rule
        )
        for rule in range(3)
    ]
    assert lengths == pytest.approx([1 + 0.9 + 0.81 + 0.729, 1.0, 2.3], abs=0.12)
