"""The tokenizer beside a model: what is wrong with its files is one line that names the directory."""

import json
import logging
import os
import shutil
import sys
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


CODE = "raise AssertionError('code of a checkpoint runs')"


def test_code_beside_a_model_is_not_run_and_nobody_is_asked(directory: Path, monkeypatch, caplog) -> None:
    """As MiMo has it, of whose model type transformers has no class."""
    (directory / "remote_mimo.py").write_text(CODE)
    auto_map = {"AutoConfig": "remote_mimo.Config", "AutoModelForCausalLM": "remote_mimo.Model"}
    (directory / "config.json").write_text(json.dumps({"model_type": "mimo", "auto_map": auto_map}))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "propagate", True)
    assert load_tokenizer(directory)("the cat")["input_ids"]
    assert not caplog.records and "remote_mimo" not in sys.modules
    path = directory / "tokenizer_config.json"
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["remote_mimo.Own", None]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    with pytest.raises(UserError, match=r"the tokenizer in .*model cannot be read"):
        load_tokenizer(directory)
    assert logging.getLogger("transformers.configuration_utils").level == logging.NOTSET
