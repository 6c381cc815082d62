"""Bad input and failing disks: one line that names the thing, and nothing left behind."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from mtpkit.checkpoint import (
    load_checkpoint,
    load_config,
    load_model,
    open_directory,
    save_checkpoint,
)
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.directory import HFDirectory
from mtpkit.checkpoint.families.table import MappedTensors
from mtpkit.checkpoint.layouts.torch_dist import MegatronReader
from mtpkit.checkpoint.verify import compare_weights
from mtpkit.errors import MtpkitError, StorageError, UserError
from tests.checkpoint.builders import GOLDEN, edit, edit_config
from tests.shared import each


def fails(action, *words: str, error: type[MtpkitError] = UserError) -> None:
    """The action raises one line that holds all the words."""
    with pytest.raises(error) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    assert not [word for word in words if word not in text], text


def left_over(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.name not in ("hf", "megatron"))


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            drop("backbone.norm_f.weight", "mtp.layers.1.norm.weight"),
            ["2 missing", "backbone.norm_f.weight", "mtp.layers.1.n"],
        ),
        (
            lambda t: t.update({"mtp.layers.7.norm.weight": torch.ones(3)}),
            ["1 unexpected", "mtp.layers.7.norm.weight"],
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(3, 3)}),
            ["lm_head.weight [3, 3] instead of [96, 32]"],
        ),
        (
            lambda t: t.update(
                {"backbone.layers.1.mixer.k_proj.weight": torch.ones(16, 32).half()}
            ),
            ["k_proj", "one dtype"],
        ),
        (lambda t: t.update({"model.norm_f.weight": torch.ones(32)}), ["norm_f.weight", "twice"]),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(96, 32).to(torch.float8_e4m3fn)}),
            ["lm_head.weight", "float8_e4m3fn"],
        ),
    ],
)
def test_tensors_that_do_not_fit(hf_dir, tmp_path, change, words):
    edit(hf_dir, change)
    fails(lambda: import_checkpoint(hf_dir, tmp_path / "out"), *words)
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("keep", [0, 5, 300, 20_000])
def test_truncated_safetensors(hf_dir, tmp_path, keep):
    file = hf_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    fails(
        lambda: import_checkpoint(hf_dir, tmp_path / "out"),
        "model.safetensors",
        "damaged or cut off",
    )
    fails(lambda: load_model(hf_dir), "model.safetensors")


def test_missing_and_misplaced_shards(tmp_path):
    export_checkpoint(GOLDEN / "tp1/moe", tmp_path / "hf", max_shard_bytes=200_000)
    shards = sorted((tmp_path / "hf").glob("model-*.safetensors"))
    assert len(shards) > 2
    moved = shards[1].rename(tmp_path / "elsewhere")
    fails(lambda: import_checkpoint(tmp_path / "hf", tmp_path / "out"), "missing", shards[1].name)
    shutil.copyfile(shards[0], shards[1])
    fails(lambda: import_checkpoint(tmp_path / "hf", tmp_path / "out"), shards[1].name, "disagree")
    moved.rename(shards[1])
    import_checkpoint(tmp_path / "hf", tmp_path / "out")


@each(
    ("changes", "words"),
    [
        ({"hybrid_override_pattern": "M*QE"}, ["hybrid_override_pattern", "'Q'"]),
        ({"mtp_hybrid_override_pattern": "*+"}, ["mtp_hybrid_override_pattern", "'+'"]),
        ({"layers_block_type": ["moe", "sliding"]}, ["layers_block_type", "sliding"]),
        ({"layers_block_type": None}, ["missing key hybrid_override_pattern"]),
        (
            {"hidden_size": None, "n_groups": None},
            ["missing key hidden_size", "missing key n_groups"],
        ),
        (
            {"mlp_bias": True, "use_bias": True, "mlp_hidden_act": "silu"},
            ["mlp_bias True", "use_bias True", "mlp_hidden_act 'silu'"],
        ),
        ({"norm_topk_prob": "no"}, ["norm_topk_prob"]),
        ({"n_group": 2, "topk_group": 3}, ["topk_group 3", "n_group 2"]),
        ({"n_shared_experts": 0}, ["n_shared_experts 0"]),
        (
            {"moe_shared_expert_intermediate_size": None},
            ["missing key moe_shared_expert_intermediate_size"],
        ),
        ({"n_group": 3, "topk_group": 2}, ["n_group"]),
        ({"scoring_func": "softmax"}, ["scoring_func"]),
        ({"num_nextn_predict_layers": 3}, ["num_nextn_predict_layers 3"]),
        ({"num_hidden_layers": 9}, ["num_hidden_layers 9"]),
        ({"model_type": "llama"}, ["'llama'", "nemotron_h"]),
        ({"quantization_config": {"bits": 8}}, ["quantization_config"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings"]),
    ],
)
def test_configs_that_cannot_be_represented(hf_dir, tmp_path, changes, words):
    directory = shutil.copytree(hf_dir, tmp_path / "model")
    edit_config(directory, **changes)
    fails(lambda: load_config(directory), *words)


def test_directories_that_are_no_models(tmp_path, hf_dir):
    fails(lambda: open_directory(tmp_path / "nowhere"), "nowhere")
    (tmp_path / "empty").mkdir()
    fails(
        lambda: open_directory(tmp_path / "empty"),
        "config.json",
        "metadata.json",
        "latest_checkpointed_iteration.txt",
    )
    fails(lambda: export_checkpoint(hf_dir, tmp_path / "out"), "Hugging Face", "import")
    fails(lambda: import_checkpoint(GOLDEN / "tp1/moe", tmp_path / "out"), "Megatron", "export")
    (hf_dir / "config.json").write_text("{")
    fails(lambda: load_config(hf_dir), "config.json", "JSON")


def test_damaged_megatron_checkpoints(tmp_path):
    shutil.copytree(GOLDEN / "tp1/moe", tmp_path / "megatron")
    data = tmp_path / "megatron/checkpoint/__0_0.distcp"
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    fails(
        lambda: export_checkpoint(tmp_path / "megatron", tmp_path / "out"),
        "__0_0.distcp",
        "damaged or cut off",
    )
    data.unlink()
    fails(lambda: load_model(tmp_path / "megatron"), "__0_0.distcp", "missing")
    (tmp_path / "megatron/checkpoint/.metadata").write_bytes(b"\x80nonsense")
    fails(lambda: load_model(tmp_path / "megatron"), ".metadata", "damaged")
    (tmp_path / "megatron/checkpoint/.metadata").unlink()
    fails(lambda: load_model(tmp_path / "megatron"), ".metadata is missing")
    assert left_over(tmp_path) == []


def test_destinations_are_not_overwritten(hf_dir, tmp_path):
    out = tmp_path / "out"
    import_checkpoint(hf_dir, out)
    fails(lambda: import_checkpoint(hf_dir, out), "holds a checkpoint already", "--force")
    (out / "stale").write_text("")
    import_checkpoint(hf_dir, out, force=True)
    assert not (out / "stale").exists() and compare_weights(hf_dir, out).identical
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("")
    fails(
        lambda: import_checkpoint(hf_dir, tmp_path / "letters", force=True),
        "holds files other than a checkpoint",
    )
    fails(lambda: import_checkpoint(hf_dir, hf_dir, force=True), "same")
    fails(lambda: import_checkpoint(hf_dir, hf_dir / "inside"), "holds the other")
    fails(lambda: import_checkpoint(hf_dir, tmp_path, force=True), "holds the other")


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def disk_fills_up(monkeypatch):
    """Writing works for one tensor."""
    left = [1]
    original = MappedTensors.read

    def read(self, name):
        left[0] -= 1
        return original(self, name) if left[0] >= 0 else full_disk()

    monkeypatch.setattr(MappedTensors, "read", read)


@pytest.mark.usefixtures("disk_fills_up")
def test_full_disk_while_converting(hf_dir, tmp_path):
    fails(
        lambda: import_checkpoint(hf_dir, tmp_path / "out"),
        "out",
        "No space left",
        error=StorageError,
    )
    fails(
        lambda: export_checkpoint(GOLDEN / "tp1/moe", tmp_path / "out"),
        "out",
        "No space left",
        error=StorageError,
    )
    assert left_over(tmp_path) == []


def test_full_disk_leaves_the_replaced_checkpoint(hf_dir, tmp_path, monkeypatch):
    import_checkpoint(hf_dir, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("mtpkit.checkpoint.layouts.torch_dist_write._write_file", full_disk)
        fails(
            lambda: import_checkpoint(hf_dir, tmp_path / "out", force=True),
            "No space left",
            error=StorageError,
        )
    assert left_over(tmp_path) == ["out"]
    assert compare_weights(hf_dir, tmp_path / "out").identical


def test_full_disk_while_saving_a_run(hf_dir, tmp_path, monkeypatch):
    model = load_model(hf_dir)

    def save(iteration):
        state = {"model": model.sharded_state_dict()}
        save_checkpoint(tmp_path / "run", iteration, state, {}, model.mtpkit_config, hf_dir)

    with monkeypatch.context() as patch:
        patch.setattr(
            "megatron.core.dist_checkpointing.strategies.filesystem_async._write_item", full_disk
        )
        fails(lambda: save(1), "iter_0000001", "cannot write", error=StorageError)
        assert left_over(tmp_path) == []
    save(1)
    for step in ("replace_directory", "write_file"):
        with monkeypatch.context() as patch:
            patch.setattr(f"mtpkit.checkpoint.run.{step}", full_disk)
            fails(lambda: save(2), "No space left", error=StorageError)
    names = sorted(p.name for p in (tmp_path / "run").iterdir() if not p.name.endswith(".json"))
    assert names == ["iter_0000001", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "run/latest_checkpointed_iteration.txt").read_text() == "1"


def test_exports_that_have_no_place_in_the_family(tmp_path):
    shutil.copytree(GOLDEN / "tp1/distinct_heads", tmp_path / "megatron")
    later = dict(attention_output_gate=True, layernorm_zero_centered_gamma=True)
    config = load_config(tmp_path / "megatron").replace(
        position_embedding_type="rope", qk_layernorm=True, **later
    )
    (tmp_path / "megatron" / "mtpkit.json").write_text(json.dumps(config.to_dict()))
    fails(
        lambda: export_checkpoint(tmp_path / "megatron", tmp_path / "out"),
        "position_embedding_type rope",
        "qk_layernorm",
        "attention_output_gate True",
        "layernorm_zero_centered_gamma True",
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize(
    ("place", "file", "read"),
    [
        ("hf", "generation_config.json", lambda path: HFDirectory(path).end_token_ids(96)),
        ("hf", "config.json", load_config),
        ("hf", "model.safetensors.index.json", load_model),
        ("megatron", "mtpkit.json", load_config),
        ("megatron", "latest_checkpointed_iteration.txt", load_config),
        ("megatron/release", ".metadata", MegatronReader),
        ("megatron/release", "metadata.json", lambda path: load_checkpoint(path, {})),
        ("megatron/release", "common.pt", lambda path: MegatronReader(path).read_common_state()),
    ],
)
def test_a_link_to_nothing_and_a_pipe_are_not_passed_over(
    hf_dir, tmp_path, place, file, read, kind
):
    """Also where the file need not be there at all."""
    import_checkpoint(hf_dir, tmp_path / "megatron")
    path = tmp_path / place / file
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nothing")
    fails(lambda: read(tmp_path / place), str(path))
