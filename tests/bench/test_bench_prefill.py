"""The prefill benchmark: its figures hang together, and wrong tokens are refused."""

import pytest
import torch

from mtpkit.bench import prefill
from mtpkit.bench.prefill import PrefillConfig, measure_prefill
from mtpkit.bench.shapes import open_model
from mtpkit.errors import MtpkitError, UserError
from mtpkit.model.layers import attention, mamba


@pytest.fixture
def model(device):
    return open_model("nemotron-h-tiny", torch.device(device))


def test_the_figures_hang_together(model, device):
    result = measure_prefill(
        model, PrefillConfig(batch_size=3, prompt_len=20, max_num_batched_tokens=24, k=2), "tiny"
    )
    (row,) = result.rows
    assert row.tokens_per_s == pytest.approx(60 / row.seconds)
    assert result.machine is not None
    assert row.matrix_share == pytest.approx(row.flops_per_s / result.machine.matrix_rate)
    assert 0 < row.matrix_share < row.limit_share < 1
    rate = result.machine.sustained_rate
    assert (rate is None) == (device == "cpu")
    assert row.sustained_share == (rate and pytest.approx(row.flops_per_s / rate))
    assert result.title.startswith("prefill: tiny") and len(result.tables()[0].columns) == 9


def test_a_wrong_first_token_is_refused(model, monkeypatch):
    run = prefill._run
    shifted = lambda llm, prompts: (1.0, [(token + 1) % 512 for token in run(llm, prompts)[1]])  # noqa: E731
    monkeypatch.setattr(prefill, "_run", shifted)
    with pytest.raises(MtpkitError, match=r"1 of 1 tokens .* standard deviations below the best"):
        measure_prefill(model, PrefillConfig(batch_size=2, prompt_len=8, repeats=1))


def no_attention(patch):
    attend = attention.prefill_attention
    patch.setattr(attention, "prefill_attention", lambda *args: torch.zeros_like(attend(*args)))


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
    config = PrefillConfig(batch_size=8, prompt_len=64, repeats=1)
    measure_prefill(model, config)
    sabotage(monkeypatch)
    with pytest.raises(MtpkitError, match="are not those of a plain forward pass"):
        measure_prefill(model, config)


def test_settings_that_cannot_be_measured_are_all_named():
    with pytest.raises(
        UserError,
        match=r"batch_size is 0, must be at least 1; num_speculative_tokens is -2.*; repeats is 0",
    ):
        PrefillConfig(batch_size=0, repeats=0, k=-2)
