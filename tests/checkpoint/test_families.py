"""A family is one object: the tests bring one along, and find out which family a checkpoint is
written as."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mtpkit
from mtpkit import LLM, SamplingParams
from mtpkit.checkpoint import load_config, load_model, save_hf_model, save_model
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.directory import open_directory
from mtpkit.checkpoint.families import FAMILIES, find_family, only_fit
from mtpkit.checkpoint.layouts.megatron import parameters
from mtpkit.checkpoint.verify import compare_weights
from mtpkit.errors import UserError, listed
from mtpkit.model import build_model
from mtpkit.model.kinds import KINDS
from tests.checkpoint import family_models
from tests.checkpoint.builders import GOLDEN
from tests.checkpoint.test_cli import convert
from tests.checkpoint.toy_family import TOY, known
from tests.toy_config import DELTA, toy_config


@pytest.fixture
def toy_family():
    with known():
        yield


def test_every_family_has_a_tiny_model_and_is_described():
    """A vision tower more or less makes no other model."""
    page = (Path(mtpkit.__file__).parent.parent / "docs" / "families.md").read_text()
    tiny = family_models.FAMILIES
    assert [name for name in FAMILIES if f"`{name}`" not in page] == []
    assert [name for name in FAMILIES if name.removesuffix("_text") not in tiny] == []


@pytest.fixture
def megatron_dir(tmp_path):
    """A checkpoint that two families can express, and whose config names neither."""
    model = build_model(
        toy_config(family="", pattern="*-*-", mtp_num_depths=2, eos_token_ids=(3,)), seed=5
    )
    save_model(model, tmp_path / "megatron")
    return tmp_path / "megatron"


@pytest.mark.usefixtures("toy_family")
def test_a_family_from_elsewhere_goes_there_and_back(megatron_dir, tmp_path):
    hf = tmp_path / "hf"
    back = tmp_path / "back"
    export_checkpoint(megatron_dir, hf, family="toy")
    import_checkpoint(hf, back)
    assert (
        compare_weights(megatron_dir, back).identical
        and compare_weights(megatron_dir, hf).identical
    )
    config = load_config(hf)
    assert (
        config == load_config(back)
        and config.hybrid_layer_pattern == "*-*-/*-/*-"
        and config.family == "toy"
    )
    values = json.loads((hf / "config.json").read_text())
    assert (
        values["model_type"] == "toy"
        and values["blocks"] == ["look", "think"] * 2
        and values["stop"] == 3
    )
    tensors = load_file(hf / "model.safetensors")
    source = open_directory(megatron_dir).weights()
    assert len(tensors) == 3 + 4 * 3 + 4 + 2 * 3
    assert torch.equal(
        tensors["block_1.wide.weight"].t(), source.read("decoder.layers.1.mlp.linear_fc1.weight")
    )
    embedding, hidden = source.read("mtp.layers.0.eh_proj.weight").chunk(2, dim=1)
    assert torch.equal(tensors["drafter.0.join.weight"], torch.cat([hidden, embedding], dim=1))


@pytest.mark.usefixtures("toy_family")
@pytest.mark.parametrize("k", [0, 2])
def test_a_family_from_elsewhere_decodes(megatron_dir, tmp_path, k):
    export_checkpoint(megatron_dir, tmp_path / "hf", family="toy")
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5, 7, 9]}, {"prompt_token_ids": [1]}]
    models = [
        LLM(directory, num_speculative_tokens=k, device="cpu")
        for directory in (tmp_path / "hf", megatron_dir)
    ]
    outputs = [
        [out.outputs[0].token_ids for out in model.generate(prompts, greedy)] for model in models
    ]
    assert outputs[0] == outputs[1] and all(len(tokens) == 12 for tokens in outputs[0])


@pytest.mark.usefixtures("toy_family")
def test_keys_of_another_family_are_not_kept(hf_dir, tmp_path):
    """The base came in one layout and is written in another."""
    save_model(
        load_model(GOLDEN / "tp1/mamba_attention_mlp"), tmp_path / "megatron", companions=hf_dir
    )
    export_checkpoint(tmp_path / "megatron", tmp_path / "own")
    assert "time_step_max" in json.loads((tmp_path / "own" / "config.json").read_text())
    model = build_model(toy_config(pattern="*-"))
    save_model(model, tmp_path / "two", companions=hf_dir)
    export_checkpoint(tmp_path / "two", tmp_path / "other", family="toy")
    assert "time_step_max" not in json.loads((tmp_path / "other" / "config.json").read_text())


def test_a_config_of_megatron_is_of_the_family_that_fits():
    assert load_config(GOLDEN / "tp1/moe").family == "nemotron_h"
    assert load_config(GOLDEN / "tp1/gated_rope").family == ""


def test_no_family_fits(tmp_path):
    for action in (
        lambda: export_checkpoint(GOLDEN / "tp1/gated_rope", tmp_path / "out"),
        lambda: save_hf_model(load_model(GOLDEN / "tp1/gated_rope"), tmp_path / "out"),
    ):
        with pytest.raises(
            UserError, match=r"fits no family that --family .* nemotron_h cannot .*swiglu"
        ):
            action()
    with pytest.raises(
        UserError, match=r"a nemotron_h config\.json cannot express: activation swiglu"
    ):
        export_checkpoint(GOLDEN / "tp1/gated_rope", tmp_path / "out", family="nemotron_h")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("toy_family")
def test_several_families_fit(megatron_dir, tmp_path, capsys):
    assert convert("export", megatron_dir, tmp_path / "out") == 2
    assert (
        capsys.readouterr().err
        == f"mtpkit: error: {megatron_dir} fits several families, nemotron_h, toy; choose one with"
        " --family\n"
    )
    assert convert("export", megatron_dir, tmp_path / "out", "--family", "toys") == 2
    names = listed(sorted(FAMILIES))
    assert f"--family 'toys' is not supported; supported: {names}" in capsys.readouterr().err
    for name, key in (("toy", "width"), ("nemotron_h", "hidden_size")):
        assert convert("export", megatron_dir, tmp_path / name, "--family", name) == 0
        assert json.loads((tmp_path / name / "config.json").read_text())[key] == 32


def test_the_only_family_that_fits(megatron_dir):
    assert find_family(load_config(megatron_dir)).model_type == "nemotron_h"


@pytest.mark.usefixtures("toy_family")
def test_a_layer_kind_without_names_does_not_fit(tmp_path):
    config = toy_config(pattern="M*-")
    assert list(TOY.misfits(config)) == ["layers of kind mamba2"]
    assert find_family(config.replace(family="")).model_type == "nemotron_h"


def test_a_base_that_families_share_names_none(tmp_path):
    """Attention with biases and gated MLPs is a base of GLM-4-MoE's without experts, and one of
    MiMo's."""
    rotary = dict(position_embedding_type="rope", add_qkv_bias=True, activation="swiglu")
    config = toy_config(family="", pattern="*-*-", mtp_pattern="", mtp_num_depths=0, **rotary)
    assert only_fit(config) == "" and only_fit(config.replace(tie_word_embeddings=True)) == "mimo"
    with pytest.raises(
        UserError, match=r"several families, glm4_moe, mimo; choose one with --family"
    ):
        find_family(config)
    assert find_family(config, "glm4_moe").model_type == "glm4_moe"


