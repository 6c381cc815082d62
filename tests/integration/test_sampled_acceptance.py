"""Acceptance under sampling, teacher-forced on what the engine sampled, against what the engine counted."""

import pytest
import torch

from mtpkit.data.dataset import PackedBatch
from mtpkit.engine import LLM, SamplingParams
from mtpkit.model import SequenceInput, base_forward, compute_logits, unroll_depths
from mtpkit.training.config.settings import LossConfig
from mtpkit.training.depths import measure_depths, run_depths
from mtpkit.training.heads import freeze_base
from tests.training.toy import VOCAB, toy_batch, toy_model

K, PROMPTS, PROMPT, TOKENS = 2, 64, 4, 128
LENGTH = PROMPT + TOKENS


@pytest.fixture(scope="module")
def model():
    """Heads that have learnt some of what their base says."""
    model = toy_model(init_std=0.35)
    optimizer = torch.optim.Adam(freeze_base(model).values(), lr=1e-2)
    for seed in range(60):
        optimizer.zero_grad()
        run_depths(model, toy_batch([[48]] * 8, seed=seed), K, "serving", LossConfig())[0].sum().backward()
        optimizer.step()
    return model.requires_grad_(False)


def chances(model, texts, draft_sampling):
    """(go_on, accept), both [K, s, texts]: of depth k + 1 of a step at i, see `measure_depths`."""
    hidden = base_forward(model, texts, SequenceInput())
    p = compute_logits(model, hidden).double().softmax(-1)
    go_on, accept = torch.zeros(2, K, *texts.t().shape, dtype=torch.float64)
    for depth, states in enumerate(unroll_depths(model, hidden, texts, K), start=1):
        last = LENGTH - depth - 1
        base, q = p[depth : depth + last], compute_logits(model, states[:last]).double().softmax(-1)
        tokens, draft = texts.t()[depth + 1 :, :, None], q.argmax(-1, keepdim=True)
        ratio = (q.gather(-1, tokens) / base.gather(-1, tokens)).clamp(max=1)
        go_on[depth - 1, :last] = (ratio if draft_sampling else draft == tokens)[..., 0]
        accept[depth - 1, :last] = torch.minimum(base, q).sum(-1) if draft_sampling else base.gather(-1, draft)[..., 0]
    return go_on, accept


def conditional(starts, go_on, accept):
    """Acceptance of each depth given the earlier ones, of steps at i with the weights `starts` [s, texts]."""
    first, second = (starts * accept[0]).sum(), (starts * go_on[0] * accept[1]).sum()
    return [float(first / starts.sum()), float(second / (starts * go_on[0]).sum())]


def step_starts(go_on):
    """Probability that a step starts at each i; after n accepted drafts the next starts n + 1 later."""
    starts = torch.zeros(LENGTH, PROMPTS, dtype=torch.float64)
    starts[PROMPT - 1] = 1
    for i in range(PROMPT - 1, LENGTH - K - 1):
        starts[i + 1] += starts[i] * (1 - go_on[0, i])
        starts[i + 2] += starts[i] * go_on[0, i] * (1 - go_on[1, i])
        starts[i + 3] += starts[i] * go_on[0, i] * go_on[1, i]
    starts[LENGTH - K - 1 :] = 0  # steps that the end of the text cuts off
    return starts


@pytest.mark.parametrize("draft_sampling", [False, True])
def test_the_engine_counts_what_is_expected(draft_sampling, model):
    llm = LLM(model, K, max_num_seqs=PROMPTS, max_model_len=256, draft_sampling=draft_sampling)
    prompts = torch.randint(1, VOCAB, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    outputs = llm.generate(prompts, SamplingParams(temperature=1, max_tokens=TOKENS, ignore_eos=True))
    texts = [prompt + list(out.outputs[0].token_ids) for prompt, out in zip(prompts, outputs, strict=True)]
    texts = torch.tensor(texts)
    go_on, accept = chances(model, texts, draft_sampling)

    everywhere = torch.zeros(LENGTH, PROMPTS, dtype=torch.float64)
    everywhere[PROMPT - 1 : LENGTH - 2] = 1
    within = everywhere.clone()
    within[LENGTH - 3] = 0  # its second draft is beyond the text
    positions = torch.arange(LENGTH).expand_as(texts)
    batch = PackedBatch(texts, positions > PROMPT, torch.zeros_like(texts, dtype=torch.int32), positions)
    found = measure_depths(model, batch, K, "serving", LossConfig())
    measured = found.conditional_acceptance("draft_sampling" if draft_sampling else "sampling")
    want = [conditional(everywhere, go_on, accept)[0], conditional(within, go_on, accept)[1]]
    assert measured == pytest.approx(want, rel=1e-5)

    counted = llm.stats().conditional_acceptance
    expected = conditional(step_starts(go_on), go_on, accept)
    assert counted == pytest.approx(expected, abs=0.02)  # standard errors are 0.006 and 0.013
    other = conditional(step_starts(go_on), *chances(model, texts, not draft_sampling))
    assert abs(counted[0] - other[0]) > 0.1, "the two kinds of drafts could not be told apart"
