"""The tokenizer beside a model: what is wrong with its files is one line that names the
directory."""

import json
import logging
import os
import shutil
import sys
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from mtpkit.data.documents import tokenize
from mtpkit.data.prompts import read_prompts
from mtpkit.data.samples import read_samples
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.engine.requests.prompts import encode
from mtpkit.errors import UserError


@pytest.fixture
def directory(tokenizer_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tokenizer_dir, tmp_path / "model"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "file", ["tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"]
)
@pytest.mark.parametrize("kind", ["pipe", "directory", "link"])
def test_what_is_no_file_is_refused(directory: Path, file: str, kind: str) -> None:
    path = directory / file
    path.unlink(missing_ok=True)
    {"pipe": os.mkfifo, "directory": Path.mkdir, "link": lambda path: path.symlink_to(path.name)}[
        kind
    ](path)
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


def test_code_beside_a_model_is_not_run_and_nobody_is_asked(
    directory: Path, monkeypatch, caplog
) -> None:
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


def test_a_rendered_chat_has_one_bos_wherever_it_is_tokenized(
    directory: Path, tmp_path: Path
) -> None:
    """A template writes BOS, and the tokenizer would put one before it: in data, prompts and the
    engine's prompts."""
    tokenizer = load_tokenizer(directory)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    plain = tokenizer("the cat")["input_ids"]
    twice = [bos, bos]
    assert plain[0] == bos and tokenizer("<s>the cat")["input_ids"][:2] == twice

    (tmp_path / "rows.jsonl").write_text('{"text": "<s>the cat"}\n{"text": "the cat"}\n')
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "<s>the", "response": " cat"}\n')
    documents = tokenize(
        read_samples([tmp_path / "rows.jsonl", tmp_path / "pairs.jsonl"]), tokenizer
    )
    assert [document.token_ids.tolist() for document in documents] == [[*plain, eos]] * 3
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "<s>the cat"}\n{"prompt": "the cat"}\n')
    assert [one.token_ids for one in read_prompts([tmp_path / "prompts.jsonl"], tokenizer)[0]] == [
        plain
    ] * 2
    (piece,) = read_prompts([tmp_path / "rows.jsonl"], tokenizer, 2, limit=1)[0]
    assert piece.token_ids.count(bos) == 1
    for text in ("<s>the cat", "the cat"):
        assert encode({"prompt": text}, tokenizer, "p")[:2] == (text, plain)
    assert encode("<s><s>the cat", tokenizer, "p")[1][:3] == [
        *twice,
        plain[1],
    ], "what is written twice stays"
