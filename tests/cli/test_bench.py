"""`mtpkit bench`: every command runs on a CPU, prints a table and one JSON object, and refuses what
it cannot do."""

import json
import shutil

import pytest
import torch

from mtpkit.bench import drawn, shapes, sizes
from mtpkit.bench.roofline import Roofline
from mtpkit.bench.settings import LARGE_SHAPES, SMALL_SHAPES
from mtpkit.bench.weights import ModelWeights
from mtpkit.checkpoint import load_model, save_hf_model
from mtpkit.checkpoint.convert import import_checkpoint
from mtpkit.checkpoint.matrices import StoredMatrices
from mtpkit.cli.bench import app
from mtpkit.engine import EngineOptions
from mtpkit.model import build_model
from tests.checkpoint.schemes import write_quantised
from tests.shared import each
from tests.toy_config import toy_config

QUANTISABLE = toy_config(
    vocab_size=304,
    pattern="M*E-",
    mtp_pattern="*",
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=32,
    moe_shared_expert_intermediate_size=16,
)


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_roofline(call, capsys, tmp_path):
    options = "--batch-size 1 128 --k 3 --works --ring-entries 8"
    assert call(app, "roofline", *options.split(), "--output", tmp_path) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert [round(row["limit_tokens_per_s"] / 100) for row in found["rows"]] == [7, 267]
    assert "matrix rate" in printed and "draft 3" in printed
    assert json.loads((tmp_path / "roofline.json").read_text()) == found
    options = "--k 3 --batch-size 1 --draft-vocab-size 32768 --acceptance 0.9 0.5"
    assert call(app, "roofline", *options.split()) == 0
    (row,) = last_line(capsys)["rows"]
    assert row["acceptance_length"] == pytest.approx(1 + 0.9 + 0.45 + 0.225)


def test_roofline_has_the_engines_ring(call, capsys):
    assert call(app, "roofline", "--batch-size", 128, "--k", 3, 15) == 0
    assert last_line(capsys)["settings"]["ring_entries"] == [16, 32]


@pytest.mark.parametrize(
    "more",
    [
        "--k 0",
        "--k 2",
        "--k 5 --state-rollback snapshot",
        "--k 5 --state-dtype bfloat16",
        "--k 2 --quantization fp8",
        "--k 2 --weight-format fp8-blocks",
        "--k 2 --weight-format int4",
        "--k 2 --weight-format nvfp4",
    ],
)
def test_decode_and_roofline_have_the_same_limit(more, call, capsys):
    shared = f"--model nemotron-h-tiny --batch-size 3 --draft-vocab-size 100 {more}"
    options = (
        "--prompt-length 9 --max-tokens 40 --repeats 1 --acceptance 0.6 0.3 --dtype float32"
        " --enforce-eager"
    )
    assert call(app, "decode", *shared.split(), *options.split()) == 0
    found = last_line(capsys)
    (row,) = found["rows"]
    acceptance = (
        ["--acceptance", *row["conditional_acceptance"]] if row["conditional_acceptance"] else []
    )
    rates = [
        "--bandwidth",
        found["copy_bandwidth"] / 1e12,
        "--matrix-rate",
        found["matrix_rate"] / 1e12,
        # CPUs have no rate for it.
        "--fp8-rate",
        found["matrix_rate"] / 1e12,
    ]
    context = ["--context-length", 9 + 40 / 2]
    assert (
        call(app, "roofline", *shared.split(), "--dtype", "float32", *context, *acceptance, *rates)
        == 0
    )
    (limit,) = last_line(capsys)["rows"]
    assert limit["limit_tokens_per_s"] == pytest.approx(row["limit_tokens_per_s"], rel=1e-9)
    assert limit["acceptance_length"] == pytest.approx(row["acceptance_length"])


def test_roofline_of_a_directory(model_dir, call, capsys):
    assert call(app, "roofline", "--model", model_dir, "--batch-size", 2, "--k", 1) == 0
    assert last_line(capsys)["settings"]["model"] == str(model_dir)