@cache
def family_words() -> list[str]:
    """Names of families, and parts of their tensors' names that Megatron's names lack."""
    experts = dict(
        num_moe_experts=2,
        moe_ffn_hidden_size=8,
        moe_shared_expert_intermediate_size=8,
        moe_latent_size=8,
    )
    config = toy_config(pattern="M*-E", **experts, **DELTA)
    words = {part for name in parameters(config) for part in name.split(".")}
    words |= {
        "model",
        "gate",
        "head",
        "input_layernorm",
    }  # which others have too, Megatron's layers of other kinds among them
    found = set()
    for family in FAMILIES.values():
        letters = "".join(letter for letter, kind in KINDS.items() if kind.name in family.layers)
        heads = "".join(letter for letter in config.mtp.pattern if letter in letters)
        own = config.replace(pattern=letters, mtp_pattern=heads)
        if any("moe_latent_size" in misfit for misfit in family.misfits(own)):
            own = own.replace(moe_latent_size=0)
        if any("attention_output_gate" in misfit for misfit in family.misfits(own)):
            own = own.replace(attention_output_gate=True)
        found |= {
            part for name in family.table(own).hf_shapes() for part in name.split(".")
        } - words
        found |= {family.model_type, family.architecture}
    return sorted(word for word in found if not word.isdigit())


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and value of the texts in a source, docstrings left out."""
    tree = ast.parse(source)
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.lineno, node.value


def misplaced(source: str) -> list[tuple[int, str]]:
    """Texts that name a family, or a part of a dotted name as only a family has."""
    words = "|".join(map(re.escape, family_words()))
    names = "|".join(
        re.escape(name)
        for family in FAMILIES.values()
        for name in (family.model_type, family.architecture)
    )
    pattern = re.compile(rf"\b({names})\b|\b({words})\.|\.({words})\b")
    return [(line, text) for line, text in texts(source) if pattern.search(text)]


PARSERS = ("server/settings.py", "server/answers/formats.py")
"""They name formats of tool calls, some of which vLLM calls by a family."""


def test_no_name_of_a_family_stands_outside_its_room():
    root = Path(mtpkit.__file__).parent
    found = {
        str(path.relative_to(root)): lines
        for path in root.rglob("*.py")
        if root / "checkpoint" / "families" not in path.parents
        and str(path.relative_to(root)) not in PARSERS
        and (lines := misplaced(path.read_text()))
    }
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        'family = "nemotron_h"',
        'x = f"{prefix}.q_proj.weight"',
        'names = {"backbone.norm_f.weight": 3}',
        'raise UserError("only NemotronHForCausalLM")',
    ],
)
def test_a_name_of_a_family_is_seen(source):
    assert misplaced(source) and not misplaced(f"'''{source}'''")
