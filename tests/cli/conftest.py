"""A model with random heads and a tokenizer, and commands called in this process."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpkit.checkpoint import save_hf_model
from mtpkit.cli import run
from tests.bench.conftest import rates_once
from tests.training.toy import toy_model

__all__ = ["rates_once"]


@pytest.fixture(scope="session")
def save_model(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path
) -> Callable[..., Path]:
    """Directory of a model with heads as asked for, and the tokenizer."""

    def save_model(**changes: Any) -> Path:
        directory = tmp_path_factory.mktemp("model")
        shutil.copytree(tokenizer_dir, directory, dirs_exist_ok=True)
        save_hf_model(toy_model(vocab_size=300, **changes), directory)
        return directory

    return save_model


@pytest.fixture(scope="session")
def model_dir(save_model: Callable[..., Path]) -> Path:
    return save_model(mtp_num_depths=2)


@pytest.fixture
def call():
    """Exit code of a command."""

    def call(app, *args: object) -> int:
        with pytest.raises(SystemExit) as stop:
            run(app, [str(arg) for arg in args])
        return int(stop.value.code or 0)

    return call


CHAT_TEMPLATE = (
    "{% if robot %}[{{ robot }}]{% endif %}{% for m in messages %}{% if m.role not in ['system',"
    " 'user', 'assistant'] %}{{ raise_exception('no ' + m.role) }}{% endif %}{{ m.role }}: {{"
    " m.content }}<eos>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def chat_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model_dir` with a chat template."""
    directory = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(model_dir, directory)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory
