"""Evaluation by source, in a run and of a model directory."""

import json
import shutil
from unittest.mock import Mock

import pytest
import torch

from mtpkit.checkpoint import save_hf_model, save_model
from mtpkit.data.build import build_dataset
from mtpkit.data.samples import Columns
from mtpkit.data.tokenizer import fingerprint, load_tokenizer
from mtpkit.errors import MtpkitError, UserError
from mtpkit.training import evaluation, loop
from mtpkit.training.config.reading import load_config
from mtpkit.training.config.settings import LossConfig
from mtpkit.training.depths import DECODINGS, DepthSums, measure_depths
from mtpkit.training.evaluation import evaluate_directory, evaluate_sources
from mtpkit.training.loop import Trainer
from tests.training.toy import toy_model

WEIGHTS = (0.5, 0.3, 0.2)


@pytest.fixture(scope="module")
def sources(text_files):
    return [f"cats={text_files[0]}", f"code={text_files[1]}"]


@pytest.fixture(scope="module")
def dataset(sources, tokenizer_dir):
    return build_dataset(sources, load_tokenizer(tokenizer_dir), 32)


@pytest.fixture(scope="module")
def model():
    return toy_model(vocab_size=300)


def run(model, dataset, **changes):
    model.requires_grad_(False)
    return evaluate_sources(
        model, dataset, 3, "serving", LossConfig(depth_weights=WEIGHTS), **changes
    )


@pytest.mark.parametrize("batch_size", [1, 3, 1000])
def test_each_source_is_evaluated_by_itself(model, dataset, batch_size):
    found = run(model, dataset, batch_size=batch_size)
    assert list(found.sources) == ["cats", "code"]
    for name, sums in found.sources.items():
        batch = dataset.batch(dataset.source_rows(name))
        expected, _ = measure_depths(model, batch, 3, "serving", LossConfig())
        torch.testing.assert_close(sums.values, expected.values, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        found.overall.values, sum(sums.values for sums in found.sources.values())
    )


def test_what_is_reported(model, dataset):
    found = run(model, dataset, batch_size=4, max_sequences=4)
    values = found.to_dict()
    overall = found.overall
    assert list(values["sources"]) == ["cats", "code"]
    assert values["steps"] == sum(each["steps"] for each in values["sources"].values()) > 0
    assert 0 < values["departures"] <= 1
    assert values["loss"] == pytest.approx(
        sum(w * loss for w, loss in zip(WEIGHTS, overall.losses(), strict=True))
    )
    for prefix, decoding in zip(("", "sampling_", "draft_sampling_"), DECODINGS, strict=True):
        assert values[f"{prefix}acceptance_length"] == overall.acceptance_length(decoding)
        assert values[f"{prefix}conditional_acceptance"] == overall.conditional_acceptance(decoding)
        assert 1 <= values[f"{prefix}acceptance_length"] < 4
        low, high = values[f"{prefix}acceptance_length_interval"]
        assert low <= values[f"{prefix}acceptance_length"] <= high <= low + 1
    assert f"held-out acceptance length {overall.acceptance_length():.3f} (95%: " in str(
        found
    ) and "cats" in str(found)
    assert f"departures {overall.departures():.1%}" in str(found)
    counts = found.counts()
    for prefix in ("", "sampling_", "draft_sampling_"):
        assert counts[f"{prefix}steps"] == counts[f"{prefix}reached_per_depth"][0]
        length = 1 + sum(counts[f"{prefix}accepted_per_depth"]) / counts[f"{prefix}steps"]
        assert length == pytest.approx(values[f"{prefix}acceptance_length"], rel=1e-12)


