"""Fixtures of the training tests: a toy base that has learnt a predictable text."""

import random
import shutil
from pathlib import Path

import pytest

from mtpkit.checkpoint import save_model
from tests.shared import made_once
from tests.training.toy import teach, toy_model

SENTENCES = ["the cat sat on the mat\n", "def add(left, right):\n    return left + right\n"]


@pytest.fixture(scope="session")
def text_files(tmp_path_factory) -> tuple[Path, Path]:
    """Two sentences in random order, many times: text to train on, and held-out text."""

    def make(folder):
        rng = random.Random(0)
        for name, count in (("train.txt", 400), ("heldout.txt", 60)):
            (folder / name).write_text("".join(rng.choices(SENTENCES, k=count)))

    folder = made_once(tmp_path_factory, "text", make)
    return folder / "train.txt", folder / "heldout.txt"


@pytest.fixture(scope="session")
def toy_base(tmp_path_factory, tokenizer_dir, text_files) -> Path:
    """A Megatron directory of a headless toy base, trained until it knows the text."""

    def make(directory):
        model = toy_model(vocab_size=300, mtp_pattern="", mtp_num_depths=0)
        teach(model, text_files[0], tokenizer_dir)
        save_model(model, directory)
        shutil.copytree(tokenizer_dir, directory, dirs_exist_ok=True)

    return made_once(tmp_path_factory, "base", make)


@pytest.fixture
def run_settings(toy_base, text_files, tmp_path):
    """A function from further settings, by key, to the overrides of a short run."""

    def make(**values) -> list[str]:
        both = {
            "model": toy_base,
            "output": tmp_path / "run",
            "data.train": f"[{text_files[0]}]",
            "data.eval": f"[{text_files[1]}]",
            "data.sequence_length": 32,
            "heads.num_depths": 2,
            "heads.fit_tokens": 1024,
            "optimizer.warmup_steps": 2,
            "dtype": "float32",
            **values,
        }
        return [f"{key}={value}" for key, value in both.items()]

    return make
