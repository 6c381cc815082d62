"""Two processes: each takes its part of a checkpoint, and what they save together is the same
checkpoint."""

from pathlib import Path

import pytest

from mtpkit.checkpoint import load_checkpoint, load_config, load_model_weights, save_model
from mtpkit.checkpoint.verify import compare_weights
from mtpkit.model import build_model
from tests.checkpoint.builders import GOLDEN
from tests.ranks import run_ranks


def load_and_save(rank: int, source: Path, out: Path, sizes: dict[str, int]) -> None:
    model = build_model(load_config(source), seed=1, **sizes)
    load_model_weights(model, source)
    save_model(model, out)
    again = build_model(load_config(source), seed=2, **sizes)
    again.load_state_dict(load_checkpoint(out, {"model": again.sharded_state_dict()})["model"])
    saved = dict(model.named_parameters())
    assert all(p.equal(saved[name]) for name, p in again.named_parameters())


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("tp1/moe", {"tensor_parallel": 2}),
        ("tp2/moe", {"expert_parallel": 2}),
        ("tp1/mla", {"tensor_parallel": 2}),
        ("tp1/mla", {"expert_parallel": 2}),
        ("tp1/gdn", {"tensor_parallel": 2}),
        ("tp1/gated_rope", {"tensor_parallel": 2}),
    ],
)
def test_two_processes(tmp_path, case, sizes):
    run_ranks(load_and_save, GOLDEN / case, tmp_path / "out", sizes)
    result = compare_weights(GOLDEN / case, tmp_path / "out")
    assert result.identical and len(result.equal) > 20, result
