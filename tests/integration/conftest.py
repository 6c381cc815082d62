"""Heads trained for half a minute on the tiny base, each kind once for all tests and workers, in
both layouts.

They learn what the base itself answers to the prompts of the tests, and so are soon right more
often than not.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from mtpkit.checkpoint.convert import export_checkpoint
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.engine import LLM
from mtpkit.training.cache_write import write_cache
from mtpkit.training.config.reading import load_config
from mtpkit.training.loop import train
from tests.integration.front_doors import PROMPTS, ROOT, TINY_BASE, TOKENS, call, greedy
from tests.shared import made_once

SETTINGS = [
    "data.eval=[]",
    "data.sequence_length=256",
    "data.micro_batch_size=4",
    "data.global_batch_size=4",
    "heads.num_depths=3",
    "heads.fit_tokens=8192",
    "optimizer.lr=3e-3",
    "optimizer.warmup_steps=5",
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
    texts = [
        json.loads(line)["prompt"] for line in (corpus / "prompts.jsonl").read_text().splitlines()
    ]
    return [tokenizer.encode(text)[: 24 + 7 * index] for index, text in enumerate(texts[:PROMPTS])]


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt with what the base says to it, TOKENS tokens, decoded once for all workers."""

    def make(folder: Path) -> None:
        base = LLM(TINY_BASE, max_num_seqs=PROMPTS, max_model_len=512)
        outputs = base.generate(prompts, greedy(TOKENS))
        pairs = zip(prompts, outputs, strict=True)
        tokens = [prompt + output.outputs[0].token_ids for prompt, output in pairs]
        (folder / "tokens.json").write_text(json.dumps(tokens))

    return json.loads((made_once(tmp_path_factory, "answers", make) / "tokens.json").read_text())


@pytest.fixture(scope="session")
def train_on_answers(
    tmp_path_factory: pytest.TempPathFactory, answers: list[list[int]]
) -> Callable[..., Trained]:
    """Heads by loss, attention, steps and further settings, made by whichever worker needs them
    first."""

    def make(loss: str, attention: str, steps: int, *further: str) -> Trained:
        settings = [f"loss.kind={loss}", f"heads.attention={attention}", f"steps={steps}", *further]
        name = "-".join(["trained", loss, attention, *further])
        shared = made_once(tmp_path_factory, name, lambda folder: _make(folder, answers, settings))
        return Trained(shared / "run", shared / "hf")

    return make


@pytest.fixture(scope="session")
def trained(train_on_answers: Callable[..., Trained]) -> Trained:
    """Heads with the default settings of training."""
    return train_on_answers("kl", "serving", 32)


def _make(shared: Path, answers: list[list[int]], settings: list[str]) -> None:
    tokenizer = load_tokenizer(TINY_BASE)
    lines = [json.dumps({"text": tokenizer.decode(tokens)}) + "\n" for tokens in answers]
    cache = shared.with_name("cache")
    data = shared.with_name("answers.jsonl")
    paths = [
        f"model={TINY_BASE}",
        f"output={shared / 'run'}",
        f"data.train=[{data}]",
        f"cache={cache}",
    ]
    config = load_config(ROOT / "examples" / "train_tiny.yaml", [*SETTINGS, *settings, *paths])
    with FileLock(f"{cache}.lock"):
        data.write_text("".join(lines))
        write_cache(config)
    train(config)
    export_checkpoint(shared / "run", shared / "hf")
