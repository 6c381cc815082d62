"""Rules of the lint for Qwen3-Next and Qwen3.5, and of tied embeddings: each is silent on what is
published."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from mtpkit.checkpoint.families.serving import SERVERS
from mtpkit.checkpoint.lint import lint
from tests.checkpoint.builders import edit, edit_config
from tests.checkpoint.family_models import write_family
from tests.checkpoint.qwen_models import edit_text, write
from tests.checkpoint.test_cli import convert

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
INTERVAL = dict(full_attention_interval=4)
SIZES = dict(vocab_size=24, hidden_size=16, head_dim=8, intermediate_size=12)


def finished(directory, family):
    """What published directories have besides."""
    edit_text(
        directory, **INTERVAL, **({} if family == "qwen3_next" else {"mamba_ssm_dtype": "float32"})
    )
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Directories by family; experts one by one."""
    found = {}
    for family in FAMILIES:
        found[family] = write_family(family, tmp_path_factory.mktemp(family), **SIZES)
        edit(
            found[family],
            lambda tensors: [
                unpack(tensors, name) for name in [*tensors] if ".experts.gate_up" in name
            ],
        )
        finished(found[family], family)
    return found


@pytest.fixture
def copied(published, tmp_path):
    """Make a copy that a test may change."""

    def copy(family):
        return shutil.copytree(published[family], tmp_path / family)

    return copy


def unpack(tensors, name):
    start = name.removesuffix("gate_up_proj")
    both = tensors.pop(name)
    down = tensors.pop(f"{start}down_proj")
    for expert, (fused, last) in enumerate(zip(both, down, strict=True)):
        gate, up = fused.chunk(2)
        for part, weight in (("gate", gate), ("up", up), ("down", last)):
            tensors[f"{start}{expert}.{part}_proj.weight"] = weight.contiguous()


def pack(tensors, start, down=True):
    parts = {}
    for part in ("gate", "up", "down")[: 3 if down else 2]:
        parts[part] = torch.stack(
            [tensors.pop(f"{start}{expert}.{part}_proj.weight") for expert in range(4)]
        )
    tensors[f"{start}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
    if down:
        tensors[f"{start}down_proj"] = parts["down"]


def fatal(directory):
    """What fails, by server."""
    found = [finding for finding in lint(directory) if finding.fatal]
    return {
        server: "\n".join(one.text for one in found if server in one.servers) for server in SERVERS
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_directory_has_no_findings(published, family, capsys):
    assert lint(published[family]) == []
    assert convert("lint", published[family]) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_one_server_reads_the_interval_alone(tmp_path, family):
    types = ["linear_attention", "full_attention"]
    write_family(family, tmp_path, **SIZES, layer_types=types, num_hidden_layers=2)
    edit_text(tmp_path, full_attention_interval=None)
    found = fatal(tmp_path)
    assert (
        "full_attention_interval is absent, which counts as 4: attention is in [1], not in"
        " layers []" in found["sglang"]
    )
    assert "full_attention_interval" not in found["vllm"]
    edit_text(tmp_path, full_attention_interval=2)
    assert "full_attention_interval" not in fatal(tmp_path)["sglang"]


@pytest.mark.parametrize(
    ("dense", "in_vllm"), [({"mlp_only_layers": [0, 2]}, True), ({"mlp_only_layers": [2]}, False)]
)
def test_layers_without_experts(tmp_path, dense, in_vllm):
    """What a server builds where Qwen3-Next has an MLP, in the base and in the head."""
    write_family("qwen3_next", tmp_path, **SIZES, **dense)
    found = fatal(tmp_path)
    assert (
        f"layers {dense['mlp_only_layers']} have no experts, but the server builds experts in every"
        " layer" in found["sglang"]
    )
    assert ("the server then builds the head without experts, too" in found["vllm"]) == in_vllm


def test_packed_experts_of_next(copied):
    directory = copied("qwen3_next")
    edit(directory, lambda tensors: pack(tensors, "model.layers.1.mlp.experts."))
    found = fatal(directory)
    assert found["vllm"] == ""
    names = "model.layers.1.mlp.experts.down_proj, model.layers.1.mlp.experts.gate_up_proj"
    assert found["sglang"] == f"2 tensors of packed experts, which are read one by one: {names}"


@pytest.mark.parametrize(
    "start", ["mtp.layers.0.mlp.experts.", "model.language_model.layers.1.mlp.experts."]
)
def test_experts_that_are_packed_in_part(copied, start):
    """Servers read both ways in one file."""
    directory = copied("qwen3_5_moe")
    edit(directory, lambda tensors: pack(tensors, start, down=False))
    assert lint(directory) == []
    edit(directory, lambda tensors: (unpack_gate(tensors, start), pack(tensors, start)))
    assert lint(directory) == []


def unpack_gate(tensors, start):
    for expert, fused in enumerate(tensors.pop(f"{start}gate_up_proj")):
        for part, weight in zip(("gate", "up"), fused.chunk(2), strict=True):
            tensors[f"{start}{expert}.{part}_proj.weight"] = weight.contiguous()


def test_the_vision_tower_is_built(copied):
    directory = copied("qwen3_5")
    edit(directory, lambda tensors: [tensors.pop(name) for name in [*tensors] if "visual" in name])
    ends, warns = lint(directory)
    assert (
        ends.fatal
        and ends.servers == ("sglang",)
        and "stitch the heads into the original" in ends.text
    )
    assert not warns.fatal and warns.servers == ("vllm",) and "--language-model-only" in warns.text
    assert all("no tensors model.visual.*" in finding.text for finding in (ends, warns))


def test_the_dtype_of_the_state_is_named(copied):
    directory = copied("qwen3_5")
    edit_text(directory, mamba_ssm_dtype=None)
    (found,) = lint(directory)
    assert not found.fatal and "lacks text_config.mamba_ssm_dtype" in found.text


def tied(directory, family):
    write(family, directory, **SIZES, tie_word_embeddings=True)
    return finished(directory, family)


def test_servers_that_do_not_tie(tmp_path):
    """Of Qwen3-Next both want an output layer; of Qwen3.5 and of MiMo both tie."""
    directory = tied(tmp_path / "next", "qwen3_next")
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    assert all(
        "embeddings are tied, but the server ignores that" in text
        for text in fatal(directory).values()
    )
    write_family("mimo", tmp_path / "mimo", tie_word_embeddings=False)
    edit(tmp_path / "mimo", lambda tensors: tensors.pop("lm_head.weight"))
    edit_config(tmp_path / "mimo", tie_word_embeddings=True)
    for other in (tied(tmp_path / "3.5", "qwen3_5"), tmp_path / "mimo"):
        assert not any("tied" in text for text in fatal(other).values())


def test_each_level_says_that_embeddings_are_tied(tmp_path):
    directory = tied(tmp_path, "qwen3_5")
    assert not any("tied" in text for text in fatal(directory).values())
    says = "embeddings are tied, but {}tie_word_embeddings, which is read, does not say so"
    edit_config(directory, tie_word_embeddings=None)
    found = fatal(directory)
    assert says.format("") in found["sglang"] and "tied" not in found["vllm"]
    edit_config(directory, tie_word_embeddings=True)
    edit_text(directory, tie_word_embeddings=None)
    found = fatal(directory)
    assert says.format("text_config.") in found["vllm"] and "tied" not in found["sglang"]
