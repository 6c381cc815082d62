"""Logits that become NaN: `generate` prints the other prompts, what measures or keeps answers
fails."""

import json
import math
import re

import pytest
import torch

from mtpkit.cli import bench, data, generate, speedup
from mtpkit.engine import intake, loading

BAD = 123
"""The token whose embedding is NaN."""


@pytest.fixture
def broken(monkeypatch):
    """Break every model once it is loaded: files with such weights are refused."""
    open_model = loading.open_model

    def breaking(*args, **options):
        model, *more = open_model(*args, **options)
        with torch.no_grad():
            model.embedding.word_embeddings.weight[BAD] = math.nan
        return model, *more

    monkeypatch.setattr(loading, "open_model", breaking)


@pytest.fixture
def prompts(tmp_path):
    token_ids = [[5, 6], [7, BAD], [8], [BAD]]
    text = "".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in token_ids)
    (tmp_path / "prompts.jsonl").write_text(text)
    return tmp_path / "prompts.jsonl"


@pytest.mark.parametrize("k", [0, 2])
def test_generate_prints_the_others_and_names_what_failed(
    k, model_dir, prompts, broken, call, capsys
):
    options = ["--prompts", prompts, "--max-tokens", 4, "--k", k, "--ignore-eos"]
    assert call(generate.app, "--model", model_dir, *options, "--json") == 1
    printed = capsys.readouterr()
    records = [json.loads(line) for line in printed.out.splitlines()]
    assert [record["finish_reason"] for record in records] == ["length", "error", "length", "error"]
    assert [len(record["token_ids"]) for record in records] == [4, 0, 4, 0]
    assert "error" not in records[0] and records[1]["error"].startswith(
        f"{prompts}:2 (request 1): the logits for pos"
    )
    lines = printed.err.splitlines()
    assert (
        f"{prompts}:2 (request 1): the logits for position 2, after 0 output tokens, are NaN"
        in printed.err
    )
    assert f"{prompts}:4 (request 3): the logits for position 1," in printed.err
    assert lines[-1] == "mtpkit: error: 2 of 4 prompts ended with an error, named above"
    assert call(generate.app, "--model", model_dir, *options) == 1
    texts = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("== ")]
    assert [bool(text) for text in texts] == [True, False, True, False]


def test_generate_of_one_prompt(model_dir, broken, call, capsys, monkeypatch):
    monkeypatch.setattr(intake, "encode", lambda *_: (None, [BAD], None))
    assert call(generate.app, "--model", model_dir, "the cat", "--k", 1) == 1
    error = capsys.readouterr().err
    assert "the prompt (request 0): the logits for position 1, after 0 output tokens" in error
    assert error.endswith("mtpkit: error: 1 of 1 prompts ended with an error, named above\n")


def test_evaluate_fails_without_a_report(model_dir, prompts, broken, call, capsys, tmp_path):
    options = ["--k", 1, "--batch-size", 2, "--max-tokens", 4, "--repeats", 1, "--ignore-eos"]
    code = call(
        speedup.app, "--model", model_dir, "--prompts", prompts, "--out", tmp_path / "out", *options
    )
    printed = capsys.readouterr()
    last = printed.err.splitlines()[-1]
    assert (
        code == 1
        and last.startswith(f"mtpkit: error: {prompts}:2 (request ")
        and "are NaN or infinite" in last
    )
    assert not printed.out and not (tmp_path / "out" / "report.json").exists()


@pytest.mark.parametrize(
    "command",
    [
        "decode --batch-size 2 --k 0 --prompt-length 8 --max-tokens 24 --repeats 1",
        (
            "decode --batch-size 2 --k 2 --acceptance 0.8 0.8 --prompt-length 8 --max-tokens 24"
            " --repeats 1"
        ),
        "load --workload prefill --batch-size 2 --prompt-length 12 --repeats 1 --k 1",
        "load --num-prompts 2 --output-max 24 --prompt-max 20 --repeats 1 --k 1",
        "load --workload stall --decoding-requests 2 --arriving-length 20 --lone-length 8 --k 0",
    ],
)
def test_benchmarks_fail(command, call, capsys, monkeypatch):
    open_model = loading.open_model

    def breaking(*args, **options):
        model, *more = open_model(*args, **options)
        with torch.no_grad():
            model.output_layer.weight[3, 3] = math.nan
        return model, *more

    monkeypatch.setattr(loading, "open_model", breaking)
    name, *options = command.split()
    assert call(bench.app, name, "--model", "nemotron-h-tiny", *options) == 1
    printed = capsys.readouterr()
    last = printed.err.splitlines()[-1]
    assert re.match(
        r"mtpkit: error: (request \d+|prompts\[0\] \(request \d+\)): the logits for position", last
    )
    assert (
        "are NaN or infinite: weights or activations of the base are not finite" in last
        and not printed.out
    )


def test_regenerate_keeps_no_such_answer_and_goes_on_from_there(
    model_dir, call, capsys, tmp_path, monkeypatch
):
    texts = ["the cat", "on the", "def add", "left right", "the mat"]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
    )
    sampling = ["--max-tokens", 8, "--temperature", 0.8, "--max-num-seqs", 2]
    arguments = [
        "regenerate",
        "--model",
        model_dir,
        "--data",
        tmp_path / "prompts.jsonl",
        *sampling,
        "--output",
    ]
    whole, output, journal = (
        tmp_path / name for name in ("whole.jsonl", "out.jsonl", "out.jsonl.partial")
    )
    assert call(data.app, *arguments, whole) == 0
    bad = json.loads(whole.read_text().splitlines()[3])["prompt_token_ids"]
    open_model = loading.open_model

    def breaking(*args, **options):
        """One prompt's first own token breaks the model: what follows it is not to be believed."""
        model, *more = open_model(*args, **options)
        with torch.no_grad():
            model.embedding.word_embeddings.weight[bad[0]] = math.nan
        return model, *more

    monkeypatch.setattr(loading, "open_model", breaking)
    capsys.readouterr()
    assert call(data.app, *arguments, output) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert (
        f"{tmp_path / 'prompts.jsonl'}" in last
        and "are NaN or infinite" in last
        and "are kept" in last
    )
    assert not output.exists()
    kept = (
        [json.loads(line) for line in journal.read_text().splitlines()[1:]]
        if journal.exists()
        else []
    )
    assert all(answer["finish_reason"] != "error" and answer["index"] != 3 for answer in kept)
    monkeypatch.setattr(loading, "open_model", open_model)
    assert call(data.app, *arguments, output) == 0
    assert output.read_bytes() == whole.read_bytes() and not journal.exists()
