"""Heads of every family are trained from a published directory and go back into its layout."""

import json

import pytest
import torch

from mtpkit.checkpoint import load_model
from mtpkit.checkpoint.convert import export_checkpoint
from mtpkit.training.config.reading import load_config
from mtpkit.training.loop import train
from tests.checkpoint.family_models import FAMILIES, write_family
from tests.checkpoint.test_blocks import read_all
from tests.engine.tiny import decode, generate, greedy, make_llm

LAYER = 3
"""The number of the heads' layer in names of GLM-4-MoE and DeepSeek-V3."""


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_train_and_go_back(tmp_path, tokenizer_dir, text_files, family):
    """Heads of a published directory are trained on; the export has new heads and the same base."""
    hf = write_family(family, tmp_path / "hf", vocab_size=300)
    run = tmp_path / "run"
    back = tmp_path / "back"
    for file in tokenizer_dir.iterdir():
        (hf / file.name).write_bytes(file.read_bytes())
    values = {
        "model": hf,
        "output": run,
        "data.train": f"[{text_files[0]}]",
        "data.sequence_length": 32,
        "data.micro_batch_size": 2,
        "data.global_batch_size": 4,
        "heads.num_depths": 2,
        "heads.init": "fresh",
        "optimizer.warmup_steps": 1,
        "optimizer.lr": 1e-2,
        "steps": 8,
        "log_interval": 1,
    }
    train(load_config(None, [f"{key}={value}" for key, value in values.items()]))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.9 * losses[0]
    export_checkpoint(run, back)
    before = read_all(hf)
    after = read_all(back)
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    heads = {
        n
        for n in before
        if (n.startswith("mtp.") or "mtp_layers" in n or f"model.layers.{LAYER}." in n)
        and not (family.startswith("qwen") and n.startswith("model."))
        and "embed_tokens" not in n
        and ".head." not in n
    }
    frozen = {name for name in heads if name.endswith("e_score_correction_bias")}
    assert before.keys() - same <= heads - frozen and len(heads - same) > 0.8 * len(heads)
    model = load_model(back)
    assert generate(make_llm(model, 3), [[1, 2]], greedy(6)) == [decode(model, [1, 2], 6)]
