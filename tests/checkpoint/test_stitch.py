"""Heads put into a checkpoint: they are the trained ones, and nothing else changes."""

import contextlib
import errno
import json
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mtpkit.checkpoint import load_config
from mtpkit.checkpoint import stitch as stitching
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.directory import open_directory
from mtpkit.checkpoint.layouts.huggingface import HFReader
from mtpkit.checkpoint.layouts.parallel import Budget
from mtpkit.checkpoint.stitch import BASE_FILE, HEADS_FILE, _with_heads, stitch
from mtpkit.checkpoint.tensors import bits_equal
from mtpkit.checkpoint.verify import fingerprint_config
from mtpkit.config import ModelConfig
from mtpkit.config.checked import keys_of
from mtpkit.config.sections.base import SECTIONS
from mtpkit.errors import MtpkitError, StorageError, UserError
from tests.checkpoint.builders import add_heads, edit, edit_config, write_base
from tests.checkpoint.odd_family import CARRIED, known, write_odd
from tests.checkpoint.test_cli import convert
from tests.checkpoint.test_round_trip import read_all
from tests.toy_config import DELTA, toy_config

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """`hf` in several files, with heads; `bare`, one file, without; `run`, the Megatron twin of
    `other`: new heads."""
    place = tmp_path_factory.mktemp("stitch")
    write_base(place / "bare", "*-E", dtype=torch.bfloat16)
    for name, heads, depths in (("one", "*E", 3), ("other", "*-", 2)):
        shutil.copytree(place / "bare", place / name)
        add_heads(place / name, heads, depths=depths)
    edit(
        place / "other",
        lambda tensors: [t.mul_(1.5) for n, t in tensors.items() if n.startswith("mtp.")],
    )
    own = {
        "mtp_num_depths": 2,
        "mtp_use_repeated_layer": True,
        "mtp_reads_of_base": "before_final_norm",
    }
    edit_config(place / "other", mtpkit=own)
    edit_config(place / "one", remembered={"a": 1})
    import_checkpoint(place / "one", place / "one-megatron")
    export_checkpoint(place / "one-megatron", place / "hf", max_shard_bytes=6_000)
    (place / "hf" / "tokenizer.json").write_text("{}")
    import_checkpoint(place / "other", place / "run")
    return place


def is_head(name: str) -> bool:
    return name.startswith("mtp.")


def check(place, source: str, out, done) -> None:
    before = read_all(place / source)
    after = read_all(out)
    heads = read_all(place / "other")
    assert {n for n in after if is_head(n)} == {n for n in heads if is_head(n)} == {*done.heads}
    assert all(bits_equal(after[n], heads[n] if is_head(n) else before[n]) for n in after)
    assert {n for n in after if not is_head(n)} == {n for n in before if not is_head(n)}
    index = json.loads((out / INDEX).read_text())
    assert index["weight_map"].keys() == after.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    config = load_config(out)
    base = load_config(place / source)
    assert config.mtp == load_config(place / "other").mtp
    assert config.replace(**NO_HEADS) == base.replace(**NO_HEADS)
    open_directory(out).weights()


NO_HEADS = {"mtp_pattern": "", "mtp_num_depths": 0, "mtp_use_repeated_layer": True}
NO_HEADS["mtp_reads_of_base"] = "after_final_norm"


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("trained", ["run", "other"])
def test_only_files_with_heads_are_written(place, tmp_path, link, trained):
    done = stitch(place / "hf", place / trained, tmp_path / "out", link)
    check(place, "hf", tmp_path / "out", done)
    places = json.loads((place / "hf" / INDEX).read_text())["weight_map"]
    touched = {file for name, file in places.items() if is_head(name)}
    assert (
        {*done.files} <= touched
        and {*done.kept_files} == {*places.values()} - touched
        and done.kept_files
    )
    for file in done.kept_files:
        assert (tmp_path / "out" / file).samefile(place / "hf" / file) == link
        assert (tmp_path / "out" / file).read_bytes() == (place / "hf" / file).read_bytes()
    mixed = [name for name, file in places.items() if file in touched and not is_head(name)]
    assert done.hashed == (len(mixed) if link else done.kept) and done.kept == sum(
        not is_head(n) for n in places
    )
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_config_keeps_all_but_the_heads(place, tmp_path):
    stitch(place / "hf", place / "run", tmp_path / "out")
    before, after = (
        json.loads((d / "config.json").read_text()) for d in (place / "hf", tmp_path / "out")
    )
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed == {"mtp_hybrid_override_pattern", "mtpkit"} and before["remembered"] == {"a": 1}
    assert [key for key in after if key in before] == [key for key in before if key in after]


