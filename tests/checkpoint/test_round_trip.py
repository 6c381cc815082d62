"""Import and export are inverses, bit for bit, and what they write is what transformers and
Megatron read."""

import json
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from mtpkit.checkpoint import load_model, save_model
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.directory import load_config, open_directory
from mtpkit.checkpoint.families.table import MappedTensors, _Step
from mtpkit.checkpoint.tensors import TensorInfo, bits_equal
from mtpkit.checkpoint.verify import compare_weights
from mtpkit.cli import run
from mtpkit.cli.convert import app
from mtpkit.errors import UserError
from tests.checkpoint.builders import GOLDEN, add_heads, write_base

CASES = [
    "tp1/mamba_attention_mlp",
    "tp1/moe",
    "tp1/distinct_heads",
    "tp2/mamba_attention_mlp",
    "tp2/moe",
    "pp2/mamba_attention_mlp",
]


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def disk_items(directory: Path) -> dict[str, tuple | None]:
    """Every key of a `torch_dist` checkpoint with its shape and dtype; None for objects."""
    items = FileSystemReader(directory).read_metadata().state_dict_metadata
    return {
        k: (tuple(v.size), v.properties.dtype) if hasattr(v, "size") else None
        for k, v in items.items()
    }


@pytest.mark.parametrize(
    ("pattern", "heads", "physical", "repeated", "dtype", "changes"),
    [
        ("M*-E", "*E", 1, True, torch.bfloat16, {}),
        ("M-*-", "*-", 2, False, torch.float32, {}),
        ("ME*E", "M*E", 1, True, torch.float32, {"moe_latent_size": 16}),
        ("M*", "", 0, True, torch.float16, {}),
    ],
)
def test_round_trip_is_bitwise_equal(tmp_path, pattern, heads, physical, repeated, dtype, changes):
    write_base(tmp_path / "hf", pattern, dtype=dtype, **changes)
    if heads:
        add_heads(
            tmp_path / "hf", heads, physical, depths=3 if repeated else physical, repeated=repeated
        )
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=20_000)

    before = read_all(tmp_path / "hf")
    after = read_all(tmp_path / "back")
    assert before.keys() == after.keys()
    assert [name for name in before if not bits_equal(before[name], after[name])] == []
    assert (
        load_config(tmp_path / "hf")
        == load_config(tmp_path / "megatron")
        == load_config(tmp_path / "back")
    )
    assert open_directory(tmp_path / "megatron").layout == "megatron"
    assert open_directory(tmp_path / "back").layout == "hf"
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    assert compare_weights(tmp_path / "hf", tmp_path / "megatron").identical
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in before.values())


@pytest.mark.parametrize("case", CASES)
def test_golden_checkpoints_round_trip(tmp_path, case):
    """Saved by Megatron's own layers at any parallelism; what comes back has the same keys, objects
    included."""
    export_checkpoint(GOLDEN / case, tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "back")
    result = compare_weights(GOLDEN / case, tmp_path / "back")
    assert result.identical and len(result.equal) > 20, result
    assert disk_items(tmp_path / "back" / "release") == disk_items(GOLDEN / case / "checkpoint")


