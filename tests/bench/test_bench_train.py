"""The training benchmark drives the trainer's step, and its figures hang together."""

import dataclasses

import pytest
import torch

from mtpkit.bench import train
from mtpkit.bench.shapes import get_base
from mtpkit.bench.sizes import NEMOTRON_H_8B, NEMOTRON_H_TINY
from mtpkit.bench.timing import Stopwatch
from mtpkit.bench.train import TrainBenchConfig, measure_training
from mtpkit.errors import MtpkitError, UserError
from mtpkit.model.kinds import KINDS

GPU = torch.cuda.is_available()
CONFIG = TrainBenchConfig(sequence_lengths=(32,), dtype="float32", steps=2, warm_up_steps=1)


def measure(**changes):
    (row,) = measure_training(
        get_base("nemotron-h-tiny"), dataclasses.replace(CONFIG, **changes), "tiny"
    ).rows
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


@pytest.mark.parametrize("cached", [False, True])
def test_the_figures_hang_together(cached, monkeypatch):
    calls = []
    step = train.train_step
    monkeypatch.setattr(train, "train_step", lambda *args: calls.append(args) or step(*args))
    row = measure(micro_batch_size=2, micro_batches=2, document_len=10, cached=cached)
    assert len(calls) == 3 and row.tokens == 128
    assert row.tokens_per_s == pytest.approx(128 / row.seconds)
    assert row.seconds == pytest.approx(
        row.base_seconds + row.heads_seconds + row.optimizer_seconds
    )
    assert min(row.heads_seconds, row.optimizer_seconds) > 0
    # Matrices, and a little for norms and convolutions.
    want = flops(NEMOTRON_H_TINY, "*-", 3, base=not cached)
    assert want < row.flops_per_token < 1.05 * want
    assert row.flops_per_s == pytest.approx(row.flops_per_token * row.tokens_per_s)
    assert 0 < row.matrix_share < 1 and row.peak_memory is None and row.mfu is None
    assert (row.base_seconds == 0) == cached
    model, batches = calls[0][:2]
    assert not any(parameter.requires_grad for parameter in model.decoder.parameters())
    assert batches[0].documents[0].tolist() == [0] * 10 + [1] * 10 + [2] * 10 + [3] * 2
    assert batches[0].document_lens == (10, 10, 10, 2) * 2
    assert not torch.equal(batches[0].token_ids, batches[1].token_ids)


@pytest.mark.parametrize(
    ("config", "pattern"),
    [
        (get_base("qwen3-next-tiny"), "*E"),
        (get_base("nemotron-3-tiny"), "*E"),
        (get_base("deepseek-v3-tiny"), "+E"),
        (NEMOTRON_H_TINY, "*"),
    ],
)
def test_heads_have_layers_of_the_base_or_those_of_its_heads(config, pattern, monkeypatch):
    """`*-` has no sizes in a base with experts and no MLPs."""
    settings = []
    step = train.train_step
    monkeypatch.setattr(
        train, "train_step", lambda *args: settings.append(args[0].config.mtpkit) or step(*args)
    )
    result = measure_training(config, CONFIG, "tiny")
    assert (
        settings[0].mtp.pattern == result.settings["pattern"] == pattern
        and f"heads {pattern} x 3" in result.title
    )


@pytest.mark.parametrize(("distinct", "attention"), [(False, "serving"), (True, "per_depth")])
def test_auto_is_settled_as_in_training(distinct, attention):
    config = dataclasses.replace(CONFIG, k=2, steps=1, distinct=distinct, backend="auto")
    settings = measure_training(get_base("nemotron-h-tiny"), config, "tiny").settings
    assert (CONFIG.attention, CONFIG.backend) == ("auto", "local")
    assert settings["attention"] == attention and settings["backend"] in (
        ["local", "te"] if GPU else ["local"]
    )


def test_mfu_is_of_the_stated_peak_and_not_of_the_measured_rate(monkeypatch):
    monkeypatch.setattr(train, "find_peak", lambda device: (1e15, None))
    row = measure()
    assert row.mfu == pytest.approx(row.flops_per_s / 1e15) and row.mfu != row.matrix_share


def test_a_loss_that_is_not_finite_is_refused(monkeypatch):
    step = train.train_step

    def broken(*args):
        sums, norm = step(*args)
        sums.values[0, 1] = torch.nan
        return sums, norm

    monkeypatch.setattr(train, "train_step", broken)
    with pytest.raises(MtpkitError, match="the loss kl is not finite"):
        measure()


@pytest.mark.parametrize("reports", [True, False])
def test_ranks_that_do_not_report_show_no_progress(reports, monkeypatch, capsys):
    monkeypatch.setattr(train, "has_results", lambda: reports)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    measure()
    assert bool(capsys.readouterr().err) == reports


def test_settings_that_cannot_be_measured_are_all_named():
    with pytest.raises(
        UserError, match=r"micro_batches is 0.*; document_length is -1.*; steps is 0"
    ):
        dataclasses.replace(CONFIG, micro_batches=0, steps=0, document_len=-1)
    with pytest.raises(
        UserError,
        match=r"serving attention.*; cached hidden states leave no base",
    ):
        dataclasses.replace(
            CONFIG,
            distinct=True,
            attention="serving",
            cached=True,
            base_fp8=True,
        )


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
    row = measure(dtype="bfloat16", sequence_lengths=(256,))
    assert row.peak_memory > 0 and row.base_seconds > 0
