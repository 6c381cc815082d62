"""The scripts in benchmarks/peers, as far as they can run without the peers: stand-ins take the
place of vLLM."""

import asyncio
import importlib
import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
import typer
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from typer.testing import CliRunner

import mtpkit
from mtpkit.bench.load.requests import draw_prompts, draw_requests, save_requests
from mtpkit.bench.settings import AgentConfig, LoadConfig
from mtpkit.bench.sizes import NEMOTRON_H_8B, NEMOTRON_H_TINY
from mtpkit.checkpoint import load_config
from mtpkit.model.backends import get_backend
from mtpkit.model.hybrid import stack_spec
from mtpkit.platform import CpuInsteadOfCuda, ensure_distributed

FOLDER = Path(mtpkit.__file__).parent.parent / "benchmarks" / "peers"
CONFIG = LoadConfig(num_prompts=6, prompt_median=20, prompt_max=70, output_median=16, output_max=40)


@pytest.fixture
def script(monkeypatch):
    """A script of the folder, as a module."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture
def run(script):
    """Run a script with options; returns its exit code and what it printed."""

    def run(name, *options):
        app = typer.Typer()
        app.command()(script(name).main)
        result = CliRunner().invoke(app, [*map(str, options)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    return run


@pytest.fixture
def requests_file(tmp_path):
    save_requests(tmp_path / "requests.json", CONFIG, 512)
    return tmp_path / "requests.json"


@pytest.fixture
def config_directory(run, tmp_path):
    assert run("write_config", tmp_path / "config", "--model", "nemotron-h-tiny")[0] == 0
    return tmp_path / "config"


def last_line(text):
    return json.loads(text.splitlines()[-1])


def test_requests_are_read_as_they_were_saved(script, requests_file, capsys):
    peer = script("peer")
    found = peer.read_requests(requests_file)
    requests = draw_requests(CONFIG)
    assert [one.prompt_token_ids for one in found] == draw_prompts(requests, 512, CONFIG.seed)
    assert [(one.max_tokens, one.arrival) for one in found] == [
        (one.max_tokens, one.arrival) for one in requests
    ]
    for text in ("no json", "{}", '{"requests": [{"prompt": 1}]}'):
        requests_file.write_text(text)
        with pytest.raises(typer.Exit):
            peer.read_requests(requests_file)
        error = capsys.readouterr().err
        assert "is no file of requests" in error and "mtpkit bench load --save-requests" in error


def test_a_config_directory_describes_the_shape(run, tmp_path):
    assert run("write_config", tmp_path, "--max-model-len", 4096, "--pattern", "*-")[0] == 0
    shape = NEMOTRON_H_8B.replace(
        family="nemotron_h", max_position_embeddings=4096, mtp_pattern="*-"
    )
    assert load_config(tmp_path) == shape
    code, text = run("write_config", tmp_path, "--model", "gpt")
    assert code == 2 and "gpt is none of nemotron-h-8b" in text


def test_acceptance_is_unconditional_as_vllm_takes_it(script, config_directory):
    arguments = script("peer").vllm_arguments(config_directory, 3, [0.85, 0.85, 0.5], 100, 8, 64)
    speculation = arguments["speculative_config"]
    assert speculation["synthetic_acceptance_rates"] == pytest.approx([0.85, 0.7225, 0.36125])
    assert (speculation["num_speculative_tokens"], speculation["rejection_sample_method"]) == (
        3,
        "synthetic",
    )
    assert (
        not arguments["enable_prefix_caching"] and arguments["mamba_ssm_cache_dtype"] == "float32"
    )
    assert "speculative_config" not in script("peer").vllm_arguments(
        config_directory, 0, [], 100, 8, 64
    )


def test_percentiles_are_numpys(script):
    values = [n * n % 17 / 10 for n in range(40)]
    found = script("peer").percentiles_ms(values)
    assert found == pytest.approx([1e3 * np.percentile(values, percent) for percent in (50, 99)])
    assert script("peer").percentiles_ms([]) is None


def test_a_missing_peer_is_named_with_what_to_install(
    run, requests_file, config_directory, monkeypatch
):
    monkeypatch.setitem(sys.modules, "vllm", None)
    given = ["--model", config_directory, "--requests", requests_file]
    for name, options in (("vllm_load", given), ("vllm_decode", given[:2])):
        code, text = run(name, *options)
        assert code == 2 and "vllm cannot be imported" in text and "install vllm==0.24.0" in text
        assert len(text.splitlines()) == 1
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    code, text = run("megatron_train", "--model", config_directory)
    assert code == 2 and "install megatron-core==0.19.2" in text


def test_directories_without_a_config_are_refused(run, requests_file, tmp_path):
    given = ["--model", tmp_path, "--requests", requests_file]
    for name, options in (
        ("vllm_load", given),
        ("vllm_decode", given[:2]),
        ("megatron_train", given[:2]),
    ):
        code, text = run(name, *options)
        assert (
            code == 2
            and "has no config.json; write one: python benchmarks/peers/write_config.py" in text
        )


class FakeLLM:
    """Answers with as many tokens as were asked for, the engine in steps of two."""

    made: ClassVar[list[dict]] = []
    short = 0

    def __init__(self, **arguments):
        self.made.append(arguments)
        self.llm_engine = self
        self.waiting = {}

    def generate(self, prompts, params, use_tqdm):
        return [answer(str(n), one.max_tokens - self.short) for n, one in enumerate(params)]

    def add_request(self, request_id, prompt, params):
        self.waiting[request_id] = (0, params.max_tokens)

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def step(self):
        self.waiting = {
            name: (min(count + 2, most), most) for name, (count, most) in self.waiting.items()
        }
        outputs = [answer(name, count) for name, (count, _) in self.waiting.items()]
        self.waiting = {
            name: (count, most) for name, (count, most) in self.waiting.items() if count < most
        }
        return outputs


class FakeAsyncLLM:
    """Streams two tokens at once."""

    prompts: ClassVar[list[list[int]]] = []
    closed = 0

    @classmethod
    def from_engine_args(cls, arguments):
        assert arguments.disable_log_stats
        return cls()

    async def generate(self, prompt, params, request_id):
        self.prompts.append(prompt["prompt_token_ids"])
        for count in range(0, params.max_tokens, 2):
            yield answer(request_id, min(2, params.max_tokens - count))

    def shutdown(self):
        FakeAsyncLLM.closed += 1


def answer(request_id, count):
    return SimpleNamespace(request_id=request_id, outputs=[SimpleNamespace(token_ids=[0] * count)])


@pytest.fixture
def vllm(monkeypatch):
    """vLLM's names, as far as the scripts use them."""
    parts = {
        "vllm": {"LLM": FakeLLM, "SamplingParams": SimpleNamespace, "__version__": "0.24.0"},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": SimpleNamespace},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": FakeAsyncLLM},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(DELTA=1)},
    }
    for name, attributes in parts.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(FakeLLM, "made", [])
    monkeypatch.setattr(FakeAsyncLLM, "prompts", [])
    monkeypatch.setattr(FakeAsyncLLM, "closed", 0)


