"""Heads put into a base of each quantisation: the base stays as it is, and both servers read from
the lists that the heads are not quantised."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtpkit.checkpoint.families.serving import SERVERS
from mtpkit.checkpoint.lint import lint
from mtpkit.checkpoint.stitch import BASE_FILE, HEADS_FILE, stitch
from tests.checkpoint.builders import add_heads, edit, write_base
from tests.checkpoint.family_models import write_family
from tests.checkpoint.schemes import SCHEMES, write_quantised

SIZES = {
    "nemotron_h": dict(moe_shared_expert_intermediate_size=32),
    "qwen3_5": dict(num_hidden_layers=2, full_attention_interval=2, linear_value_head_dim=8),
    "deepseek_v3": dict(
        num_hidden_layers=2,
        q_lora_rank=16,
        kv_lora_rank=32,
        v_head_dim=8,
        moe_intermediate_size=16,
    ),
}
"""Groups of 16 columns fit every matrix."""
PLACES = {"nemotron_h": "mtp", "qwen3_5": "mtp", "deepseek_v3": "model.layers.2"}
"""Where the modules of heads are."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories in bf16 with heads, by family."""
    return {
        family: write_family(family, tmp_path_factory.mktemp(family), dtype=torch.bfloat16, **sizes)
        for family, sizes in SIZES.items()
    }


def is_of_base(name: str, family: str) -> bool:
    """Whether a name is that of a matrix of the base that quantisers take."""
    if name.startswith((PLACES[family], "model.visual")):
        return False
    return name.endswith("_proj.weight")


def fails(directory: Path) -> dict[str, list[str]]:
    """What fails, by server."""
    found = [one for one in lint(directory) if one.fatal]
    return {server: [one.text for one in found if server in one.servers] for server in SERVERS}


def lists_of(directory: Path) -> list[list[str]]:
    """The lists of modules that are not quantised, in all places."""
    places = [json.loads((directory / "config.json").read_text())["quantization_config"]]
    own = directory / "hf_quant_config.json"
    if own.exists():
        places.append(json.loads(own.read_text())["quantization"])
    keys = ("ignore", "exclude_modules", "modules_to_not_convert", "dynamic")
    return [[*place[key]] for place in places for key in keys if key in place]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", SIZES)
def test_heads_in_bf16(models, tmp_path, family, scheme):
    """Servers complain about what they complained about before, and the base's file is the same."""
    source = models[family]
    place = PLACES[family]
    hf = write_quantised(scheme, source, tmp_path / "hf", lambda name: is_of_base(name, family))
    edit(hf, lambda tensors: [tensors.pop(n) for n in [*tensors] if n.startswith(place)])
    before = (hf / "model.safetensors").read_bytes()
    stitch(hf, source, tmp_path / "out")
    assert (tmp_path / "out" / BASE_FILE).read_bytes() == before
    heads = load_file(tmp_path / "out" / HEADS_FILE)
    assert {tensor.dtype for tensor in heads.values()} <= {torch.bfloat16, torch.float32}

    found = fails(tmp_path / "out")
    if scheme == "GPTQ" and any(".experts." in name for name in heads):
        assert "experts of the heads are not quantised, which" in found["sglang"].pop(0)
    assert found == fails(source)

    lists = lists_of(tmp_path / "out")
    wide = {"modelopt": f"{place}*", "compressed-tensors": f"re:^{re.escape(place)}\\..*"}
    method = SCHEMES[scheme].config["quant_method"]
    assert all((wide.get(method) in entries) == (method in wide) for entries in lists)
    assert len(lists) == (2 if method == "modelopt" else 1) * (1 + bool(SCHEMES[scheme].own))
    stitch(tmp_path / "out", source, tmp_path / "again")
    assert lists_of(tmp_path / "again") == lists


def test_the_heads_that_are_replaced_do_not_count_as_the_base(models, tmp_path):
    """Entries for the new heads may match quantised modules of the old ones."""
    hf = write_quantised(
        "W4A16_NVFP4", models["nemotron_h"], tmp_path / "hf", lambda name: "down_proj" in name
    )
    other = tmp_path / "other"
    write_base(other, dtype=torch.bfloat16, **SIZES["nemotron_h"])
    add_heads(other, "*")
    stitch(hf, other, tmp_path / "out")
    assert all("mtp*" in entries for entries in lists_of(tmp_path / "out"))