@pytest.mark.parametrize("case", ["tp2/moe", "tp1/mla"])
def test_rows_that_fill_up_a_vocabulary_are_left_out(tmp_path, case):
    """Embedding and output layer, and the copies of them that heads of DeepSeek-V3 store."""
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    rows = load_config(GOLDEN / case).vocab_size
    export_checkpoint(GOLDEN / case, whole)
    with pytest.raises(SystemExit) as stop:
        run(app, ["export", str(GOLDEN / case), str(cut), "--vocab-size", str(rows - 5)])
    assert not stop.value.code
    full = read_all(whole)
    fewer = read_all(cut)
    long = [name for name, tensor in full.items() if "embed" in name or "head.weight" in name]
    assert len(long) == (4 if case == "tp1/mla" else 2) and {len(full[name]) for name in long} == {
        rows
    }
    assert all(
        bits_equal(full[name][: rows - 5] if name in long else full[name], fewer[name])
        for name in full
    )
    assert json.loads((cut / "config.json").read_text())["vocab_size"] == rows - 5
    import_checkpoint(cut, tmp_path / "back")
    assert load_model(tmp_path / "back").mtpkit_config.vocab_size == rows - 5
    for wrong in (0, rows + 1):
        with pytest.raises(
            UserError, match=f"vocab_size {wrong}: .* has {rows} rows; give at most as many"
        ):
            export_checkpoint(GOLDEN / case, tmp_path / "wrong", vocab_size=wrong)
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("tp1")])
@pytest.mark.parametrize("way", ["import", "save"])
def test_parts_on_disk_are_megatrons(tmp_path, case, way):
    """Chunks too: one an expert, as megatron-core writes at tensor parallelism 1; of conversion and
    of training."""
    if way == "import":
        export_checkpoint(GOLDEN / case, tmp_path / "hf")
        import_checkpoint(tmp_path / "hf", tmp_path / "back")
    else:
        save_model(load_model(GOLDEN / case), tmp_path / "back")
    theirs = GOLDEN / case / "checkpoint"
    ours = tmp_path / "back" / "release"
    metadata = [FileSystemReader(d).read_metadata() for d in (theirs, ours)]
    parts = [
        {k: getattr(v, "chunks", None) for k, v in m.state_dict_metadata.items()} for m in metadata
    ]
    assert parts[0] == parts[1]
    assert disk_items(theirs) == disk_items(ours)
    texts = [(d / "metadata.json").read_text() for d in (theirs, ours)]
    assert json.loads(texts[0]) == json.loads(texts[1])


def test_transformers_loads_the_export_without_a_word(hf_dir, tmp_path, caplog):
    from transformers import NemotronHForCausalLM
    from transformers.utils import logging as hf_logging

    import_checkpoint(hf_dir, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    hf_logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        model, info = NemotronHForCausalLM.from_pretrained(
            tmp_path / "back", output_loading_info=True
        )
    hf_logging.disable_propagation()
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    assert not [
        r.message for r in caplog.records if "nitialized" in r.message or "MISSING" in r.message
    ]
    original = NemotronHForCausalLM.from_pretrained(hf_dir)
    assert model.config.layers_block_type == original.config.layers_block_type
    tokens = torch.arange(40).reshape(2, 20)
    assert torch.equal(model(tokens).logits, original(tokens).logits)


def test_transformers_loads_an_exported_megatron_checkpoint(tmp_path):
    """One that never was in the Hugging Face layout: dt is not clamped, and `time_step_min` is
    0."""
    from transformers import NemotronHForCausalLM

    golden = load_file(GOLDEN / "tp1/moe/golden.safetensors")
    export_checkpoint(GOLDEN / "tp1/moe", tmp_path / "hf")
    model, info = NemotronHForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"]
    with torch.no_grad():
        logits = model(golden["ids"]).logits
    assert (logits - golden["logits"]).abs().max() < 1e-4 * golden["logits"].abs().max()


class Numbers:
    """Tensors that say their own names."""

    def __init__(self, names: str) -> None:
        self.tensors = {name: TensorInfo((2, 2), torch.float32) for name in names}

    def read(self, name: str) -> torch.Tensor:
        return torch.full((2, 2), float(ord(name)))


def test_threads_may_read_at_once():
    steps = [
        _Step((name,), (name + "x", name + "y"), lambda inputs: list(inputs[0])) for name in "abcd"
    ]
    mapped = MappedTensors(Numbers("abcd"), steps, "here")
    names = ["ax", "by", "cx", "dy", "ay", "bx"] * 3000
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            values = [value[0].item() for value in pool.map(mapped.read, names)]
    finally:
        sys.setswitchinterval(before)
    assert values == [ord(name[0]) for name in names]