def test_requests_queued_at_once(run, vllm, requests_file, config_directory, monkeypatch):
    given = [
        "--model",
        config_directory,
        "--requests",
        requests_file,
        "--num-speculative-tokens",
        3,
    ]
    code, text = run("vllm_load", *given, "--repeats", 2)
    found = last_line(text)
    (row,) = found["rows"]
    assert code == 0 and (row["request_rate"], row["k"], len(row["run_seconds"])) == ("inf", 3, 2)
    requests = draw_requests(CONFIG)
    assert row["tokens_per_s"] == pytest.approx(
        sum(one.max_tokens for one in requests) / row["seconds"]
    )
    assert row["ttft_ms"] is row["itl_ms"] is None and row["first_seconds"] == row["run_seconds"][0]
    assert found["peer"] == "vllm 0.24.0" and found["benchmark"] == "vllm_load"
    (arguments,) = FakeLLM.made
    assert arguments["max_model_len"] == max(one.prompt_len + one.max_tokens for one in requests)
    assert (arguments["max_num_seqs"], arguments["max_num_batched_tokens"]) == (128, 8192)
    monkeypatch.setattr(FakeLLM, "short", 1)
    code, text = run("vllm_load", *given)
    assert code == 2 and "6 of 6 outputs have another length" in text


