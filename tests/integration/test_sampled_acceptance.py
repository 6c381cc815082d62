"""Acceptance along the texts that an engine wrote, packed as data, against what the engine counted.

The models are tiny, so that 50,000 steps of each kind of sampling take ten seconds.
"""

import math

import numpy as np
import pytest
import torch

from mtpkit.data.build import pack_documents
from mtpkit.data.dataset import PackedDataset
from mtpkit.data.documents import Document
from mtpkit.engine import LLM, SamplingParams
from mtpkit.platform import ensure_distributed
from mtpkit.training.config.settings import LossConfig
from mtpkit.training.depths import run_depths
from mtpkit.training.evaluation import evaluate_sources
from mtpkit.training.heads import freeze_base
from tests.training.toy import VOCAB, toy_batch, toy_model

K = 3
ROWS = 512
PROMPT = 4
ATTENTION = {"repeated": "serving", "distinct": "per_depth"}


@pytest.fixture(scope="module", params=["repeated", "distinct"])
def model(request):
    """Heads that have learnt some of what their base says."""
    model = toy_model(init_std=0.35, mtp_use_repeated_layer=request.param == "repeated")
    optimizer = torch.optim.Adam(freeze_base(model).values(), lr=1e-2)
    for seed in range(40):
        optimizer.zero_grad()
        batch = toy_batch([[48]] * 8, wanted=1.0, seed=seed)
        run_depths(model, batch, K, ATTENTION[request.param], LossConfig())[0].sum().backward()
        optimizer.step()
    return model.requires_grad_(False)


def decode(model, rows, draft_sampling=False, **options):
    """The engine's counts, and its texts as packed data of several texts per sequence."""
    sampling = SamplingParams(**options)
    llm = LLM(model, K, max_num_seqs=rows, max_model_len=256, draft_sampling=draft_sampling)
    prompts = torch.randint(
        1, VOCAB, (rows, PROMPT), generator=torch.Generator().manual_seed(0)
    ).tolist()
    outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, sampling)]
    texts = [
        np.array(prompt + answer, np.int32) for prompt, answer in zip(prompts, outputs, strict=True)
    ]
    documents = [
        Document(text, np.arange(len(text)) >= PROMPT) for text in texts if len(text) > PROMPT + 1
    ]
    return (
        llm.stats().acceptance,
        PackedDataset([pack_documents("own", documents, 512)], 512, 0),
        outputs,
    )


def evaluate(model, dataset):
    ensure_distributed()
    kind = "repeated" if model.mtpkit_config.mtp.repeated else "distinct"
    found = evaluate_sources(model, dataset, K, ATTENTION[kind], LossConfig(), batch_size=8)
    return found.to_dict() | found.counts()


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_greedy_counts_are_equal(model, ignore_eos):
    """In every step, the short ones at the end of an answer or at max_tokens too."""
    counted, dataset, outputs = decode(
        model, 48, temperature=0, max_tokens=64, ignore_eos=ignore_eos
    )
    assert ignore_eos == (min(map(len, outputs)) == 64)
    found = evaluate(model, dataset)
    names = "steps", "reached_per_depth", "accepted_per_depth"
    assert [found[name] for name in names] == [getattr(counted, name) for name in names]
    assert found["acceptance_length"] == counted.acceptance_length > 1.5
    assert found["conditional_acceptance"] == counted.conditional_acceptance
    assert found["departures"] == 0
    assert counted.reached_per_depth[1] < counted.accepted_per_depth[0], "no step was short"


@pytest.mark.parametrize("decoding", ["sampling", "draft_sampling"])
def test_sampled_counts_are_as_expected(model, decoding):
    """Within three standard errors, and within 1%, on 50,000 steps."""
    if model.mtpkit_config.mtp.repeated == (decoding == "draft_sampling"):
        pytest.skip("each kind of heads with one kind of drafts, for time")
    drawn = decoding == "draft_sampling"
    tokens = 196 if drawn else 136
    counted, dataset, _ = decode(
        model, ROWS, drawn, temperature=1, max_tokens=tokens, ignore_eos=True
    )
    found = evaluate(model, dataset)
    prefix = f"{decoding}_"
    assert counted.steps >= 50_000 and found[f"{prefix}steps"] == pytest.approx(
        counted.steps, rel=0.01
    )
    length = found[f"{prefix}acceptance_length"]
    assert length == pytest.approx(counted.acceptance_length, rel=0.01)
    low, high = found[f"{prefix}acceptance_length_interval"]
    assert 0 < high - low < 0.02 * length
    depths = zip(
        found[f"{prefix}conditional_acceptance"],
        counted.conditional_acceptance,
        counted.reached_per_depth,
        strict=True,
    )
    for rate, measured, reached in depths:
        assert abs(rate - measured) < 3 * math.sqrt(rate * (1 - rate) / reached)
    other = "sampling_" if drawn else "draft_sampling_"
    assert abs(found[f"{other}acceptance_length"] - counted.acceptance_length) > 0.1, (
        "drafts could not be told apart"
    )