def quantised(scheme, where):
    """A tiny checkpoint in a layout of quantisers, whose projections are quantised."""
    plain = where / "plain"
    save_hf_model(build_model(QUANTISABLE, device="cpu"), plain)
    return write_quantised(
        scheme, plain, where / "quantised", lambda name: name.endswith("proj.weight")
    )


@pytest.mark.parametrize("scheme", ["fp8 blocks", "ModelOpt FP8", "compressed W4A16", "NVFP4"])
@pytest.mark.parametrize("layout", ["hf", "megatron"])
def test_roofline_counts_a_quantised_directory_as_it_is_loaded(
    scheme, layout, call, capsys, tmp_path
):
    directory = quantised(scheme, tmp_path)
    if layout == "megatron":
        import_checkpoint(directory, tmp_path / "megatron", expand_scales=True)
        directory = tmp_path / "megatron"

    assert call(app, "roofline", "--model", directory, "--batch-size", 3, "--k", 1) == 0
    found = last_line(capsys)
    (row,) = found["rows"]
    model = load_model(directory, torch.bfloat16)
    cost = Roofline.of(model, EngineOptions()).decode(3, [0.85], 512)
    assert row["bytes"] == cost.bytes < Roofline(model.mtpkit_config).decode(3, [0.85], 512).bytes
    assert found["settings"]["weight_formats"] == [*ModelWeights.of(model).formats] != []


def test_roofline_of_a_plain_model_needs_its_config_alone(call, model_dir, tmp_path, capsys):
    for file in model_dir.glob("*.json"):
        if "index" not in file.name:
            shutil.copy(file, tmp_path)
    assert call(app, "roofline", "--model", tmp_path, "--batch-size", 1, "--k", 1) == 0


def test_roofline_reads_no_values(call, tmp_path, monkeypatch, capsys):
    directory = quantised("fp8 blocks", tmp_path)
    monkeypatch.setattr(StoredMatrices, "quantized", None)
    monkeypatch.setattr(StoredMatrices, "read", None)
    assert call(app, "roofline", "--model", directory, "--batch-size", 1, "--k", 1) == 0


@pytest.mark.parametrize("name", ["nemotron-3-tiny", "deepseek-v3-tiny"])
def test_one_layer_of_each_kind_tells_the_weights_of_a_shape(name):
    for weight_format in ("fp8", "fp8-blocks", "int4", "nvfp4"):
        whole = drawn.draw_model(
            sizes.SHAPES[name], torch.bfloat16, torch.device("cpu"), weight_format
        )
        quantization = "fp8" if weight_format == "fp8" else None
        given = None if weight_format == "fp8" else weight_format
        found = shapes.held_weights(name, torch.bfloat16, None, quantization, given)
        assert found == ModelWeights.of(whole)


def test_decode(call, capsys, tmp_path):
    options = (
        "--model nemotron-h-tiny --batch-size 2 --k 0 1 --prompt-length 8 --max-tokens 24"
        " --repeats 1"
    )
    options += " --acceptance 0.5 --state-rollback snapshot --enforce-eager --block-size 8"
    assert call(app, "decode", *options.split(), "--output", tmp_path) == 0
    found = last_line(capsys)
    assert [(row["batch_size"], row["k"]) for row in found["rows"]] == [(2, 0), (2, 1)]
    settings = found["settings"]
    assert settings["synthetic"] and settings["acceptance"] == [0.5] and settings["enforce_eager"]
    assert (settings["state_rollback"], settings["block_size"], settings["prompt_length"]) == (
        "snapshot",
        8,
        8,
    )
    assert {path.name for path in tmp_path.iterdir()} >= {
        "decode.json",
        "decode.md",
        "decode_kernels.json",
    }


@pytest.mark.parametrize("command", ["roofline", "decode"])
@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--batch-size 1 0", "--batch-size is [1, 0], must be at least 1"),
        ("--acceptance 2", "--acceptance is [2.0], must be from 0 to 1"),
    ],
)
def test_an_empty_batch_and_no_rates_are_refused(command, option, says, call, capsys):
    assert call(app, command, "--model", "nemotron-h-tiny", *option.split()) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("command", ["decode", "load"])
