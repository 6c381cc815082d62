"""The tokenizer beside a model: what is wrong with its files is one line that names the directory."""

import json
import os
import shutil
from pathlib import Path

import pytest

from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.errors import UserError


@pytest.fixture
def directory(tokenizer_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tokenizer_dir, tmp_path / "model"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["pipe", "directory", "link"])
def test_what_is_no_file_is_refused(directory: Path, file: str, kind: str) -> None:
    path = directory / file
    path.unlink(missing_ok=True)
    {"pipe": os.mkfifo, "directory": Path.mkdir, "link": lambda path: path.symlink_to(path.name)}[kind](path)
    with pytest.raises(UserError, match=f"model/{file} cannot be read"):
        load_tokenizer(directory)


@pytest.mark.parametrize("value", ["512", [512], {"a": 1}])
def test_settings_of_a_wrong_type_are_refused(directory: Path, value: object) -> None:
    """transformers reads this one when it tokenises."""
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": value}))
    with pytest.raises(UserError, match=r"the tokenizer in .*model cannot be read"):
        load_tokenizer(directory)
