"""The training benchmark times the trainer's own steps, and its figures hang together."""

import dataclasses
import shutil

import pytest
import torch

from mtpkit.bench import train
from mtpkit.bench.settings import TrainBenchConfig
from mtpkit.bench.shapes import get_base
from mtpkit.bench.sizes import NEMOTRON_H_8B, NEMOTRON_H_TINY
from mtpkit.bench.timing import Stopwatch
from mtpkit.bench.train import measure_training
from mtpkit.bench.train_cases import small_settings, training_cases
from mtpkit.checkpoint import save_model
from mtpkit.errors import MtpkitError, UserError
from mtpkit.model import build_model
from mtpkit.model.kinds import KINDS
from mtpkit.platform import ensure_distributed
from mtpkit.training import loop
from mtpkit.training.config.reading import load_config
from mtpkit.training.metrics import read_metrics
from mtpkit.training.parallel import has_results
from mtpkit.training.plan import Plan
from tests.ranks import run_ranks

GPU = torch.cuda.is_available()
CONFIG = TrainBenchConfig(steps=2, warm_up_steps=1)
SMALL = ("data.sequence_length=32", "data.global_batch_size=1", "dtype=float32")


def results(*settings, model="nemotron-h-tiny", **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return measure_training(get_base(model), training_cases([*SMALL, *settings]), config, model)


def measure(*settings, **changes):
    (row,) = results(*settings, **changes).rows
    return row


def flops(config, pattern, k, base=True) -> float:
    """From the shapes of matrices alone."""
    matrices = sum(KINDS[letter].matrices(config).used for letter in config.pattern) if base else 0
    head = (
        sum(KINDS[letter].matrices(config).used for letter in pattern) + 2 * config.hidden_size**2
    )
    return 2 * matrices + 6 * k * head + 4 * k * config.vocab_size * config.hidden_size


def test_the_count_is_the_one_of_the_field():
    """25.0 GFLOP a token of Nemotron-H-8B with three depths of `*-`."""
    assert flops(NEMOTRON_H_8B, "*-", 3) == pytest.approx(25.0e9, rel=2e-3)


@pytest.fixture
def steps(monkeypatch):
    """Model and batches of each step that the trainer takes."""
    taken = []
    step = loop.train_step
    monkeypatch.setattr(loop, "train_step", lambda *args: taken.append(args[:2]) or step(*args))
    return taken


@pytest.mark.parametrize("cache", ["", "memory"])
def test_the_figures_hang_together(cache, steps, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = measure(
        "data.micro_batch_size=2", "data.global_batch_size=4", f"cache={cache}", document_length=10
    )
    assert len(steps) == 3 and row.tokens == 128
    assert row.tokens_per_s == pytest.approx(128 / row.seconds)
    assert row.seconds == pytest.approx(
        row.base_seconds + row.heads_seconds + row.optimizer_seconds
    )
    assert min(row.heads_seconds, row.optimizer_seconds) > 0
    # Matrices, and a little for norms and convolutions.
    want = flops(NEMOTRON_H_TINY, "*-", 3, base=not cache)
    assert want < row.flops_per_token < 1.05 * want
    assert row.flops_per_s == pytest.approx(row.flops_per_token * row.tokens_per_s)
    assert 0 < row.matrix_share < 1 and row.peak_memory is None and row.mfu is None
    assert (row.base_seconds == 0) == bool(cache)
    model, batches = steps[0]
    assert not any(parameter.requires_grad for parameter in model.decoder.parameters())
    assert batches[0].documents[0].tolist() == [0] * 10 + [1] * 10 + [2] * 10 + [3] * 2
    assert batches[0].document_lens == (10, 10, 10, 2) * 2
    tokens = torch.cat([batch.token_ids for batch in batches])
    assert len(tokens.unique(dim=0)) == 4 and not list(tmp_path.iterdir())


CONSTANT = ("optimizer.lr=1e-3", "optimizer.min_lr=1e-3", "optimizer.warmup_steps=0")
"""Settings that make steps independent of the length of the run."""


@pytest.mark.parametrize(
    "settings", [["loss.kind=kl"], ["loss.kind=ce", "optimizer.kind=muon", "heads.num_depths=2"]]
)
def test_losses_are_those_of_a_run_from_files(settings, tokenizer_dir, tmp_path, monkeypatch):
    """The run starts from the drawn weights, saved as a model, and reads the drawn tokens."""
    settings = [*SMALL, *CONSTANT, *settings, "data.global_batch_size=2", "seed=3"]
    row = measure(*settings)

    base = get_base("nemotron-h-tiny")
    shutil.copytree(tokenizer_dir, tmp_path / "model")
    save_model(build_model(base, torch.float32, "cpu", seed=3), tmp_path / "model")
    asked = load_config(
        None,
        [
            f"model={tmp_path / 'model'}",
            f"output={tmp_path / 'run'}",
            "data.train=[random]",
            "heads.init=fresh",
            *settings,
            "steps=3",
            "log_interval=1",
        ],
    )
    ensure_distributed()
    tokens = train.RandomPlan(asked, base).train_data
    monkeypatch.setattr(Plan, "open_data", lambda self, paths: tokens)
    lines = read_metrics(loop.train(asked) / "metrics.jsonl")
    losses = [line["loss"] for line in lines]
    assert row.mean_loss == losses[-1] and len(set(losses)) == 3


def measured_by_two(rank, parallel, alone):
    result = results(*CONSTANT, "data.global_batch_size=2", *parallel)
    if has_results():
        (row,) = result.rows
        assert row.mean_loss == pytest.approx(alone["mean_loss"], rel=1e-5)
        assert row.tokens == 64 and row.flops_per_token == alone["flops_per_token"]
        assert row.flops_per_s == pytest.approx(row.flops_per_token * row.tokens_per_s / 2)
        assert result.settings["world_size"] == 2


@pytest.mark.parametrize(
    "parallel", [[], ["parallel.tensor=2"], ["parallel.pipeline=2", "parallel.balance=time"]]
)
def test_two_ranks_share_the_work_of_one(parallel):
    row = measure(*CONSTANT, "data.global_batch_size=2")
    run_ranks(measured_by_two, parallel, dataclasses.asdict(row))


def test_each_pair_of_a_length_and_a_loss_has_its_row():
    kept = []
    cases = training_cases([*SMALL, "data.sequence_length=16,32", "loss.kind=ce,tv"])
    result = measure_training(
        get_base("nemotron-h-tiny"), cases, CONFIG, "tiny", lambda one: kept.append(len(one.rows))
    )
    pairs = [(16, "ce"), (16, "tv"), (32, "ce"), (32, "tv")]
    assert [(row.sequence_length, row.loss) for row in result.rows] == pairs
    assert kept == [1, 2, 3, 4]
    assert result.settings["data.sequence_length"] == [16, 16, 32, 32]
    assert result.settings["loss.kind"] == ["ce", "tv"] * 2
    alone = measure("data.sequence_length=32", "loss.kind=tv")
    assert result.rows[-1].mean_loss == alone.mean_loss  # each case has weights of its own


@pytest.mark.parametrize(
    ("model", "pattern"),
    [
        ("qwen3-next-tiny", "*E"),
        ("nemotron-3-tiny", "*E"),
        ("deepseek-v3-tiny", "+E"),
        ("nemotron-h-tiny", "*-"),
    ],
)
def test_heads_have_layers_of_the_base_or_those_of_its_heads(model, pattern, steps):
    """`*-` has no sizes in a base with experts and no MLPs."""
    result = results(model=model)
    assert steps[0][0].mtpkit_config.mtp.pattern == result.settings["heads.pattern"] == pattern
    assert f"heads {pattern} x 3" in result.title


@pytest.mark.parametrize(("repeated", "attention"), [("true", "serving"), ("false", "per_depth")])
def test_auto_is_settled_as_in_training(repeated, attention):
    settings = results(f"heads.repeated={repeated}", steps=1).settings
    assert settings["heads.attention"] == attention
    assert settings["backend"] in (["local", "te"] if GPU else ["local"])


@pytest.mark.parametrize("init", ["base", "checkpoint", "auto"])
def test_heads_may_start_as_in_any_run(init):
    """Shapes have no heads, but those of DeepSeek-V3; `auto` continues from them."""
    model = "nemotron-h-tiny" if init == "base" else "deepseek-v3-tiny"
    settings = results(f"heads.init={init}", model=model, steps=1).settings
    assert settings["heads.init"] == ("base" if init == "base" else "checkpoint")


def test_mfu_is_of_the_stated_peak_and_not_of_the_measured_rate(monkeypatch):
    monkeypatch.setattr(loop, "find_peak", lambda device: (1e15, None))
    row = measure()
    assert row.mfu == pytest.approx(row.flops_per_s / 1e15) and row.mfu != row.matrix_share


def test_a_loss_that_is_not_finite_is_refused(monkeypatch):
    step = loop.train_step

    def broken(*args):
        sums, norm = step(*args)
        sums.values[0, 1] = torch.nan
        return sums, norm

    monkeypatch.setattr(loop, "train_step", broken)
    with pytest.raises(MtpkitError, match="step 1: NaN or infinity in the loss of depth 2"):
        measure()


@pytest.mark.parametrize("reports", [True, False])
def test_ranks_that_do_not_report_show_no_progress(reports, monkeypatch, capsys):
    monkeypatch.setattr(train, "has_results", lambda: reports)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    measure()
    assert bool(capsys.readouterr().err) == reports


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("heads.depth=2", "there is no setting 'heads.depth'; did you mean heads.num_depths?"),
        ("loss.kind=ce,l2", "override loss.kind=l2: loss.kind is 'l2', must be 'kl', 'tv' or 'ce'"),
        ("loss.top_k=3,4", "override loss.top_k=3,4: loss.top_k is '3,4', must be a whole number"),
        ("fast", "overrides must be key=value, such as steps=100, not fast"),
        ("steps=9", "steps is not set here, since --steps and --warm-up-steps say how many"),
        ("model=x", "model is not set here, since --model names the shape"),
        ("heads.pattern=E", "heads.pattern=E has 'E' (mixture of experts), whose sizes the config"),
        ("parallel.tensor=2", "the number of processes, 1, is no multiple of 2"),
        ("data.micro_batch_size=3", "global_batch_size 1 is not a multiple of data.micro_batch_s"),
    ],
)
def test_wrong_settings_end_in_the_errors_of_training(setting, says):
    with pytest.raises(UserError) as error:
        measure(setting)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_settings_that_cannot_be_measured_are_all_named():
    says = r"steps is 0.*; warm_up_steps is -1.*; document_length is 1"
    with pytest.raises(UserError, match=says):
        dataclasses.replace(CONFIG, steps=0, warm_up_steps=-1, document_length=1)


def test_a_cpu_starts_with_short_sequences():
    assert small_settings(["loss.kind=ce"]) == ["data.sequence_length=128"]
    assert small_settings(["data.sequence_length=8"]) == []


def test_the_stopwatch_adds_up_spans(device):
    watch = Stopwatch(torch.device(device))
    for name in ("a", "b", "a"):
        with watch.span(name):
            torch.ones(300, 300, device=device) @ torch.ones(300, 300, device=device)
    first = watch.take()
    assert set(first) == {"a", "b"} and min(first.values()) > 0
    assert watch.take() == {}


@pytest.mark.gpu
def test_on_the_gpu_memory_is_seen():
    row = measure("dtype=bfloat16", "data.sequence_length=256")
    assert row.peak_memory > 0 and row.base_seconds > 0