def test_requests_that_arrive_one_by_one(run, vllm, requests_file, config_directory, monkeypatch):
    """The host stalls once, between reading the clock and going to sleep."""
    slept = []
    sleep = asyncio.sleep

    async def stalling(delay: float) -> None:
        slept.append(delay)
        if len(slept) == 3:
            time.sleep(0.02)
        await sleep(delay)

    monkeypatch.setattr(asyncio, "sleep", stalling)
    given = ["--model", config_directory, "--requests", requests_file]
    code, text = run(
        "vllm_load", *given, "--request-rate", 500, "--request-rate", 1000, "--repeats", 1
    )
    rows = last_line(text)["rows"]
    requests = draw_requests(CONFIG)
    assert (
        code == 0
        and [row["request_rate"] for row in rows] == [500, 1000]
        and FakeAsyncLLM.closed == 1
    )
    prompts = draw_prompts(requests, 512, CONFIG.seed)
    assert FakeAsyncLLM.prompts == prompts * 2  # in the order of their arrival
    for row in rows:
        assert row["seconds"] >= requests[-1].arrival / row["request_rate"]
        assert (
            0 <= row["ttft_ms"][0] <= row["ttft_ms"][1]
            and row["itl_ms"][0] >= 0
            and row["tpot_ms"] >= 0
        )
    code, text = run("vllm_load", *given, "--request-rate", 8, "--request-rate", "inf")
    assert code == 2 and "run them separately" in text
    code, text = run("vllm_load", *given, "--request-rate", 0)
    assert code == 2 and "must be positive" in text


def test_a_request_that_fails_ends_the_run(run, vllm, requests_file, config_directory, monkeypatch):
    """It does not wait for the requests that have yet to arrive."""
    slept = []
    sleep = asyncio.sleep

    async def counting(delay: float) -> None:
        slept.append(delay)
        await sleep(delay)

    async def failing(self, prompt, params, request_id):
        raise RuntimeError("out of memory")
        yield

    monkeypatch.setattr(asyncio, "sleep", counting)
    monkeypatch.setattr(FakeAsyncLLM, "generate", failing)
    with pytest.raises(ExceptionGroup) as caught:
        run(
            "vllm_load",
            "--model",
            config_directory,
            "--requests",
            requests_file,
            "--request-rate",
            5,
        )
    assert caught.group_contains(RuntimeError, match="out of memory")
    assert 1 <= len(slept) < len(draw_requests(CONFIG))


def test_a_row_of_two_streams(script):
    load = script("vllm_load")
    requests = [load.Request([1], 5, 0.0), load.Request([1], 1, 2.0)]
    first = load.Run(9.0, [0.0, 1.0], [[5.0, 9.0], [2.0]], [[2, 5], [1]])
    later = load.Run(3.0, [0.0, 1.0], [[1.0, 3.0], [2.5]], [[3, 5], [1]])
    row = load.summarize(2.0, 3, 80.0, requests, [first, later])
    assert (row.start_seconds, row.first_seconds, row.seconds, row.tokens_per_s) == (
        80.0,
        9.0,
        3.0,
        2.0,
    )
    assert (
        row.ttft_ms == pytest.approx([1250, 1495])
        and row.itl_ms == [2000, 2000]
        and row.tpot_ms == 500
    )


def test_decoding(run, vllm, config_directory):
    given = ["--model", config_directory, "--batch-size", 2, "--batch-size", 3, "--vocab-size", 99]
    code, text = run(
        "vllm_decode", *given, "--prompt-length", 4, "--max-tokens", 20, "--repeats", 2
    )
    found = last_line(text)
    assert code == 0 and [row["batch_size"] for row in found["rows"]] == [2, 3]
    for row in found["rows"]:  # each step brings two tokens per request
        assert row["tokens_per_s"] == pytest.approx(2 * row["batch_size"] / row["step_ms"] * 1e3)
        assert len(row["run_tokens_per_s"]) == 2
    (arguments,) = FakeLLM.made
    assert (arguments["max_num_seqs"], arguments["max_model_len"]) == (3, 24)
    code, text = run("vllm_decode", *given, "--max-tokens", 2)
    assert code == 2 and "--max-tokens is 2: no step lies between" in text


