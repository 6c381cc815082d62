"""The prefill benchmark: its figures hang together, and wrong tokens are refused."""

from dataclasses import replace

import pytest
import torch

from mtpkit.bench.load import measure_load, workload
from mtpkit.bench.load.prefill import Prefill
from mtpkit.bench.machine import Machine
from mtpkit.bench.roofline import Roofline
from mtpkit.bench.settings import LoadConfig, PrefillConfig
from mtpkit.bench.shapes import open_model
from mtpkit.engine.requests.options import EngineOptions
from mtpkit.errors import MtpkitError, UserError
from mtpkit.model.layers import attention, mamba

ONCE = LoadConfig(num_speculative_tokens=(0,), repeats=1, seed=0)


@pytest.fixture
def model(device):
    return open_model("nemotron-h-tiny", torch.device(device))


def test_the_figures_hang_together(model, device):
    config = LoadConfig(
        num_speculative_tokens=(2,), repeats=5, seed=0, engine={"max_num_batched_tokens": 24}
    )
    result = measure_load(model, config, PrefillConfig(batch_size=3, prompt_length=20), "tiny")
    (row,) = result.rows
    assert row.tokens_per_s == pytest.approx(60 / row.seconds)
    assert result.machine is not None
    assert row.matrix_share == pytest.approx(row.flops_per_s / result.machine.matrix_rate)
    assert 0 < row.matrix_share < row.limit_share < 1
    rate = result.machine.sustained_rate
    assert (rate is None) == (device == "cpu")
    assert row.sustained_share == (rate and pytest.approx(row.flops_per_s / rate))
    assert result.title.startswith("prefill: tiny") and len(result.tables()[0].columns) == 9


def test_shares_are_those_of_the_formats_and_dtypes(monkeypatch):
    """Products in fp8 at their own rate, a state in fp16 by its own bytes."""
    machine = Machine("fake", None, "today", 1e9, 1e9, 1e9, sustained_rate=5e8, fp8_rate=4e9)
    monkeypatch.setattr(workload, "measure_machine", lambda device, sustained: machine)
    model = open_model("nemotron-h-tiny", torch.device("cpu"), weight_format="fp8-blocks")
    config = replace(ONCE, engine={"state_dtype": "float16"})
    result = measure_load(model, config, PrefillConfig(batch_size=1, prompt_length=8), "tiny")
    (row,) = result.rows
    cost = Roofline.of(model, EngineOptions(state_dtype="float16")).prefill(1, 8)
    fp8 = sum(work.fp8_flops for work in cost.works)
    assert fp8 > 0.3 * cost.flops
    for share, rate in ((row.matrix_share, 1e9), (row.sustained_share, 5e8)):
        seconds = (cost.flops - fp8) / rate + fp8 / 4e9
        assert share * row.seconds == pytest.approx(seconds)
    assert row.limit_share * row.seconds == pytest.approx(cost.seconds(1e9, 1e9, 4e9))
    assert "with matrices in fp8" in result.title


def test_a_wrong_first_token_is_refused(model, monkeypatch):
    run = Prefill._run

    def shifted(*args):
        return 1.0, [(token + 1) % 512 for token in run(*args)[1]]

    monkeypatch.setattr(Prefill, "_run", shifted)
    with pytest.raises(MtpkitError, match=r"1 of 1 tokens .* standard deviations below the best"):
        measure_load(model, ONCE, PrefillConfig(batch_size=2, prompt_length=8))


def no_attention(patch):
    attend = attention.prefill_attention
    patch.setattr(
        attention,
        "prefill_attention",
        lambda *args, **more: torch.zeros_like(attend(*args, **more)),
    )


def no_state(patch):
    scan = mamba.ssd_varlen

    def forget(*args, **kwargs):
        args = [torch.zeros_like(arg) if index == 3 else arg for index, arg in enumerate(args)]
        return scan(*args, **kwargs)

    patch.setattr(mamba, "ssd_varlen", forget)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sabotage", [no_attention, no_state])
def test_a_broken_prefill_is_not_timed(sabotage, dtype, monkeypatch):
    model = open_model("nemotron-h-tiny", torch.device("cpu"), dtype)
    prompts = PrefillConfig(batch_size=8, prompt_length=64)
    measure_load(model, ONCE, prompts)
    sabotage(monkeypatch)
    with pytest.raises(MtpkitError, match="are not those of a plain forward pass"):
        measure_load(model, ONCE, prompts)


def test_settings_that_cannot_be_measured_are_all_named():
    with pytest.raises(
        UserError,
        match=r"batch_size is 0, must be at least 1; prompt_length is -1, must be at least 1",
    ):
        PrefillConfig(batch_size=0, prompt_length=-1)


def test_runs_of_too_many_tokens_together_are_refused(model):
    """Each by itself has few enough."""
    prompts = PrefillConfig(batch_size=1, prompt_length=1 << 27)
    with pytest.raises(UserError, match=r"tokens in all, must be at most .*: lower prompt_length"):
        measure_load(model, LoadConfig(num_speculative_tokens=(0,), repeats=2), prompts)
