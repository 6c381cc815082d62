"""Whether tokens that drawn drafts lead to have the base's own distribution."""

import torch
from scipy import stats

from mtpkit.engine import SamplingParams
from mtpkit.model import base_forward, compute_logits, normed_states
from mtpkit.model.inputs import SequenceInput
from tests.engine.tiny import make_llm, make_prompts

PROMPT = make_prompts()[2]
SEEDS = 2_000


def check_second_tokens(model, **settings) -> None:
    """Check that the second token, which a drawn draft leads to, has the base's own distribution
    after the first one, where some drafts are accepted and some are not."""
    llm = make_llm(model, 1, draft_sampling=True, max_num_seqs=250, num_blocks=800, **settings)
    params = [
        SamplingParams(seed=seed, top_k=4, max_tokens=2, ignore_eos=True) for seed in range(SEEDS)
    ]
    outputs = llm.generate([dict(prompt_token_ids=PROMPT)] * SEEDS, params)
    assert 0.1 < llm.stats().acceptance.conditional_acceptance[0] < 0.9
    drawn = [tuple(output.outputs[0].token_ids) for output in outputs]
    law = {
        (first, second): p * q
        for first, p in _after(model, PROMPT)
        for second, q in _after(model, [*PROMPT, first])
    }
    assert set(drawn) <= set(law)
    common = [pair for pair, chance in law.items() if chance * SEEDS >= 5]
    expected = [law[pair] * SEEDS for pair in common]
    counts = [drawn.count(pair) for pair in common]
    expected = [*expected, SEEDS - sum(expected)]
    counts = [*counts, SEEDS - sum(counts)]
    assert len(common) > 4 and stats.chisquare(counts, expected).pvalue > 1e-3


@torch.inference_mode()
def _after(model, known: list[int]) -> list[tuple[int, float]]:
    """The four best tokens after known ones and their probabilities."""
    hidden = base_forward(model, torch.tensor([known]), SequenceInput())
    logits, tokens = compute_logits(model, normed_states(model, hidden[-1, 0])).double().topk(4)
    return list(zip(tokens.tolist(), logits.softmax(0).tolist(), strict=True))
