"""Briefly trained heads of every family, exported: the engine accepts of them what teacher forcing
predicts, both on the Hugging Face directory itself."""

from itertools import chain
from pathlib import Path

import pytest

from mtpkit.checkpoint import load_config, load_model, save_model
from mtpkit.checkpoint.convert import export_checkpoint
from mtpkit.engine import LLM
from tests.checkpoint.family_models import FAMILIES, write_family
from tests.engine.tiny import generate, greedy, make_llm
from tests.integration.brief_training import (
    ATTENTION,
    PROMPTS,
    TOKENS,
    VOCAB,
    K,
    counted,
    predicted,
    train,
)

SIZES = dict(vocab_size=VOCAB, initializer_range=0.3)
TWO_LAYERS = dict(num_hidden_layers=2, full_attention_interval=2, seed=1)
QWEN = dict(steps=40, lr=2e-2)
"""Gated delta nets say what is harder to learn."""
SETTINGS = dict(dtype="float32", device="cpu", max_model_len=128, max_num_seqs=4, warm_up=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_counts_what_teacher_forcing_predicts(family, tmp_path: Path):
    qwen = family.startswith("qwen")
    source = write_family(family, tmp_path / "source", **SIZES, **(TWO_LAYERS if qwen else {}))
    model = load_model(source)
    answers = generate(make_llm(model, 0), PROMPTS, greedy(TOKENS), poison=False)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    untrained = predicted(model, texts, ATTENTION["repeated"])
    train(model, texts, ATTENTION["repeated"], **(QWEN if qwen else {}))
    save_model(model, tmp_path / "run", companions=source)
    hf = tmp_path / "hf"
    export_checkpoint(tmp_path / "run", hf)
    assert load_config(hf).family == family and load_config(hf).mtp.num_layers == 1

    llm = LLM(hf, K, **SETTINGS)
    assert generate(llm, PROMPTS, greedy(TOKENS), poison=False) == answers
    counts = counted(llm)
    assert counts == predicted(load_model(hf), texts, ATTENTION["repeated"])
    assert min(chain(*counts)) > 20 and counts != untrained