def test_a_shape_has_one_format(command, call, capsys):
    options = "--model nemotron-h-tiny --weight-format int4 --quantization fp8"
    assert call(app, command, *options.split()) == 2
    assert "--weight-format / --quantization: give one of them" in capsys.readouterr().err


def test_decode_refuses_what_excludes_each_other(call, capsys, monkeypatch):
    monkeypatch.setattr("mtpkit.bench.timing.can_trace", lambda device: False)
    for options, says in (
        ("--kernels --no-trace", "kernels are timed by tracing"),
        (
            "--model nemotron-h-tiny --pattern=",
            "'--pattern': it is empty: name one, or leave it out",
        ),
        ("--model nemotron-h-tiny --kernels", "tracing needs a GPU, and there is none"),
    ):
        assert call(app, "decode", *options.split()) == 2
        assert says in capsys.readouterr().err


def test_decode_real_prompts_with_real_acceptance(model_dir, call, capsys, tmp_path):
    (tmp_path / "prompts.txt").write_text("the cat\non the mat\n")
    where = ["--model", model_dir, "--prompts", tmp_path / "prompts.txt"]
    options = "--batch-size 2 --k 2 --max-tokens 16 --repeats 1"
    assert call(app, "decode", *where, *options.split()) == 0
    found = last_line(capsys)
    assert (
        not found["settings"]["synthetic"] and len(found["rows"][0]["conditional_acceptance"]) == 2
    )


@pytest.mark.parametrize("option", ["--num-prompts many", "--prompt-length much", "--repeats auto"])
def test_a_text_where_a_number_belongs_is_named_in_one_line(option, call, capsys):
    assert call(app, "load", *option.split()) == 2
    name, text = option.split()
    assert f"'{name}': must be a whole number, not '{text}'" in capsys.readouterr().err


def test_prefill(call, capsys):
    options = (
        "--model nemotron-h-tiny --workload prefill --batch-size 2 --prompt-length 12"
        " --max-num-batched-tokens 16 --repeats 1 --k 1"
    )
    assert call(app, "load", *options.split()) == 0
    (row,) = last_line(capsys)["rows"]
    assert (row["batch_size"], row["prompt_len"], row["max_num_batched_tokens"], row["k"]) == (
        2,
        12,
        16,
        1,
    )


TINY_LOAD = "--model nemotron-h-tiny --repeats 1 --k 1"
LOAD = f"{TINY_LOAD} --num-prompts 3 --prompt-max 20 --output-max 12 --max-num-seqs 2"


def test_load(call, capsys, tmp_path):
    options = f"{LOAD} --request-rate inf 500 --acceptance 0.7 --seed 3"
    assert call(app, "load", *options.split(), "--output", tmp_path) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert [(row["request_rate"], row["k"]) for row in found["rows"]] == [("inf", 1), (500, 1)]
    settings = found["settings"]
    assert (settings["acceptance"], settings["max_num_seqs"], settings["seed"]) == ([0.7], 2, 3)
    assert "TTFT" in printed and f"{settings['output_tokens']} output" in printed
    assert json.loads((tmp_path / "load.json").read_text()) == found


