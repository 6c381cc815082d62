"""The benchmark of conversations: what the prefix cache must save, in counts, and what it
refuses."""

import pytest
import torch

from mtpkit.bench.load import measure_load
from mtpkit.bench.settings import LoadConfig, TurnsConfig
from mtpkit.bench.shapes import open_model
from mtpkit.engine.device.checkpoints import CheckpointStore
from mtpkit.engine.steps.plan import Restore
from mtpkit.errors import MtpkitError, UserError

CONFIG = LoadConfig(
    num_speculative_tokens=(0, 3), acceptance=(0.8,), trace=False, engine={"block_size": 8}
)
TURNS = TurnsConfig(turns=8, shared=0.8, turn_length=21, conversations=3)


@pytest.fixture(scope="module")
def model():
    return open_model("nemotron-h-tiny", torch.device("cpu"), "float32")


def test_shareable_tokens_are_hit_with_and_without_drafts(model):
    result = measure_load(model, CONFIG, TURNS)
    assert [(row.k, row.cached) for row in result.rows] == [
        (0, False),
        (0, True),
        (3, False),
        (3, True),
    ]
    turns = TURNS.turns
    new = TURNS.turn_length
    out = TURNS.output_len
    tokens = 3 * sum(new + turn * (new + out) for turn in range(turns))
    for row in result.rows:
        assert row.prompt_tokens == tokens and row.ttft_p50_ms <= row.ttft_p99_ms
        if row.cached:
            assert row.hit_share >= 0.95 and row.identical == 1
            assert row.prompt_tokens >= 4 * row.prefilled_tokens
        else:
            assert row.hit_share == 0 and row.prefilled_tokens == tokens
    assert result.rows[3].acceptance_length == result.rows[2].acceptance_length > 1.5


def test_lengths_make_the_share():
    """Of all tokens of prompts, whatever the turns."""
    for turns, shared in ((8, 0.8), (2, 0.6), (20, 0.95)):
        config = TurnsConfig(turns=turns, shared=shared, turn_length=1000)
        prompts = [1000 + turn * (1000 + config.output_len) for turn in range(turns)]
        assert 1 - turns * 1000 / sum(prompts) == pytest.approx(shared, abs=1e-3)
        assert config.longest == prompts[-1] + config.output_len


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"turns": 1}, "turns is 1, must be at least 2"),
        ({"turns": 8, "shared": 0.5}, "raise shared or lower turns"),
    ],
)
def test_conversations_that_cannot_be_had(settings, message):
    with pytest.raises(UserError, match=message):
        TurnsConfig(**settings)


def test_outputs_that_the_cache_changes_are_refused(model, monkeypatch):
    restore = CheckpointStore.restore

    def stale(self, restores):
        restore(
            self,
            [Restore(one.checkpoint ^ 1, one.slot, one.length, one.blocks) for one in restores],
        )

    monkeypatch.setattr(CheckpointStore, "restore", stale)
    config = LoadConfig(num_speculative_tokens=(0,), trace=False, engine={"block_size": 8})
    with pytest.raises(MtpkitError, match="of the conversations differ with the prefix cache"):
        measure_load(
            model, config, TurnsConfig(turns=3, shared=0.8, turn_length=9, conversations=2)
        )