def test_few_sequences_are_spread_over_a_source(model, dataset, monkeypatch):
    read = []
    batch = dataset.batch
    monkeypatch.setattr(dataset, "batch", lambda rows: read.extend(rows) or batch(rows))
    run(model, dataset, max_sequences=4)
    for source in dataset.sources:
        rows = dataset.source_rows(source)
        mine = [row for row in read if row in rows]
        assert mine == [rows[len(rows) * number // 4] for number in range(4)]


@pytest.mark.parametrize("layout", ["megatron", "hf"])
def test_a_directory_of_either_layout(layout, model, dataset, sources, tokenizer_dir, tmp_path):
    directory = tmp_path / layout
    shutil.copytree(tokenizer_dir, directory)
    (save_model if layout == "megatron" else save_hf_model)(model, directory)
    found = evaluate_directory(directory, sources, Columns(), 32, batch_size=8, dtype="float32")
    expected = run(model, dataset, batch_size=8)
    assert (found["num_depths"], found["attention"]) == (3, "serving")
    assert found["sources"]["code"]["steps"] == expected.sources["code"].steps()
    assert found["acceptance_length"] == pytest.approx(
        expected.overall.acceptance_length(), abs=1e-3
    )
    json.dumps(found)


def test_what_cannot_be_evaluated(sources, tokenizer_dir, tmp_path):
    for name, changes in {
        "base": dict(mtp_pattern="", mtp_num_depths=0),
        "distinct": dict(mtp_use_repeated_layer=False),
    }.items():
        shutil.copytree(tokenizer_dir, tmp_path / name)
        save_model(toy_model(vocab_size=300, **changes), tmp_path / name)
    with pytest.raises(UserError, match="base has no MTP heads"):
        evaluate_directory(tmp_path / "base", sources, Columns(), 32)
    with pytest.raises(UserError, match="ask for 3 or less"):
        evaluate_directory(tmp_path / "distinct", sources, Columns(), 32, num_depths=4)
    with pytest.raises(UserError, match="per_depth"):
        evaluate_directory(tmp_path / "distinct", sources, Columns(), 32, attention="serving")


BROKEN = [
    "output_layer.weight",
    "mtp.layers.0.eh_proj.weight",
    "decoder.final_norm.weight",
    "embedding.word_embeddings.weight",
]


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_model_of_weights_that_are_no_numbers_is_not_measured(dataset, name, value):
    """A whole weight, or one row, which in the embedding is that of a token that occurs."""
    token = int(dataset.batch([0]).token_ids[0, 10])
    for rows in (slice(None), token % 32 if name != "embedding.word_embeddings.weight" else token):
        model = toy_model(vocab_size=300)
        model.get_parameter(name).data[rows] = float(value)
        with pytest.raises(
            MtpkitError, match=r"^held-out data cats: NaN or infinity in the loss of depth"
        ) as error:
            run(model, dataset, batch_size=4)
        assert len(str(error.value)) < 400 and "\n" not in str(error.value)


def test_the_source_of_what_is_not_finite_is_named(model, dataset, monkeypatch):
    found = run(model, dataset, batch_size=4, max_sequences=2)
    monkeypatch.setattr(evaluation, "measure_depths", lambda *_: (next(results), torch.zeros(0, 6)))
    for row, says in (
        (0, "the loss"),
        (3, "the greedy acceptance"),
        (6, "the sampling acceptance"),
    ):
        bad = DepthSums(found.sources["code"].values.clone())
        bad.values[row, 1] = torch.nan
        results = iter([found.sources["cats"], bad])
        with pytest.raises(
            MtpkitError, match=f"^held-out data code: NaN or infinity in {says} of depth 2; "
        ):
            run(model, dataset, batch_size=4, max_sequences=2)


def test_a_run_is_evaluated_by_its_own_settings(monkeypatch):
    overrides = [
        "data.micro_batch_size=2",
        "data.eval_sequences=5",
        "loss.kind=tv",
        "loss.depth_weights=[2,1,1]",
    ]
    needed = ["model=base", "output=run", "data.train=[a.txt]", "heads.attention=serving"]
    trainer = Trainer.__new__(Trainer)
    given = []
    trainer.config = load_config(None, [*needed, *overrides])
    trainer.step = 4
    trainer.model, trainer.eval_data, trainer.optimizer = "model", "data", Mock()
    monkeypatch.setattr(loop, "evaluate_sources", lambda *args: given.extend(args) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer._evaluate()
    assert given == [
        "model",
        "data",
        3,
        "serving",
        LossConfig("tv", depth_weights=(2.0, 1.0, 1.0)),
        2,
        5,
    ]


def test_data_of_which_a_server_drafts_nothing_is_refused(tokenizer_dir, tmp_path):
    shutil.copytree(tokenizer_dir, tmp_path / "model")
    save_model(toy_model(vocab_size=300), tmp_path / "model")
    own = fingerprint(load_tokenizer(tokenizer_dir))
    rows = [
        {
            "prompt": "a",
            "response": "b",
            "prompt_token_ids": [5, 6, 7, 8],
            "completion_token_ids": [9],
            "tokenizer": own,
        }
    ] * 8
    (tmp_path / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        UserError, match="short: nothing is drafted, since no answer has more than one token"
    ):
        evaluate_directory(tmp_path / "model", [str(tmp_path / "short.jsonl")], Columns(), 16)