def test_a_window_ends_before_a_request_may(script):
    decode = script("vllm_decode")
    params = SimpleNamespace(max_tokens=20)
    assert decode.time_window(FakeLLM(), [[1], [2]], params, "a", 15)[::2] == (2 * 14, 7)


def test_a_training_step_moves_the_heads_alone(script, monkeypatch):
    """On a CPU, with mtpkit's layers in place of Transformer Engine's, inside megatron-core's own
    heads."""
    train = script("megatron_train")
    shape = NEMOTRON_H_TINY.replace(mtp_pattern="*-")

    def local_layers(config):
        config.mtpkit = shape
        backend = get_backend("local")
        spec = stack_spec(backend, shape)
        norm = backend.norm
        head = MultiTokenPredictionLayerSubmodules(
            enorm=norm,
            hnorm=norm,
            eh_proj=backend.column_linear,
            mtp_model_layer=None,
            layer_norm=norm,
        )
        layer = ModuleSpec(MultiTokenPredictionLayer, submodules=head)
        spec.submodules.mtp_block_spec.submodules.layer_specs = [layer]
        return spec

    monkeypatch.setattr(train, "stack_spec", local_layers)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    ensure_distributed(1, 1, 1)
    train.start_process()
    written = {
        "hybrid_override_pattern": shape.pattern,
        "mtp_hybrid_override_pattern": "*-",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 256,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
    }
    with CpuInsteadOfCuda():
        trainer = train.Trainer(written, 2, 16)
        before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
        row = trainer.measure(16, 2, 1, 0)
        after = dict(trainer.model.named_parameters())
    moved = {name for name, parameter in after.items() if not torch.equal(parameter, before[name])}
    assert moved == {name for name in after if name.startswith("module.mtp.")} and len(moved) > 5
    assert (row.sequence_length, row.tokens) == (16, 32) and row.tokens_per_s == pytest.approx(
        32 / row.seconds
    )


def test_shapes_that_were_not_compared_are_refused(script):
    train = script("megatron_train")
    with pytest.raises(typer.Exit):
        train.transformer_config({"mlp_hidden_act": "silu"}, 1, torch.float32)


def test_sessions_go_on_from_their_prefixes(run, vllm, config_directory):
    """Each session computes its prefix, then has one request at a time; its first one does not
    count."""
    lengths = ["--prefix-length", 30, "--fresh-length", 5, "--output-length", 7]
    given = ["--model", config_directory, "--num-speculative-tokens", 7, *lengths]
    code, text = run("vllm_agent", *given, "--concurrency", 2, "--concurrency", 3)
    found = last_line(text)
    assert code == 0 and [row["sessions"] for row in found["rows"]] == [2, 3]
    for row in found["rows"]:
        tokens = 4 * row["sessions"] * 7
        assert row["tokens_per_s"] == pytest.approx(tokens / row["seconds"])
        assert row["user_tokens_per_s"] == pytest.approx(row["tokens_per_s"] / row["sessions"])
        assert row["cached_share"] is None and row["ttft_ms"][0] >= 0
    prompts = FakeAsyncLLM.prompts
    assert [len(one) for one in prompts].count(30) == 5
    assert len({tuple(one) for one in prompts}) == len(prompts) == 5 + 5 * 5
    assert len({tuple(one[:30]) for one in prompts}) == 5 and FakeAsyncLLM.closed == 1


def test_the_rates_of_sessions_are_those_of_the_benchmark(script):
    rule = AgentConfig()
    agent = script("vllm_agent")
    assert list(agent._SEVEN) == rule.rates(7, 7) and list(agent._RATES) == rule.rates("auto", 7)
