"""Heads for a base of DeepSeek-V3: trained from its Hugging Face directory, exported, decoded
with."""

import json
import random
import shutil

import pytest

from mtpkit.checkpoint import load_config
from mtpkit.checkpoint.convert import export_checkpoint
from mtpkit.engine import LLM
from mtpkit.training.config.reading import load_config as load_train_config
from mtpkit.training.loop import train
from mtpkit.training.metrics import METRICS, read_metrics
from tests.checkpoint.block_models import write_deepseek
from tests.engine.tiny import generate, greedy


@pytest.fixture(scope="module")
def run(tokenizer_dir, tmp_path_factory):
    """Directory of a short run over three depths of one repeated head."""
    folder = tmp_path_factory.mktemp("deepseek")
    base = folder / "base"
    text = folder / "text.txt"
    write_deepseek(base, vocab_size=300, initializer_range=0.3, num_hidden_layers=2)
    shutil.copytree(tokenizer_dir, base, dirs_exist_ok=True)
    text.write_text(
        "".join(
            random.Random(0).choices(["the cat sat on the mat\n", "def add(left, right):\n"], k=200)
        )
    )
    values = {
        "model": base,
        "output": folder / "run",
        "data.train": f"[{text}]",
        "data.sequence_length": 24,
        "data.global_batch_size": 8,
        "data.micro_batch_size": 8,
        "heads.num_depths": 3,
        "heads.init": "fresh",
        "optimizer.lr": 2e-2,
        "optimizer.warmup_steps": 1,
        "steps": 12,
        "log_interval": 1,
    }
    return train(load_train_config(None, [f"{key}={value}" for key, value in values.items()]))


def test_the_loss_falls_and_the_heads_are_of_the_family(run):
    losses = [line["loss"] for line in read_metrics(run / METRICS) if line["kind"] == "train"]
    assert len(losses) == 12 and sum(losses[-3:]) < 0.9 * sum(losses[:3])
    assert load_config(run).hybrid_layer_pattern == "+-+E/+E/+E/+E"


def test_what_was_trained_is_exported_and_decodes(run, tmp_path):
    export_checkpoint(run, tmp_path / "hf")
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert values["num_nextn_predict_layers"] == 1 and values["mtpkit"]["mtp_num_depths"] == 3
    prompts = [[5, 7, 9], [11] * 13]
    said = []
    for directory, k in ((run, 0), (run, 3), (tmp_path / "hf", 3), (tmp_path / "hf", 4)):
        llm = LLM(
            directory,
            k,
            dtype="float32",
            device="cpu",
            max_model_len=64,
            warm_up=False,
            block_size=4,
        )
        said.append(generate(llm, prompts, greedy(16)))
    assert said == [said[0]] * 4
