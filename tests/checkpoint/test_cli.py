"""The command: exit codes, what it prints, and that it reads every tensor once."""

import re
import shutil
from collections import Counter

import pytest
import torch

from mtpkit.checkpoint.convert import import_checkpoint
from mtpkit.checkpoint.layouts.huggingface import HFReader
from mtpkit.cli import run
from mtpkit.cli.convert import app
from tests.checkpoint.block_models import add_glm_heads, write_glm
from tests.checkpoint.builders import add_heads, edit, edit_config, write_base


def convert(*args: object) -> int:
    """Exit code of `convert.py ARGS`."""
    with pytest.raises(SystemExit) as stop:
        run(app, [str(arg) for arg in args])
    return int(stop.value.code or 0)


def test_there_and_back(hf_dir, tmp_path, capsys):
    assert convert("import", hf_dir, tmp_path / "megatron") == 0
    assert (
        convert("export", tmp_path / "megatron", tmp_path / "back", "--max-shard-gb", "0.001") == 0
    )
    assert convert("verify", hf_dir, tmp_path / "back", "--logits") == 0
    out = capsys.readouterr().out
    assert "tensors are equal bit for bit" in out
    assert "logits of depth 3: largest relative difference 0, 100.0% of tokens the same" in out


def test_an_import_warns_of_a_tokenizer_without_its_vocabulary(hf_dir, tmp_path, capsys):
    source = tmp_path / "source"
    megatron = tmp_path / "megatron"
    shutil.copytree(hf_dir, source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink(missing_ok=True)
    assert convert("import", source, megatron) == 0 and not capsys.readouterr().err
    (source / "tokenizer_config.json").write_text("{}")
    assert convert("import", source, megatron, "--force") == 0
    warning = (
        f"mtpkit: warning: the tokenizer is incomplete: {megatron} has no tokenizer.json; copy it"
        " there"
    )
    assert capsys.readouterr().err.splitlines() == [warning]


def test_verify_names_what_differs(hf_dir, tmp_path, capsys):
    import_checkpoint(hf_dir, tmp_path / "megatron")

    def nudge(tensors):
        tensors["backbone.layers.1.mixer.k_proj.weight"][0, 0] += 1

    edit(hf_dir, nudge)
    assert convert("verify", hf_dir, tmp_path / "megatron", "--logits") == 1
    out = capsys.readouterr().out
    shares = [float(share) for share in re.findall(r"([0-9.]+)% of tokens the same", out)]
    assert len(shares) == 4 and 0 <= min(shares) < 100
    assert "1 differ: decoder.layers.1.self_attention.linear_qkv.weight (differs by up to 1)" in out


def test_verify_of_two_published_directories_speaks_their_names(tmp_path, capsys):
    write_base(tmp_path / "base", "M*-")
    add_heads(tmp_path / "base", "*")
    changes = {
        "heads": "mtp.layers.0.mixer.q_proj.weight",
        "both": "backbone.layers.1.mixer.k_proj.weight",
    }
    for source, (name, tensor) in zip(("base", "heads"), changes.items(), strict=True):
        shutil.copytree(tmp_path / source, tmp_path / name)
        edit(tmp_path / name, lambda tensors, tensor=tensor: tensors[tensor].add_(1))
    write_base(tmp_path / "none", "M*-")

    def said(first, second, code):
        assert convert("verify", tmp_path / first, tmp_path / second) == code
        return capsys.readouterr().out.splitlines()

    equal, differ, parts = said("base", "heads", 1)
    assert differ == "1 differ: mtp.layers.0.mixer.q_proj.weight (differs by up to 1)"
    assert parts == "base equal, heads differ" and int(equal.split()[0]) > 20
    assert said("heads", "both", 1)[1:] == [
        "1 differ: backbone.layers.1.mixer.k_proj.weight (differs by up to 1)",
        "base differs, heads equal",
    ]
    assert said("base", "both", 1)[-1] == "base differs, heads differ"
    assert said("both", "both", 0)[1:] == ["base equal, heads equal"]
    assert said("none", "none", 0)[1:] == ["base equal, no heads"]
    assert said("base", "none", 1)[-1] == "base equal, heads differ"
    for name in ("base", "heads"):
        import_checkpoint(tmp_path / name, tmp_path / f"{name}-megatron")
    for second in ("heads", "heads-megatron"):  # as soon as one is Megatron's, its names
        _, differ, parts = said("base-megatron", second, 1)
        assert differ.startswith(
            "1 differ: mtp.layers.0.mtp_model_layer.layers.0.self_attention.linear_qkv.weight"
        )
        assert parts == "base equal, heads differ"


def test_verify_leaves_out_copies_that_one_directory_lacks(tmp_path, capsys):
    """An export of heads trained by mtpkit has them, some published files do not."""
    write_glm(tmp_path / "first")
    add_glm_heads(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    edit(tmp_path / "second", lambda tensors: tensors.pop("model.layers.3.embed_tokens.weight"))
    assert convert("verify", tmp_path / "first", tmp_path / "second") == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["base equal, heads equal"]


@pytest.mark.parametrize(
    ("first", "second", "depths"),
    [
        (dict(depths=3), None, 3),
        (None, dict(depths=2), 2),
        (dict(physical=2, depths=2, repeated=False), dict(depths=3), 2),
        (dict(depths=2), {}, 0),
    ],
)
def test_logits_of_heads_for_other_numbers_of_depths(tmp_path, capsys, first, second, depths):
    """Repeated heads, as published (None: of unknown depths) and trained, distinct heads and
    none."""
    for name, options in (("first", first), ("second", second)):
        write_base(tmp_path / name, "M*")
        if options != {}:
            add_heads(tmp_path / name, "*", **(options or {}))
        if options is None:
            edit_config(tmp_path / name, mtpkit=None)
    same_heads = first is None or second is None
    assert convert("verify", tmp_path / "first", tmp_path / "second", "--logits") == (
        0 if same_heads else 1
    )
    out = capsys.readouterr().out
    assert "logits of base: largest relative difference 0, 100.0% of tokens the same" in out
    assert re.findall(r"logits of ([a-z0-9 ]+):", out) == [
        "base",
        *(f"depth {n + 1}" for n in range(depths)),
    ]


def test_user_errors_are_one_line_and_exit_2(tmp_path, capsys):
    assert convert("import", tmp_path / "nowhere", tmp_path / "out") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert convert("melt", tmp_path, tmp_path) == 2


def test_every_tensor_is_read_once(hf_dir, tmp_path, monkeypatch):
    """Though `in_proj` becomes five tensors and q, k, v one: nothing is read ahead or twice."""
    reads: Counter[str] = Counter()
    original = HFReader.read

    def read(self: HFReader, name: str) -> torch.Tensor:
        reads[name] += 1
        return original(self, name)

    monkeypatch.setattr(HFReader, "read", read)
    import_checkpoint(hf_dir, tmp_path / "megatron")
    assert reads == Counter(HFReader(hf_dir).tensors.keys())
