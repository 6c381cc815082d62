"""Heads trained for half a minute on the tiny base, each kind once for all tests and workers, in both layouts.

They learn what the base itself answers to the prompts of the tests, and so are soon right more often than not.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from mtpkit.checkpoint.convert import export_checkpoint
from mtpkit.data import load_tokenizer
from mtpkit.engine import LLM
from tests.integration.front_doors import PROMPTS, TINY_BASE, TOKENS, call, greedy

SETTINGS = [
    "data.eval=[]",
    "data.sequence_length=256",
    "data.micro_batch_size=4",
    "data.global_batch_size=4",
    "heads.num_depths=3",
    "optimizer.lr=3e-3",
    "optimizer.warmup_steps=5",
    "steps=32",
]


@dataclass(frozen=True)
class Trained:
    """One model in both layouts."""

    megatron: Path
    hf: Path


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Held-out prompts as tokens, of different lengths."""
    corpus = tmp_path_factory.mktemp("corpus")
    call("examples/tiny_base/corpus.py", corpus).check_returncode()
    tokenizer = load_tokenizer(TINY_BASE)
    texts = [json.loads(line)["prompt"] for line in (corpus / "prompts.jsonl").read_text().splitlines()]
    return [tokenizer.encode(text)[: 24 + 7 * index] for index, text in enumerate(texts[:PROMPTS])]


@pytest.fixture(scope="session")
def train_on_answers(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]
) -> Callable[[str, str], Trained]:
    """Heads by loss and attention, made by whichever worker needs them first: the parent of the workers' temporary
    directories is common to all."""
    folder = tmp_path_factory.getbasetemp()

    def make(loss: str, attention: str) -> Trained:
        shared = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / f"trained-{loss}-{attention}"
        with FileLock(f"{shared}.lock"):
            if not (shared / "done").exists():
                _make(shared, prompts, [f"loss.kind={loss}", f"heads.attention={attention}"])
                (shared / "done").touch()
        return Trained(shared / "run", shared / "hf")

    return make


@pytest.fixture(scope="session")
def trained(train_on_answers: Callable[[str, str], Trained]) -> Trained:
    """As heads are trained by default."""
    return train_on_answers("kl", "serving")


def _make(shared: Path, prompts: list[list[int]], settings: list[str]) -> None:
    base = LLM(TINY_BASE, max_num_seqs=PROMPTS, max_model_len=512)
    answers = base.generate(prompts, greedy(TOKENS))
    lines = [
        json.dumps({"text": base.tokenizer.decode(prompt + answer.outputs[0].token_ids)}) + "\n"
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    shared.mkdir()
    (shared / "answers.jsonl").write_text("".join(lines))
    paths = [f"output={shared / 'run'}", f"data.train=[{shared / 'answers.jsonl'}]"]
    training = call("train/train_mtp.py", "--config", "examples/train_tiny.yaml", *SETTINGS, *settings, *paths)
    assert training.returncode == 0, training.stderr
    export_checkpoint(shared / "run", shared / "hf")