def test_load_with_arriving_prompts(call, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("mtpkit.bench.load.stall._QUIET_STEPS", 4)
    options = (
        "--workload stall --decoding-requests 2 --arriving-prompts 1 --arriving-length 30"
        " --lone-length 8 20"
    )
    assert call(app, "load", *TINY_LOAD.split(), *options.split(), "--output", tmp_path) == 0
    (row,) = last_line(capsys)["rows"]
    assert row["k"] == 1 and len(row["lone_ms"]) == 2 and row["stall"] > 0
    assert (tmp_path / "load_stall.json").exists()


def test_load_of_conversations(call, capsys, tmp_path):
    options = (
        f"{TINY_LOAD} --workload turns --turns 3 --turn-length 9 --conversations 2"
        " --prefix-cache-dtype bfloat16"
    ).split()
    assert call(app, "load", *options, "--output", tmp_path) == 0
    off, on = last_line(capsys)["rows"]
    assert (off["cached"], on["cached"]) == (False, True) and on["hit_share"] > 0.9 > off[
        "hit_share"
    ] == 0
    assert json.loads((tmp_path / "load_turns.json").read_text())["settings"]["turn_length"] == 9


@each(
    ("options", "unused", "workload"),
    [
        ("--turns 3", "--turns", "turns"),
        ("--workload stall --turn-length 9 --turns 3", "--turn-length / --turns", "turns"),
        ("--workload turns --batch-size 2", "--batch-size", "prefill"),
        ("--workload prefill --lone-length 9", "--lone-length", "stall"),
        ("--workload stall --concurrency 9", "--concurrency", "long-agent"),
        ("--workload long-agent --request-rate 3", "--request-rate", "mixed"),
        (
            "--workload turns --num-prompts 3 --max-num-seqs 2",
            "--max-num-seqs / --num-prompts",
            "mixed",
        ),
    ],
)
def test_an_option_of_another_workload_is_refused(options, unused, workload, call, capsys):
    assert call(app, "load", *options.split()) == 2
    assert f"Invalid value for {unused}: this is for --workload {workload}, but" in (
        capsys.readouterr().err
    )


def test_a_load_with_the_prefix_cache_says_its_hits(call, capsys):
    assert call(app, "load", *LOAD.split(), "--enable-prefix-caching") == 0
    printed = capsys.readouterr().out
    assert (
        "hit" in printed.split()
        and json.loads(printed.splitlines()[-1])["rows"][0]["hit_rate"] == 0
    )


def test_requests_of_a_load_are_saved_without_a_gpu(call, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert call(app, "load", "--save-requests", tmp_path / "requests.json") == 0
    assert "512 requests, 305,049 prompt and 124,407 output tokens" in capsys.readouterr().out
    saved = json.loads((tmp_path / "requests.json").read_text())
    assert len(saved["requests"]) == 512 and saved["vocab_size"] == sizes.NEMOTRON_H_8B.vocab_size
    assert (
        call(app, "load", "--workload", "stall", "--save-requests", tmp_path / "requests.json") == 2
    )
    assert "has no requests to save" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--request-rate 0", "--request-rate is [0.0], must be positive"),
        ("--request-rate nan", "--request-rate': must be a finite number"),
        ("--acceptance inf", "--acceptance': must be a finite number"),
        ("--prompt-min 30", "--prompt-min is 30, must be at most --prompt-max, 20"),
        ("--turns 1", "--turns is 1, must be at least 2"),
        ("--lone-length 0", "--lone-length is [0], must be from 1 to"),
        ("--num-speculative-tokens 2000", "--k is [1, 2000], must be from 0"),
    ],
)
def test_a_load_that_cannot_be_is_refused(option, says, call, capsys):
    assert call(app, "load", *LOAD.split(), *option.split()) == 2
    assert says in capsys.readouterr().err


def test_train(call, capsys, tmp_path):
    settings = {
        "heads.num_depths": 2,
        "heads.pattern": "M*",
        "heads.repeated": False,
        "heads.recompute": True,
        "heads.attention": "per_depth",
        "data.global_batch_size": 2,
        "optimizer.kind": "muon",
    }
    command = (
        "train --model nemotron-h-tiny --steps 1 --warm-up-steps 0 --document-length 9"
        " data.sequence_length=24,40 loss.kind=kl,tv,ce"
    )
    given = [f"{key}={value}" for key, value in settings.items()]
    assert call(app, *command.split(), *given, "--output", tmp_path) == 0
    found = last_line(capsys)
    cases = [(row["sequence_length"], row["loss"], row["tokens"]) for row in found["rows"]]
    assert cases == [(n, kind, 2 * n) for n in (24, 40) for kind in ("kl", "tv", "ce")]
    assert found["settings"].items() >= (settings | {"document_length": 9}).items()
    assert json.loads((tmp_path / "train.json").read_text()) == found


