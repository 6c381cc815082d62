"""A model directory is opened once: its layout is found, and each of its files is read, once."""

import shutil
from collections import Counter
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from mtpkit import files
from mtpkit.checkpoint import directory as directories
from mtpkit.checkpoint import load_model, open_directory, save_model
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.layouts.huggingface import HFReader
from mtpkit.checkpoint.layouts.torch_dist import MegatronReader
from mtpkit.checkpoint.lint import lint
from mtpkit.checkpoint.stitch import stitch
from mtpkit.checkpoint.verify import compare_weights
from mtpkit.cli.data import app as data_app
from mtpkit.engine import LLM
from mtpkit.errors import UserError
from tests.checkpoint.builders import add_heads, edit_config, write_base
from tests.checkpoint.test_cli import run


class Counts:
    """How often layouts were found, files read and weights opened, by directory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layouts: Counter[Path] = Counter()
        self.weights: Counter[Path] = Counter()
        self.files: Counter[Path] = Counter()
        find = directories._find_torch_dist
        read = files.read_text

        def counted_find(path):
            self.layouts[path] += 1
            return find(path)

        def counted_read(path):
            self.files[Path(path)] += 1
            return read(path)

        monkeypatch.setattr(directories, "_find_torch_dist", counted_find)
        monkeypatch.setattr(files, "read_text", counted_read)
        for reader in (HFReader, MegatronReader):
            self._count_openings(monkeypatch, reader)

    def _count_openings(self, monkeypatch, reader) -> None:
        init = reader.__init__

        def counted(own, directory, *args, **kwargs):
            self.weights[directory] += 1
            init(own, directory, *args, **kwargs)

        monkeypatch.setattr(reader, "__init__", counted)


@pytest.fixture
def place(tmp_path, tokenizer_dir):
    """`hf`, `other` with other heads, and `run`, the Megatron twin of `other`."""
    write_base(tmp_path / "hf", vocab_size=300)
    shutil.copytree(tmp_path / "hf", tmp_path / "other")
    add_heads(tmp_path / "hf")
    add_heads(tmp_path / "other", "*-")
    edit_config(tmp_path / "hf", eos_token_id=0, bos_token_id=0, pad_token_id=0)
    for name in ("hf", "other"):
        shutil.copytree(tokenizer_dir, tmp_path / name, dirs_exist_ok=True)
    import_checkpoint(tmp_path / "other", tmp_path / "run")
    return tmp_path


def inspect(place: Path) -> None:
    text = place / "text.txt"
    text.write_text("the cat sat on the mat\n" * 40)
    with pytest.raises(SystemExit) as stop:
        run(data_app, ["inspect", "--model", str(place / "hf"), "--data", str(text)])
    assert not stop.value.code


ACTIONS = {
    "import": (lambda place: import_checkpoint(place / "hf", place / "out"), ("hf",)),
    "export": (lambda place: export_checkpoint(place / "run", place / "out"), ("run",)),
    "load hf": (lambda place: load_model(place / "hf"), ("hf",)),
    "load megatron": (lambda place: load_model(place / "run"), ("run",)),
    "an engine": (lambda place: LLM(str(place / "hf"), device="cpu"), ("hf",)),
    "lint": (lambda place: lint(place / "hf"), ("hf",)),
    "inspect": (inspect, ("hf",)),
    "stitch": (
        lambda place: stitch(place / "hf", place / "run", place / "out"),
        ("hf", "run"),
    ),
    "verify": (lambda place: compare_weights(place / "hf", place / "other"), ("hf", "other")),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_everything_is_read_once(name, place, monkeypatch):
    action, used = ACTIONS[name]
    counts = Counts(monkeypatch)
    action(place)
    assert {place / own: counts.layouts[place / own] for own in used} == {
        place / own: 1 for own in used
    }
    for own in used:
        assert counts.files[place / own / ("mtpkit.json" if own == "run" else "config.json")] == 1
    assert max(counts.files.values()) == 1
    assert max(counts.weights.values(), default=1) == 1


def test_a_save_opens_the_directory_of_its_base_once(place, monkeypatch):
    model = load_model(place / "run")
    counts = Counts(monkeypatch)
    save_model(model, place / "saved", companions=place / "run")
    assert counts.layouts[place / "run"] == 1
    assert counts.weights[place / "run" / "release"] == 1


def test_an_opened_directory_is_handed_on(place):
    opened = open_directory(place / "hf")
    assert open_directory(opened) is opened
    assert opened.config is opened.config
    with pytest.raises(FrozenInstanceError):
        opened.path = place
    assert load_model(opened).mtpkit_config is opened.config


def test_nothing_is_read_before_it_is_needed(place, monkeypatch):
    counts = Counts(monkeypatch)
    for name in ("hf", "run"):
        assert open_directory(place / name).companions == place / name
    assert not counts.files and not counts.weights


def test_a_directory_of_an_adapter_is_refused_as_such(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="holds an adapter: adapters must be merged into"):
        open_directory(tmp_path)