@pytest.mark.parametrize("link", [False, True])
def test_a_checkpoint_of_one_file_without_heads(place, tmp_path, link):
    """Its file has another name then: transformers would take `model.safetensors` for the whole."""
    done = stitch(place / "bare", place / "run", tmp_path / "out", link)
    check(place, "bare", tmp_path / "out", done)
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == [
        BASE_FILE,
        HEADS_FILE,
    ]
    assert done.files == (HEADS_FILE,) and done.hashed == (0 if link else done.kept)


def test_rules_of_the_heads_replace_those_of_the_old_heads(place, tmp_path):
    """Also rules that are the default: heads must be fed as they were trained."""
    stitch(place / "other", place / "one-megatron", tmp_path / "out")
    assert load_config(place / "other").mtp.reads_of_base == "before_final_norm"
    found = load_config(tmp_path / "out").mtp
    assert found == load_config(place / "one").mtp and found.reads_of_base == "after_final_norm"


def test_a_checkpoint_of_one_file_with_heads(place, tmp_path):
    done = stitch(place / "one", place / "run", tmp_path / "out")
    before = read_all(place / "other")
    after = read_all(tmp_path / "out")
    assert before.keys() == after.keys() and not (tmp_path / "out" / INDEX).exists()
    assert done.files == ("model.safetensors",) and done.hashed == done.kept


