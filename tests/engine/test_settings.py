"""Arguments of `LLM` that cannot be are refused in one line, before a model is opened; what goes
unused is said."""

import inspect
import logging

import numpy as np
import pytest
import torch

from mtpkit import LLM, SamplingParams
from mtpkit.config.checked import fields_of
from mtpkit.engine import LLMOptions
from mtpkit.errors import UserError
from mtpkit.model import build_model
from tests.engine.tiny import greedy, headless_model, make_llm, tiny_model
from tests.shared import each


def test_arguments_are_the_fields_of_the_options():
    parameters = inspect.signature(LLM.__init__).parameters
    assert list(parameters) == ["self", *fields_of(LLMOptions)]
    for name, info in fields_of(LLMOptions).items():
        assert parameters[name].default == (
            inspect.Parameter.empty if name == "model" else info.default
        )
        assert f"{name}: {info.description}" in LLM.__init__.__doc__


RATES = "a list of rates, one per draft, or of such lists, or None"


@each(
    ("name", "value", "must"),
    [
        ("model", None, "the directory of a checkpoint, or a model from mtpkit.model.build_model"),
        ("model", 5, "the directory of a checkpoint, or a model from mtpkit.model.build_model"),
        (
            "model",
            torch.nn.Linear(2, 2),
            "the directory of a checkpoint, or a model from mtpkit.model.build_model",
        ),
        ("num_speculative_tokens", True, "a whole number or 'auto' or None"),
        ("num_speculative_tokens", 1.0, "a whole number or 'auto' or None"),
        ("num_speculative_tokens", "most", "a whole number or 'auto' or None"),
        ("dtype", torch.bfloat16, "'auto', 'float32' or 'bfloat16'"),
        ("quantization", "nvfp4", "'fp8' or None"),
        ("seed", "a", "a whole number or None"),
        ("block_size", "16", "a whole number"),
        ("block_size", 1.5, "a whole number"),
        ("max_model_len", "100", "a whole number or None"),
        ("max_model_len", 100.5, "a whole number or None"),
        ("max_num_seqs", "4", "a whole number"),
        ("max_num_seqs", 2.5, "a whole number"),
        ("max_num_seqs", True, "a whole number"),
        ("max_num_batched_tokens", 64.0, "a whole number or None"),
        ("gpu_memory_utilization", "x", "a finite number"),
        ("gpu_memory_utilization", float("nan"), "a finite number"),
        ("gpu_memory_utilization", 1.5, "above 0 and at most 1"),
        ("gpu_memory_utilization", -1, "above 0 and at most 1"),
        ("num_blocks", 5.5, "a whole number or None"),
        ("state_rollback", 3, "'replay' or 'snapshot'"),
        ("kv_cache_dtype", "fp8", "'auto' or 'fp8_e4m3'"),
        ("state_dtype", "auto", "'float32', 'bfloat16' or 'float16'"),
        ("draft_sampling", "yes", "True or False"),
        ("draft_vocab", 5, "a list of token ids, a file of mtpkit data draft-vocab, or None"),
        ("draft_vocab", b"ab", "a list of token ids, a file of mtpkit data draft-vocab, or None"),
        ("async_scheduling", "no", "True or False or None"),
        ("enforce_eager", "no", "True or False"),
        ("enforce_eager", 1, "True or False"),
        ("synthetic_acceptance", 0.5, RATES),
        ("synthetic_acceptance", ["0.5"], RATES),
        ("synthetic_acceptance", {0.5, 0.4}, RATES),
        ("device", 1.5, "'cuda', 'cpu' or a GPU's number, or None"),
        ("tokenizer", 5, "a directory, something with encode and decode, or None"),
        ("tokenizer", {"a": 1}, "a directory, something with encode and decode, or None"),
    ],
)
def test_kinds_of_values(name, value, must):
    with pytest.raises(UserError) as caught:
        LLM(**{"model": "nowhere", name: value})
    message = str(caught.value)
    assert (
        message.startswith(f"engine: {name} is ")
        and message.endswith(f", must be {must}")
        and "\n" not in message
    )


def test_all_problems_are_named_at_once():
    with pytest.raises(
        UserError, match=r"^engine: model is 5, .*; block_size is 0, .*; enforce_eager is 'no', .*$"
    ):
        LLM(5, block_size=0, enforce_eager="no")


@each(
    ("settings", "message"),
    [
        ({"synthetic_acceptance": []}, "must be 2 rates from 0 to 1, one per draft"),
        ({"synthetic_acceptance": [0.5, float(2)]}, "must be 2 rates from 0 to 1, one per draft"),
        ({"synthetic_acceptance": [[0.5, 0.5], [0.5]]}, "must be 2 rates from 0 to 1"),
        ({"synthetic_acceptance": [[0.5, -0.5]]}, "must be 2 rates from 0 to 1"),
        ({"draft_vocab": []}, "draft_vocab is empty"),
        ({"draft_vocab": [True, 2]}, "draft_vocab: True must be integers"),
        (
            {"device": "meta"},
            "device is meta, on which decoding is not supported: use 'cuda' or 'cpu'",
        ),
        (
            {"draft_sampling": True, "num_speculative_tokens": "auto"},
            "draft_sampling is True, must be False",
        ),
    ],
)
def test_values_that_do_not_fit(settings, message):
    with pytest.raises(UserError, match=message):
        LLM(tiny_model(), **{"num_speculative_tokens": 2, **settings})


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_model_without_weights(device):
    with pytest.raises(UserError, match="the model given lies on device meta, without weights"):
        LLM(build_model(tiny_model().mtpkit_config, device="meta"), device=device)


def test_numbers_of_numpy_are_numbers():
    """Also beyond the settings: they neither round nor show up in what is reported."""
    names = {"block_size": 8, "max_model_len": 64, "max_num_seqs": 2, "num_blocks": 40, "seed": 3}
    settings = {name: np.int64(value) for name, value in names.items()}
    llm = LLM(
        tiny_model(),
        np.int64(2),
        **settings,
        gpu_memory_utilization=np.float32(0.5),
        enforce_eager=np.True_,
        draft_vocab=[np.int64(token) for token in range(9)],
    )
    want = make_llm(tiny_model(), 0).generate([[1, 2]], greedy())[0].outputs[0].token_ids
    assert llm.generate([[np.int64(1), np.int64(2)]], greedy())[0].outputs[0].token_ids == want
    held = {**vars(llm.engine.config), **vars(llm.memory_plan), **vars(llm.stats())}
    assert {name: type(held[name]) for name in names} == dict.fromkeys(names, int)
    assert not [name for name, value in held.items() if isinstance(value, np.generic)]


@pytest.mark.parametrize(("heads", "k", "said"), [(True, 0, 1), (True, 1, 0), (False, 0, 0)])
def test_heads_that_are_not_used_are_mentioned(caplog, heads, k, said):
    model = tiny_model() if heads else headless_model()
    with caplog.at_level(logging.INFO):
        LLM(model, k, num_blocks=50)
    lines = [record.message for record in caplog.records if "MTP heads" in record.message]
    assert lines == said * ["the model's MTP heads are not used: num_speculative_tokens is 0"]


def test_no_seed_is_another_one_each_time():
    seeds = {
        make_llm(tiny_model(), 0, seed=None).engine.intake.make([1], SamplingParams()).seed
        for _ in range(3)
    }
    assert len(seeds) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU 0")
def test_a_number_is_a_gpus():
    with pytest.raises(UserError, match="device is cuda:0, but torch finds no GPU here"):
        LLM(tiny_model(), device=0)
