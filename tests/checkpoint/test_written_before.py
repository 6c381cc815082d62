"""Files that mtpkit wrote before mtpkit.json had every key of a model's layers (commit 0b8aaea)."""

import json
from pathlib import Path

from mtpkit.checkpoint import load_config, load_model
from mtpkit.checkpoint.convert import export_checkpoint
from mtpkit.checkpoint.verify import compare_weights

BEFORE = Path(__file__).parent / "written_before"
"""A small model in both layouts."""


def test_files_load_and_mean_the_same(tmp_path):
    config = load_config(BEFORE / "megatron")
    assert config == load_model(BEFORE / "megatron").mtpkit_config
    # every file had a size of MLP layers, which this model lacks
    assert config.replace(ffn_hidden_size=0) == load_config(BEFORE / "hf")
    assert config.mtp.reads_of_base == "before_final_norm"
    stored = json.loads((BEFORE / "megatron" / "mtpkit.json").read_text())
    written = config.to_dict()
    assert stored.items() <= written.items() and "add_qkv_bias" in written.keys() - stored.keys()
    assert compare_weights(BEFORE / "megatron", BEFORE / "hf").identical

    export_checkpoint(BEFORE / "megatron", tmp_path / "hf")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (BEFORE / "hf" / name).read_bytes()
