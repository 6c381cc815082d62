"""Heads trained on a base in fp8: checkpoints hold the base as it was, and runs go on from them."""

import json

import pytest
import torch

from mtpkit.checkpoint import load_model
from mtpkit.training.config.reading import load_config
from mtpkit.training.loop import Trainer, train


def settings(toy_base, text_files, output, steps):
    return load_config(
        None,
        [
            *(
                f"model={toy_base}",
                f"output={output}",
                f"data.train=[{text_files[0]}]",
                f"data.eval=[{text_files[1]}]",
            ),
            *(
                "data.sequence_length=32",
                "data.global_batch_size=4",
                "data.eval_sequences=4",
                "heads.num_depths=2",
            ),
            "heads.init=fresh",
            *(
                "optimizer.warmup_steps=2",
                "log_interval=1",
                "save_interval=3",
                "eval_interval=100",
                "keep_best=false",
            ),
            *("dtype=bfloat16", "base_fp8=true", f"steps={steps}"),
        ],
    )


def losses(output):
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_checkpoints_hold_the_base_as_it_was(toy_base, text_files, tmp_path):
    base = load_model(toy_base).state_dict()
    run = train(settings(toy_base, text_files, tmp_path / "run", 6))
    trained = load_model(run)
    kept = {
        name: value
        for name, value in trained.state_dict().items()
        if name in base and value is not None
    }
    assert len(kept) > 10 and not any(name.startswith("mtp.") for name in kept)
    for name, value in kept.items():
        # Matrices come from the base itself, the rest from the model, which is in bf16.
        exact = torch.equal(value, base[name])
        assert exact or torch.equal(value, base[name].bfloat16().float()), name
        assert exact or not name.endswith(
            ("linear_fc1.weight", "linear_qkv.weight", "out_proj.weight")
        ), name


def test_a_run_goes_on_as_if_it_had_not_stopped(toy_base, text_files, tmp_path, monkeypatch):
    train(settings(toy_base, text_files, tmp_path / "whole", 6))
    config = settings(toy_base, text_files, tmp_path / "parts", 6)
    save = Trainer._save

    def save_and_stop(trainer, *args):
        save(trainer, *args)
        if trainer.step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "_save", save_and_stop)
        train(config)
    train(config)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
