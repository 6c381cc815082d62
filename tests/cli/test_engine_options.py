"""Every option of an engine reaches it from the commands that measure engines, unless the command
sets it itself."""

import json
from types import SimpleNamespace

import pytest
import torch

from mtpkit.bench import decode, shapes
from mtpkit.bench.load import workload
from mtpkit.bench.settings import DecodeConfig, LoadConfig, SpeedupConfig
from mtpkit.cli.main import app
from mtpkit.config.checked import fields_of
from mtpkit.config.parts import part_of
from mtpkit.engine import EngineOptions

OTHERS = {
    "dtype": "float32",
    "quantization": "fp8",
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "enable_expert_parallel": True,
    "disable_custom_all_reduce": True,
    "seed": 5,
    "block_size": 4,
    "max_model_len": 99,
    "max_num_seqs": 7,
    "max_num_batched_tokens": 333,
    "max_mixed_tokens": 17,
    "max_inter_token_latency": 0.5,
    "gpu_memory_utilization": 0.5,
    "num_blocks": 77,
    "kv_cache_dtype": "fp8_e4m3",
    "state_rollback": "snapshot",
    "state_dtype": "bfloat16",
    "enable_prefix_caching": True,
    "prefix_cache_bytes": 1000,
    "prefix_cache_dtype": "bfloat16",
    "prefix_cache_interval": 64,
    "draft_sampling": True,
    "speculative_token_tree": "[2, 1]",
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 3,
    "speculative_budget": "auto",
    "draft_vocab": "vocab.json",
    "draft_embedding_dtype": "int8",
    "draft_lm_head_dtype": "fp8_e4m3",
    "draft_attention_window": 64,
    "draft_attention_sinks": 2,
    "async_scheduling": False,
    "enforce_eager": True,
    "warm_up": False,
}
"""A value of each option that is no default, of an engine or of a benchmark."""

LACKS = {
    "speedup": {"max_num_seqs", "warm_up", "seed"},
    "bench decode": {"max_model_len", "max_num_seqs", "max_inter_token_latency", "warm_up", "seed"},
    "bench load": {
        *(name for name in OTHERS if name.startswith("speculative_")),
        *(name for name in OTHERS if name.endswith("_parallel_size")),
        *("enable_expert_parallel", "disable_custom_all_reduce", "draft_embedding_dtype"),
        *("max_model_len", "seed"),
    },
}
"""Options that a command lacks, since it sets them itself or nothing would come of them."""


class Made(Exception):
    """The engine that is measured would be made now."""


@pytest.mark.parametrize(
    ("command", "config", "module"),
    [
        ("speedup", SpeedupConfig, "speedup"),
        ("bench decode", DecodeConfig, "decode_run"),
        ("bench load", LoadConfig, "load.workload"),
    ],
)
def test_options_reach_the_engine(command, config, module, model_dir, monkeypatch, tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"token_ids": [5, 6], "vocab_size": 300}))
    (tmp_path / "prompts.txt").write_text("the cat\n" * 8)
    monkeypatch.chdir(tmp_path)
    model = shapes.open_model(str(model_dir), torch.device("cpu"))
    made = []

    class Fake:
        """Stands in for an `LLM`, of which `mtpkit speedup` makes one just to load the model."""

        def __init__(self, model, **arguments):
            made.append(arguments)
            if arguments["num_speculative_tokens"] and arguments["max_num_seqs"] > 1:
                raise Made
            self.model = model
            self.tokenizer = SimpleNamespace(encode=lambda text: [1, 2, 3], decode=None)
            self.has_chat_template = False
            self.engine = SimpleNamespace(config=SimpleNamespace(max_model_len=99))

    monkeypatch.setattr(f"mtpkit.bench.{module}.LLM", Fake)
    monkeypatch.setattr("mtpkit.engine.ranks.reports", lambda *sizes: True)
    monkeypatch.setattr(shapes, "open_model", lambda *_: model)
    machine = SimpleNamespace(device="none")
    for place in (decode, workload):
        monkeypatch.setattr(place, "measure_machine", lambda *_, **__: machine)

    part = part_of(fields_of(config)["engine"])
    names = part.names(EngineOptions)
    line = [*command.split(), "--model", str(model_dir), "--num-speculative-tokens", "2"]
    if command != "bench load":
        line += ["--batch-size", "3", "--prompts", "prompts.txt"]
    for name in names:
        value = OTHERS[name]
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            line.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            line += [f"--{flag}", str(value)]
    with pytest.raises(Made):
        app(line, standalone_mode=False)

    reached = made[-1]
    ids = command == "bench decode"
    expected = {name: OTHERS[name] for name in names}
    assert {name: reached[name] for name in names} | {
        "draft_vocab": str(reached["draft_vocab"])
    } == (expected | {"draft_vocab": "[5, 6]" if ids else "vocab.json"})


def test_options_that_commands_lack():
    assert OTHERS.keys() == fields_of(EngineOptions).keys()
    missing = {
        command: OTHERS.keys() - set(part_of(fields_of(config)["engine"]).names(EngineOptions))
        for command, config in zip(LACKS, (SpeedupConfig, DecodeConfig, LoadConfig), strict=True)
    }
    assert missing == LACKS