@pytest.mark.parametrize(
    "command",
    [
        "decode --model nemotron-h-8b",
        "load --workload prefill --model nemotron-h-8b",
        "load --model nemotron-h-8b",
        "train --model nemotron-h-8b",
        "decode --model nemotron-3-nano",
    ],
)
def test_a_large_shape_needs_a_gpu(command, call, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(drawn, "build_model", lambda *_, **__: pytest.fail("the shape was built"))
    assert call(app, *command.split()) == 2
    error = capsys.readouterr().err
    model = "nemotron-3-nano" if "nano" in command else "nemotron-h-8b"
    assert (
        error
        == f"mtpkit: error: {model} needs a GPU; --model nemotron-h-tiny, or a model directory,"
        " runs on a CPU\n"
    )


def test_without_a_gpu_a_run_starts_small_and_says_so(call, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert call(app, "decode", "--num-speculative-tokens", 1, "--max-tokens", 9) == 0
    printed = capsys.readouterr()
    settings = json.loads(printed.out.splitlines()[-1])["settings"]
    small = {
        "model": "nemotron-h-tiny",
        "batch_size": [1, 4],
        "prompt_length": 64,
        "max_tokens": 9,
        "repeats": 1,
    }
    assert small.items() <= settings.items() and settings["num_speculative_tokens"] == [1]
    assert (
        "mtpkit: no GPU, so this was a small run: --model nemotron-h-tiny --batch-size 1 4"
        " --prompt-length 64 --repeats 1; options make it larger" in printed.err.splitlines()
    )


def test_training_takes_the_keys_of_training(call, capsys, monkeypatch):
    """Those that are given are not made small, and the errors are those of training."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    keys = ["loss.kind=ce,tv", "data.global_batch_size=1", "data.sequence_length=16"]
    assert call(app, "train", "--steps", 1, *keys) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert [(row["sequence_length"], row["loss"]) for row in result["rows"]] == [
        (16, "ce"),
        (16, "tv"),
    ]
    assert result["settings"]["data.global_batch_size"] == 1
    assert printed.err == (
        "mtpkit: no GPU, so this was a small run: --model nemotron-h-tiny --warm-up-steps 1;"
        " options make it larger\n"
    )
    assert call(app, "train", "loss.kind=l2") == 2
    assert "override loss.kind=l2: loss.kind is 'l2', must be" in capsys.readouterr().err


class Done:
    """Stands in for a result."""

    def show(self, as_json: bool) -> None:
        print("shown")


@pytest.mark.parametrize(
    "command",
    [
        "load",
        *(f"load --workload {name}" for name in ("stall", "turns", "prefill", "long-agent")),
        "train",
    ],
)
def test_every_benchmark_is_small_on_a_cpu(command, call, capsys, monkeypatch):
    """Each takes the small model and at least one small number."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for function in ("load.measure_load", "train.measure_training"):
        monkeypatch.setattr(f"mtpkit.bench.{function}", lambda *_, **__: Done())
    assert call(app, *command.split()) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith(
        "mtpkit: no GPU, so this was a small run: --model nemotron-h-tiny --"
    )
    assert printed.err.count("\n") == 1 and printed.out == "shown\n"


def test_saved_requests_are_those_of_a_gpu(call, capsys, tmp_path, monkeypatch):
    """They are made on any machine for the scripts of other engines."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert call(app, "load", "--save-requests", tmp_path / "requests.json") == 0
    assert len(json.loads((tmp_path / "requests.json").read_text())["requests"]) == 512
    assert not capsys.readouterr().err


@pytest.mark.parametrize("command", ["decode", "load", "train", "roofline"])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    command, call, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(shapes, "get_config", lambda *_: pytest.fail("it is found out too late"))
    (tmp_path / "file").touch()
    for out, code, says in (
        (tmp_path / "file", 2, "file is a file; name a directory"),
        (tmp_path / "file" / "x", 1, "x: cannot write: Not a directory"),
        ("/proc/x", 1, "/proc/x: cannot write: No such file or directory"),
    ):
        assert call(app, *command.split(), "--model", "nemotron-h-tiny", "--output", out) == code
        assert says in capsys.readouterr().err


def test_large_shapes_are_those_of_billions_of_weights():
    wide = {name for name, config in sizes.SHAPES.items() if config.hidden_size > 1000}
    assert wide == set(LARGE_SHAPES) and sizes.SHAPES.keys() - wide == set(SMALL_SHAPES)


@each(
    ("command", "error"),
    [
        (
            "decode --model nemotron-h-tiny --prompt-length 2000000000",
            "tokens in all, must be at most 268,435,456",
        ),
        (
            "load --workload prefill --model nemotron-h-tiny --prompt-length 2000000000",
            "tokens in all, must be at most 268,435,456",
        ),
        *(
            (
                f"{command} --draft-vocab-size 513",
                "draft vocabulary of 513 tokens, but the model has 512",
            )
            for command in (
                "decode --model nemotron-h-tiny",
                "roofline --model nemotron-h-tiny",
            )
        ),
        *(
            (f"roofline --{option}", f"'--{option.split()[0]}': must be a finite number")
            for option in ("bandwidth inf", "matrix-rate inf", "context-length inf")
        ),
        ("decode --model nowhere", "model 'nowhere' is neither a shape"),
        (
            "decode --model nemotron-h-tiny --draft-vocab-size 5 --draft-vocab f",
            "give a size or a file",
        ),
        (
            "decode --model nemotron-h-tiny --k 1 some",
            "--k is [1, 'some'], must be a list of one or more numbers or 'auto'",
        ),
        ("load --workload prefill --batch-size 0", "--batch-size is 0, must be at least 1"),
        ("roofline --model nowhere", "model 'nowhere' is neither a shape"),
        ("train --model nowhere", "model 'nowhere' is neither a shape"),
        *(
            (f"train --model nemotron-h-tiny {settings}", error)
            for settings, error in (
                ("loss.kind=kl,mse", "override loss.kind=mse: loss.kind is 'mse', must be"),
                (
                    "heads.repeated=false heads.attention=serving",
                    "heads.attention=serving is for one repeated head",
                ),
                ("data.sequence_length=64,3", "data.sequence_length must be at least 5"),
                ("cache=x parallel.pipeline=2", "set parallel.pipeline=1"),
                ("base_fp8=true dtype=float32", "base_fp8 needs dtype=bfloat16"),
                (
                    "parallel.tensor=4",
                    "the number of processes, 1, is no multiple of 4",
                ),
                ("model=x", "model is not set here, since --model names the shape"),
            )
        ),
    ],
)
def test_what_cannot_be_measured(command, error, call, capsys):
    assert call(app, *command.split()) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("heads", "ks"),
    [
        (dict(mtp_num_depths=2, mtp_use_repeated_layer=False), [0, 1, 2]),
        (dict(mtp_num_depths=0, mtp_pattern=""), [0]),
    ],
    ids=["distinct", "no heads"],
)
def test_k_is_by_default_what_the_model_has(heads, ks, save_model, call, capsys):
    model = save_model(**heads)
    brief = "--batch-size 1 --repeats 1 --max-tokens 24 --prompt-length 4 --no-trace"
    assert call(app, "roofline", "--model", model, "--batch-size", 1) == 0
    assert [row["k"] for row in last_line(capsys)["rows"]] == ks
    assert call(app, "decode", "--model", model, *brief.split()) == 0
    assert [row["k"] for row in last_line(capsys)["rows"]] == ks


def test_a_k_that_heads_cannot_draft_is_refused_before_weights_are_read(
    save_model, call, capsys, monkeypatch
):
    model = save_model(mtp_num_depths=2, mtp_use_repeated_layer=False)
    monkeypatch.setattr(shapes, "load_model", lambda *_: pytest.fail("weights are read"))
    for command in ("decode", "load", "roofline"):
        assert call(app, command, "--model", model, "--k", 3) == 2
        assert (
            "--k is 3, but the model has 2 distinct MTP heads: set it to 2 or less"
            in capsys.readouterr().err
        )