def test_heads_of_a_kind_that_the_base_lacks(place, tmp_path):
    write_base(tmp_path / "base", "*", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    gone = {key: value for key, value in config.items() if key != "intermediate_size"}
    (tmp_path / "base" / "config.json").write_text(json.dumps(gone))
    stitch(tmp_path / "base", place / "run", tmp_path / "out")
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert after["intermediate_size"] == 48 and after["mtp_hybrid_override_pattern"] == "*-"
    kept = [key for key in gone if not key.startswith(("mtp", "num_nextn"))]
    assert [key for key in kept if after[key] != gone[key]] == [] and len(kept) > 30
    open_directory(tmp_path / "out").weights()


def test_packed_experts_copies_and_carried_tensors_stay(tmp_path):
    with known():
        before = write_odd(tmp_path / "hf", ("backbone.layers.1.",))
        write_odd(tmp_path / "trained")
        edit(
            tmp_path / "trained",
            lambda found: [t.mul_(2) for n, t in found.items() if n.startswith("mtp.layers")],
        )
        import_checkpoint(tmp_path / "trained", tmp_path / "run")
        stitch(tmp_path / "hf", tmp_path / "run", tmp_path / "out")
        after = read_all(tmp_path / "out")
        heads = read_all(tmp_path / "trained")
        assert after.keys() == before.keys() and CARRIED.keys() < after.keys()
        for name, tensor in after.items():
            assert bits_equal(tensor, (heads if name.startswith("mtp.layers") else before)[name]), (
                name
            )


def refused(action, *words: str, error: type[MtpkitError] = UserError) -> None:
    with pytest.raises(error) as caught:
        action()
    assert not [word for word in words if word not in str(caught.value)], caught.value


def test_refusals_leave_nothing(place, tmp_path):
    out = tmp_path / "out"
    refused(lambda: stitch(place / "hf", place / "run", place / "hf", force=True), "same")
    refused(lambda: stitch(place / "hf", place / "run", place / "run", force=True), "same")
    refused(lambda: stitch(place / "hf", place / "bare", out), "bare has no heads")
    refused(lambda: stitch(place / "run", place / "run", out), "Megatron")
    shutil.copytree(place / "other", tmp_path / "odd")
    edit_config(tmp_path / "odd", layer_norm_epsilon=1e-6)
    refused(
        lambda: stitch(place / "hf", tmp_path / "odd", out), "layernorm_epsilon 1e-05 and 1e-06"
    )
    edit_config(tmp_path / "odd", layer_norm_epsilon=1e-5)
    names = ["mtp.layers.1.norm.weight", "mtp.layers.0.eh_proj.weight"]
    edit(tmp_path / "odd", lambda tensors: [tensors[name].fill_(float("nan")) for name in names])
    refused(lambda: stitch(place / "hf", tmp_path / "odd", out), "NaN", *names)
    edit(tmp_path / "odd", lambda tensors: [tensors.pop(name) for name in names])
    refused(lambda: stitch(place / "hf", tmp_path / "odd", out), "2 missing", *names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd"]


TOY = toy_config(family="", position_embedding_type="rope", rotary_percent=0.5, activation="swiglu")
EXPERTS = dict(num_moe_experts=4, moe_ffn_hidden_size=12, moe_router_topk=2)
CONFIGS = {
    "mamba and attention": TOY.replace(pattern="M*-", mtp_pattern="*-"),
    "yarn": TOY.replace(pattern="*-", yarn_factor=4.0, yarn_attention_factor=1.2),
    "experts": TOY.replace(pattern="*E", mtp_pattern="*E", **EXPERTS),
    "gated delta nets": TOY.replace(pattern="G-*-", mtp_pattern="G-", **DELTA),
}
UNRELATED = {
    *(
        "family",
        "vocab_size",
        "pattern",
        "max_position_embeddings",
        "tie_word_embeddings",
        "init_std",
    ),
    *("bos_token_id", "eos_token_ids", "pad_token_id"),
}
"""Settings that heads do not depend on."""
INSTEAD = {
    "position_embedding_type": "none",
    "activation": "relu2",
    "moe_router_score_function": "softmax",
    "mamba_chunk_size": 256,
}


def other_value(config, key, value):
    """The config with another valid value of one setting; None if no such value was found."""
    numbers = [2 * value, value / 2, value + 1, value - 1] if type(value) in (int, float) else []
    whole = [int(number) for number in numbers if type(value) is int and number == int(number)]
    for instead in (INSTEAD.get(key), *([not value] if type(value) is bool else whole or numbers)):
        with contextlib.suppress(UserError):
            if instead is not None and instead != value:
                return config.replace(**{key: instead})
    return None


def opened(base: ModelConfig, trained: ModelConfig) -> list[SimpleNamespace]:
    """Two model directories of which only path and config are asked for."""
    return [
        SimpleNamespace(path=Path("base"), config=base),
        SimpleNamespace(path=Path("run"), config=trained),
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_setting_that_heads_depend_on_must_agree(name):
    """Refusals name the setting; those that heads do not depend on are no reason to refuse."""
    trained = CONFIGS[name]
    tried = set()
    heads = {key for letter in trained.mtp.pattern for key in keys_of(SECTIONS[letter]).values()}
    everywhere = heads | keys_of(ModelConfig).keys()
    for key, value in trained.values().items():
        base = (
            None
            if key.startswith("mtp_") or key not in everywhere
            else other_value(trained, key, value)
        )
        if base is None:
            continue
        tried.add(key)
        if key in UNRELATED:
            _with_heads(*opened(base, trained))
            continue
        with pytest.raises(UserError, match=rf"differ, .*\b{key} ") as caught:
            _with_heads(*opened(base, trained))
        assert len(str(caught.value).splitlines()) == 1
        assert fingerprint_config(base) != fingerprint_config(trained)
    assert {"hidden_size", "layernorm_epsilon"} <= tried and len(tried - UNRELATED) > 8
    if "*" in trained.mtp.pattern:
        assert {"rotary_base", "rotary_percent", "position_embedding_type"} <= tried


def test_files_that_cannot_be_linked(place, tmp_path, monkeypatch):
    def elsewhere(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", elsewhere)
    action = lambda: stitch(place / "hf", place / "run", tmp_path / "out", link=True)  # noqa: E731
    refused(action, "leave --link out", error=StorageError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("held", [1, 2**30])
def test_hashing_holds_no_more_than_its_budget(place, tmp_path, monkeypatch, held):
    """Four threads that hash a large tensor each, before and after, would hold eight. What was
    hashed is given back."""
    running = 0
    most = 0
    lock = threading.Lock()
    plain = stitching._sha256
    given_back: list[Path] = []
    monkeypatch.setattr(HFReader, "give_back", lambda reader: given_back.append(reader.directory))

    def watched(tensor: torch.Tensor) -> bytes:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1
        return plain(tensor)

    monkeypatch.setattr(stitching, "_sha256", watched)
    monkeypatch.setattr(stitching, "Budget", lambda: Budget(held))
    hashed = stitch(place / "bare", place / "run", tmp_path / "out").hashed
    assert (
        hashed > 8 and given_back.count(place / "bare") == hashed and len(given_back) == 2 * hashed
    )
    assert most == 1 if held == 1 else most > 1


def test_a_disk_that_changes_a_byte_is_noticed(place, tmp_path, monkeypatch):
    copy = shutil.copyfile

    def damaging(source, target):
        copy(source, target)
        if target.suffix == ".safetensors":
            content = bytearray(target.read_bytes())
            content[-1] ^= 1
            target.write_bytes(content)

    monkeypatch.setattr(shutil, "copyfile", damaging)
    refused(
        lambda: stitch(place / "hf", place / "run", tmp_path / "out"),
        "not as in",
        error=MtpkitError,
    )
    assert list(tmp_path.iterdir()) == []


def test_the_command(place, tmp_path, capsys):
    assert convert("stitch", place / "hf", place / "run", tmp_path / "out", "--link") == 0
    out = capsys.readouterr().out
    assert "12 tensors of heads" in out
    assert "24 tensors unchanged: 0 by their SHA-256, 24 in files that are the source's own" in out
    assert convert("stitch", place / "hf", place / "run", tmp_path / "out") == 2
    assert (
        convert("stitch", place / "hf", place / "run", tmp_path / "out", "--copy", "--force") == 0
    )
    out = capsys.readouterr().out
    assert "24 tensors unchanged: 24 by their SHA-256, 0 in files that are the source's own" in out
