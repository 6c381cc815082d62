"""Prompts that are timed are computed, although engines have a prefix cache where nobody asks."""

import pytest
import torch

from mtpkit.bench.decode import DecodeConfig, measure_decode
from mtpkit.bench.load import measure_load
from mtpkit.bench.settings import LoadConfig, PrefillConfig, SpeedupConfig, StallConfig
from mtpkit.bench.shapes import open_model
from mtpkit.bench.speedup import measure_speedup
from mtpkit.engine import LLM, SamplingParams

PROMPTS = [{"prompt_token_ids": list(range(20, 40))}]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
LOAD = LoadConfig(
    num_prompts=2,
    prompt_max=20,
    output_max=8,
    repeats=1,
    engine={"max_num_seqs": 2, "max_num_batched_tokens": 64},
)
STALL = StallConfig(decoding_requests=1, arriving_prompts=1, arriving_length=32, lone_length=(8,))
RUNS = {
    "decode": lambda model: measure_decode(
        model,
        DecodeConfig(batch_size=(1,), num_speculative_tokens=(0,), prompt_length=8, max_tokens=40),
    ),
    "load": lambda model: measure_load(model, LOAD),
    "prefill": lambda model: measure_load(
        model, LOAD, PrefillConfig(batch_size=1, prompt_length=8)
    ),
    "speedup": lambda model: measure_speedup(
        model, PROMPTS, SpeedupConfig(num_speculative_tokens=(0,), sampling=GREEDY, repeats=1)
    ),
    "stall": lambda model: measure_load(model, LOAD, STALL),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_benchmarks_have_no_prefix_cache(run, monkeypatch):
    made = []
    make = LLM.__init__

    def watch(self, *args, **settings):
        make(self, *args, **settings)
        made.append(self.engine.config.enable_prefix_caching)

    monkeypatch.setattr(LLM, "__init__", watch)
    run(open_model("nemotron-h-tiny", torch.device("cpu")))
    assert made and not any(made)
