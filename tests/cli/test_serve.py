"""`mtpkit serve`: which models and tokenizers it takes, and which it refuses before a model is
made."""

import re
from pathlib import Path

import pytest
import torch

from mtpkit.bench.drawn import DrawnModel
from mtpkit.bench.sizes import SHAPES
from mtpkit.cli.serve import app
from mtpkit.engine import LLM, LLMOptions, SamplingParams
from tests.engine.tokenizers import byte_level

SHAPE = "nemotron-h-tiny"


@pytest.fixture
def served(call, monkeypatch):
    """The options of the engine that a command line would serve with."""

    def served(*words: object) -> LLMOptions:
        reached: list[LLMOptions] = []
        monkeypatch.setattr("mtpkit.server.run.serve", lambda engine, _: reached.append(engine))
        assert call(app, *words) == 0
        return reached[0]

    return served


@pytest.fixture(scope="session")
def large_tokenizer(tmp_path_factory) -> Path:
    """A tokenizer with token ids up to 512, one more than the small shape has."""
    tokenizer = byte_level()
    tokenizer.add_tokens([f"<{number}>" for number in range(513 - len(tokenizer))])
    directory = tmp_path_factory.mktemp("large")
    tokenizer.save_pretrained(directory)
    return directory


def test_a_shape_is_made_by_the_engine(served, tokenizer_dir):
    engine = served(SHAPE, "--tokenizer", tokenizer_dir, "--weight-format", "int4")
    assert engine.model == DrawnModel(SHAPE, SHAPES[SHAPE], "int4")
    assert engine.tokenizer == tokenizer_dir
    llm = LLM(engine.model, tokenizer=engine.tokenizer, warm_up=False, max_model_len=64)
    names = {type(each).__name__ for each in llm.model.decoder.modules()}
    assert any("Quantized" in name for name in names), names


def test_drafts_of_a_shape_may_be_accepted_at_random(served, tokenizer_dir):
    engine = served(SHAPE, "--tokenizer", tokenizer_dir, "--acceptance", 1, "--k", 2)
    assert served(SHAPE, "--tokenizer", tokenizer_dir).synthetic_acceptance is None
    llm = LLM(
        engine.model,
        engine.num_speculative_tokens,
        tokenizer=engine.tokenizer,
        synthetic_acceptance=engine.synthetic_acceptance,
        warm_up=False,
        max_model_len=64,
    )
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=13, ignore_eos=True))
    assert llm.stats().acceptance.acceptance_length == 3


def test_a_directory_goes_before_the_shape_of_its_name(served, model_dir, tmp_path, monkeypatch):
    (tmp_path / SHAPE).symlink_to(model_dir)
    monkeypatch.chdir(tmp_path)
    assert served(SHAPE).model == Path(SHAPE)


def test_a_directory_may_have_the_tokenizer_of_another_one(served, model_dir, large_tokenizer):
    engine = served(model_dir, "--tokenizer", large_tokenizer)
    assert engine.model == model_dir and engine.tokenizer == large_tokenizer


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (SHAPE, "is a shape with random weights, which has no tokenizer: give .* --tokenizer DIR"),
        (
            f"{SHAPE} --tokenizer LARGE",
            "has token ids up to 512, outside of the vocabulary of 512 of nemotron-h-tiny: give",
        ),
        (f"{SHAPE} --tokenizer nowhere", "nowhere does not exist"),
        ("nemotron-h-8b --tokenizer LARGE", "needs a GPU; nemotron-h-tiny, or a model directory"),
        (
            f"{SHAPE} --weight-format int4 --quantization fp8 --tokenizer LARGE",
            "--weight-format / --quantization: give one of them",
        ),
        ("MODEL --acceptance 0.8", "acceptance 0.8 is for a shape .*, whose drafts are verified"),
        (f"{SHAPE} --acceptance 1.5 --tokenizer LARGE", "1.5"),
        ("MODEL --weight-format int4", "weight format int4 is for a shape .*, not for a model"),
    ],
)
def test_models_that_are_refused(line, told, call, capsys, model_dir, large_tokenizer, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    places = {"LARGE": large_tokenizer, "MODEL": model_dir}
    assert call(app, *(places.get(word, word) for word in line.split())) == 2
    error = capsys.readouterr().err
    assert error.startswith("mtpkit: error: ") and error.count("\n") == 1
    assert re.search(told, error), error
