"""`mtpkit acceptance` by source."""

import json
from collections import defaultdict

import pytest
import torch

from mtpkit.checkpoint import load_model
from mtpkit.cli import run
from mtpkit.cli.acceptance import _trained_length, app
from tests.ranks import run_ranks


def test_acceptance_by_source(model_dir, call, capsys, tmp_path):
    for name in ("cats", "code"):
        (tmp_path / f"{name}.txt").write_text("the cat sat on the mat\n" * 30)
    data = [f"first={tmp_path / 'cats.txt'}", f"second={tmp_path / 'code.txt'}"]
    options = "--sequence-length 24 --batch-size 2 --num-sequences 3 --num-depths 3 --dtype float32"
    file = tmp_path / "found.json"
    assert call(app, "--model", model_dir, "--data", *data, *options.split(), "--output", file) == 0
    *table, line = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert json.loads(file.read_text()) == found
    assert found["sequence_length"] == 24 and "sequences of 24 tokens" in " ".join(
        " ".join(table).split()
    )
    assert found["num_depths"] == 3 and len(found["conditional_acceptance"]) == 3
    assert list(found["sources"]) == ["first", "second"]
    rows = defaultdict(str)
    for row in filter(str.strip, table):
        rows[row.split()[0]] += row
    for name, values in {**found["sources"], "all": found}.items():
        assert (
            f"{values['acceptance_length']:.3f}" in rows[name]
            and f"{values['loss']:.4f}" in rows[name]
        )
        assert f"{values['departures']:.1%}" in rows[name]
        low, high = values["draft_sampling_acceptance_length_interval"]
        assert any(f"{low:.2f}-{high:.2f}" in row for row in table)


def test_a_base_that_is_quantised_while_it_is_loaded(model_dir, call, capsys, tmp_path):
    """Its acceptance is that of heads that `--quantization fp8` serves."""
    (tmp_path / "cats.txt").write_text("the cat sat on the mat\n" * 30)
    line = ["--model", model_dir, "--data", tmp_path / "cats.txt", "--sequence-length", 24]
    found = {}
    for kind in (None, "fp8"):
        more = [] if kind is None else ["--quantization", kind]
        assert call(app, *line, *more) == 0
        found[kind] = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert found[kind]["quantization"] == kind
    assert found["fp8"]["loss"] != found[None]["loss"]
    assert call(app, *line, "--quantization", "fp8", "--backend", "te") == 2
    assert "quantization is fp8, but backend te cannot" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    call, capsys, tmp_path, monkeypatch
):
    evaluate = "mtpkit.training.evaluation.evaluate_directory"
    monkeypatch.setattr(evaluate, lambda *_, **__: pytest.fail("it is found out too late"))
    for file, code, says in (
        (tmp_path, 2, f"{tmp_path} is a directory; name a file"),
        (tmp_path / "no" / "x.json", 2, "no/x.json must be a file in a directory that exists"),
    ):
        assert call(app, "--model", tmp_path, "--data", tmp_path, "--output", file) == code
        assert says in capsys.readouterr().err


def call_rank(rank, options):
    with pytest.raises(SystemExit) as stop:
        run(app, options)
    assert not stop.value.code


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_a_model_split_over_processes_is_evaluated_the_same(
    split, model_dir, call, capsys, tmp_path
):
    (tmp_path / "cats.txt").write_text("the cat sat on the mat\n" * 30)
    options = ["--model", model_dir, "--data", tmp_path / "cats.txt", "--sequence-length", 24]
    assert call(app, *options) == 0
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    run_ranks(
        call_rank,
        [*map(str, options), f"--{split}-parallel-size=2", f"--output={tmp_path / 'found.json'}"],
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["steps"] == alone["steps"] > 0
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert found["conditional_acceptance"] == pytest.approx(
        alone["conditional_acceptance"], abs=1e-2
    )
    interval = "draft_sampling_acceptance_length_interval"
    assert (
        found[interval] == pytest.approx(alone[interval], rel=1e-4)
        and found[interval][0] < found[interval][1]
    )


def test_a_split_that_does_not_fit_is_one_line(model_dir, call, capsys, tmp_path):
    (tmp_path / "cats.txt").write_text("the cat sat on the mat\n" * 30)
    options = ["--model", model_dir, "--data", tmp_path / "cats.txt"]
    for more, says in (
        (["--tensor-parallel-size", 3], "cannot be split over tensor=3 ranks"),
        (
            ["--tensor-parallel-size", 2, "--sequence-length", 25],
            "25 tokens cannot be split over 2 ranks",
        ),
    ):
        assert call(app, *options, *more) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and says in error


def test_errors_are_one_line(model_dir, call, capsys, tmp_path):
    assert call(app, "--model", model_dir, "--data", tmp_path / "none.txt") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "none.txt does not exist" in error


@pytest.mark.parametrize("name", ["output_layer.weight", "mtp.layers.0.eh_proj.weight"])
def test_a_model_of_weights_that_are_no_numbers_fails(
    model_dir, call, capsys, tmp_path, monkeypatch, name
):
    def load(*args, **named):
        model = load_model(*args, **named)
        model.get_parameter(name).data[3] = torch.nan
        return model

    monkeypatch.setattr("mtpkit.training.evaluation.load_model", load)
    (tmp_path / "cats.txt").write_text("the cat sat on the mat\n" * 30)
    file = tmp_path / "found.json"
    data = ["--data", f"cats={tmp_path / 'cats.txt'}", "--sequence-length", 24, "--output", file]
    assert call(app, "--model", model_dir, *data) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(
        "mtpkit: error: held-out data cats: NaN or infinity in the loss of depth 1, 2; "
    )
    assert printed.err.count("\n") == 1 and not printed.out and not file.exists()


def test_settings_beside_a_model_are_not_a_runs(tmp_path):
    (tmp_path / "config.yaml").write_text("of: another program\n")
    assert _trained_length(tmp_path / "model") == 1024


def test_raw_text_for_a_chat_model_is_warned_of(chat_dir, model_dir, call, caplog, tmp_path):
    turns = [{"role": role, "content": "the cat sat"} for role in ("user", "assistant")]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": turns}))
    (tmp_path / "cats.txt").write_text("the cat sat on the mat\n" * 9)
    options = ["--sequence-length", 24, "--dtype", "float32"]
    for model, names, warned in (
        (chat_dir, ("talk.jsonl", "cats.txt"), True),
        (chat_dir, ("talk.jsonl",), False),
        (model_dir, ("cats.txt",), False),
    ):
        data = [tmp_path / name for name in names]
        assert call(app, "--model", model, "--data", *data, *options) == 0
        said = "data: cats: raw text, but the tokenizer has a chat template"
        assert caplog.text.count(said) == warned
        caplog.clear()
