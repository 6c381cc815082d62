"""The first lines of a run, its log, and its forecast."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mtpkit.checkpoint import load_config as load_model_config
from mtpkit.checkpoint import save_model
from mtpkit.cli.train import app
from mtpkit.config import SECTIONS
from mtpkit.errors import MtpkitError
from mtpkit.model.flops import head_parameters
from mtpkit.model.stages import stage_patterns
from mtpkit.training import loop
from mtpkit.training.config.reading import load_config
from mtpkit.training.config.settings import DataConfig, OptimizerConfig, ParallelConfig, TrainConfig
from mtpkit.training.header import FORECAST_STEPS, Forecast, duration, held_bytes
from mtpkit.training.heads import freeze_base, resolve_init
from mtpkit.training.log import LOG
from mtpkit.training.loop import describe_run, train
from mtpkit.training.optimizer import HeadOptimizer
from tests.toy_config import DELTA
from tests.training.toy import CONFIG, toy_model

EXPERTS = dict(num_moe_experts=4, moe_ffn_hidden_size=16, moe_shared_expert_intermediate_size=24)
LATENT = dict(q_lora_rank=12, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8)


@pytest.fixture
def settings(run_settings, tmp_path):
    return run_settings(
        **{"steps": 3, "data.eval_sequences": 4, "log_interval": 1, "data.global_batch_size": 4}
    )


def lines_of(text):
    """Lines of a log without their times, which must be there."""
    lines = text.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line) for line in lines)
    return [line[21:] for line in lines]


def model_of(pattern, **changes):
    needed = (
        (EXPERTS if "E" in pattern else {})
        | (LATENT if "+" in pattern else {})
        | (DELTA if "G" in pattern else {})
    )
    return toy_model(pattern=pattern, mtp_pattern=pattern, **needed, **changes)


@pytest.mark.parametrize("repeated", [True, False])
@pytest.mark.parametrize("letter", sorted(SECTIONS))
def test_the_trained_parameters_are_those_of_the_model(letter, repeated):
    model = model_of(letter, mtp_num_depths=2, mtp_use_repeated_layer=repeated)
    assert head_parameters(model.mtpkit_config) == sum(
        part.numel() for part in freeze_base(model).values()
    )


def config_of(**changes):
    config = dict(data=DataConfig(train=("unused",)), dtype="float32", backend="local") | changes
    return TrainConfig("unused", "unused", **config)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_is_what_the_model_and_its_optimizer_hold(kind, tied, dtype):
    """Within what Muon keeps besides a momentum for vectors, and the padding of buffers."""
    model = toy_model(
        getattr(torch, dtype), pattern="M*-E", mtp_pattern="*E", tie_word_embeddings=tied, **EXPERTS
    )
    options = OptimizerConfig(kind=kind)
    optimizer = HeadOptimizer(freeze_base(model).values(), options)
    weights = sum(part.numel() * part.element_size() for part in model.parameters())
    held = sum(
        tensor.nbytes for buffer in optimizer.buffers for tensor in (buffer.flat, *state_of(buffer))
    )
    (told,) = held_bytes(config_of(dtype=dtype, optimizer=options), model.mtpkit_config, 1)
    assert told == pytest.approx(weights + held, rel=5e-3)


def state_of(buffer):
    return [tensor for region in buffer.regions for tensor in region.tensors.values()]


def test_stages_and_cached_bases_need_less_memory():
    model = CONFIG.replace(pattern="M-M-M-", mtp_pattern="*-")
    whole = held_bytes(config_of(), model, 1)
    stages = held_bytes(config_of(parallel=ParallelConfig(pipeline=3)), model, 3)
    embedding = 4 * model.vocab_size * model.hidden_size
    assert len(stage_patterns(model, 3)) == len(stages) == 3
    assert sum(stages) == whole[0] + embedding  # the last stage has a copy for the heads
    assert held_bytes(config_of(cache="somewhere"), model, 1)[0] < whole[0]
    shared = held_bytes(config_of(), model, 4)
    assert whole[0] - shared[0] == 12 * head_parameters(model) * 3 / 4


def test_a_dry_run_prints_the_lines_with_which_the_run_begins(settings, tmp_path):
    words = [*settings, "optimizer.warmup_steps=5"]
    dry = CliRunner().invoke(app, [*words, "--dry-run"])
    assert dry.exit_code == 0 and not (tmp_path / "run").exists()
    wet = CliRunner().invoke(app, words)
    assert wet.exit_code == 0, wet.output
    shown = dry.stdout.splitlines()
    said = wet.stdout.splitlines()
    assert len(shown) > 10 and said[: len(shown)] == shown
    assert max(len(line) for line in shown if str(tmp_path.parent) not in line) <= 80
    kept = lines_of((tmp_path / "run" / LOG).read_text())
    warning = "warning: optimizer.warmup_steps 5 exceeds steps 3: the warm-up takes 3 steps"
    assert warning in kept and [line for line in kept if line != warning] == said
    text = " ".join(" ".join(shown).split())
    for part in (
        (
            "pattern *, 2 depths, one block for all, attention serving; init base (auto): copies of"
            " the base's last"
        ),
        f"{head_parameters(load_model_config(tmp_path / 'run')):,} parameters; the base is frozen",
        "1 document, ",
        " tokens in ",
        "sequences of 32",
        "3, each of 4 sequences: 384 tokens in all, ",
        "1: data 1 x tensor 1 x pipeline 1",
        "float32 on cpu, backend local, AdamW",
        "GiB on a rank",
        "(an estimate)",
        "not known for this device before its first steps; 3 steps to go",
    ):
        assert part in text


def test_documents_without_anything_to_learn_are_not_counted(settings, tmp_path):
    rows = [{"text": "the cat sat on the mat"}] * 3 + [{"text": ""}] * 2
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ["data.text_column=text", f"data.train=[{tmp_path / 'few.jsonl'}]", "data.eval=[]"]
    (line,) = (
        line
        for line in describe_run(load_config(None, [*settings, *names]))
        if line.startswith("data ")
    )
    assert line.startswith("data     3 documents, ")


def test_metrics_say_when_and_how_much_was_read(settings):
    output = train(load_config(None, settings))
    lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    sequences = int(
        re.search(r"in ([\d,]+) sequences", (output / LOG).read_text())[1].replace(",", "")
    )
    assert [line["kind"] for line in lines] == ["eval", "train", "train", "train", "eval"]
    for line in lines:
        assert line["tokens"] == line["step"] * 4 * 32
        assert line["epoch"] == pytest.approx(line["step"] * 4 / sequences)
    times = [line["time"] for line in lines]
    assert (
        times == sorted(times) and abs(times[-1] - (output / "metrics.jsonl").stat().st_mtime) < 60
    )


def test_the_log_goes_on_with_the_run_and_ends_with_its_error(settings, tmp_path, monkeypatch):
    output = train(load_config(None, [*settings, "steps=2"]))
    first = (output / LOG).read_text()

    def broken(*_):
        raise MtpkitError("the disk is on fire")

    monkeypatch.setattr(loop, "train_step", broken)
    with pytest.raises(MtpkitError):
        train(load_config(None, settings))
    assert (output / LOG).read_text() == first  # nothing was trained: the directory is as it was
    monkeypatch.undo()
    step = loop.train_step

    def fails_later(*args):
        return broken() if args[-1] == 3 else step(*args)

    monkeypatch.setattr(loop, "train_step", fails_later)
    with pytest.raises(MtpkitError):
        train(load_config(None, [*settings, "steps=5"]))
    whole = (output / LOG).read_text()
    assert whole.startswith(first)
    more = lines_of(whole[len(first) :])
    assert more[0].startswith("model ") and more[-1] == "error: the disk is on fire"
    assert any(line.startswith("step 3 of 5: loss") for line in more)


def test_auto_starts_from_the_base_where_it_has_the_layers(tmp_path):
    base = CONFIG.replace(pattern="M*", mtp_pattern="", mtp_num_depths=0)
    assert resolve_init("auto", base, "*") == "base"
    assert resolve_init("auto", base, "*-") == "fresh"
    assert resolve_init("fresh", base, "*") == "fresh"
    assert resolve_init("auto", CONFIG, "*") == "checkpoint"


@pytest.mark.parametrize(("pattern", "init"), [("*-", "base"), ("*E", "fresh")])
def test_the_header_says_how_heads_start(settings, tmp_path, tokenizer_dir, pattern, init):
    save_model(
        toy_model(vocab_size=300, mtp_pattern="", mtp_num_depths=0, **EXPERTS), tmp_path / "base"
    )
    for file in tokenizer_dir.iterdir():
        (tmp_path / "base" / file.name).write_bytes(file.read_bytes())
    words = [*settings, f"model={tmp_path / 'base'}", f"heads.pattern={pattern}", "--dry-run"]
    text = " ".join(CliRunner().invoke(app, words).stdout.split())
    assert f"init {init} (auto)" in text
    assert f"init {init}:" in " ".join(
        CliRunner().invoke(app, [*words, f"heads.init={init}"]).stdout.split()
    )


def test_the_forecast_is_told_once_and_leaves_out_the_first_step():
    forecast = Forecast(1000)
    told = [forecast.add(seconds) for seconds in (100.0, *([2.0] * 20))]
    (text,) = [one for one in told if one is not None]
    left = 1000 - FORECAST_STEPS
    assert told.index(text) == FORECAST_STEPS - 1
    assert f"{duration(2 * left)} for the {left} steps that are left, at 2 s per step" in text
    assert all(Forecast(FORECAST_STEPS).add(1.0) is None for _ in range(FORECAST_STEPS))


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        (0.2, "1 s"),
        (59.4, "59 s"),
        (61, "1 min 1 s"),
        (7260, "2 h 1 min"),
        (3 * 86400 + 7300, "3 d 2 h"),
    ],
)
def test_durations(seconds, says):
    assert duration(seconds) == says
