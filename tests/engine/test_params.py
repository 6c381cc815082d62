"""Settings out of range are refused, all at once."""

import numpy as np
import pytest

from mtpkit.config.checked import fields_of
from mtpkit.engine import EngineConfig, EngineOptions, SamplingParams
from mtpkit.errors import UserError
from tests.shared import each

INFINITE = [float("inf"), float("-inf"), float("nan"), 1e39, 10**400]
"""To the device, which computes in float32."""


@each(
    ("setting", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -2}, "top_k is -2"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"n": 0}, "n is 0"),
        ({"stop": ["x", ""]}, "empty string"),
        ({"stop": ""}, "empty string"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"presence_penalty": 3.0}, "presence_penalty is 3.0"),
        ({"frequency_penalty": -3.0}, "frequency_penalty is -3.0"),
    ],
)
def test_sampling_parameters(setting, message):
    with pytest.raises(UserError, match=message):
        SamplingParams(**setting)


@pytest.mark.parametrize("made", [SamplingParams, EngineOptions, EngineConfig])
def test_every_field_has_a_type_that_is_checked_and_a_docstring(made):
    for name, info in fields_of(made).items():
        shared = made is EngineConfig and name in fields_of(EngineOptions)
        assert info.description or shared, name
        given = {"model": "x", "max_model_len": 1} | {name: {"neither": "of them"}}
        # A group of values names what is wrong inside.
        said = rf": {name}( is {{'neither'.*, must be |\.neither is unknown)"
        with pytest.raises(UserError, match=said):
            made(**{key: value for key, value in given.items() if key in fields_of(made)})


@each(
    ("names", "values", "must"),
    [
        (["n", "top_k"], ["3", 2.5, 1.0, True, None, np.float64(1)], "a whole number"),
        (["max_tokens"], ["3", 2.5, 1.0, True, np.float64(1)], "a whole number or None"),
        (["seed"], ["x", 1.5, False], "a whole number or None"),
        (["temperature", "top_p", "min_p"], ["0", "hot", None, True, *INFINITE], "a finite number"),
        (
            ["presence_penalty", "frequency_penalty", "repetition_penalty"],
            ["1", None, True, *INFINITE],
            "a finite number",
        ),
        (
            ["stop"],
            [5, [5], b"a", [b"a"], ["a", None], {"a": 1}],
            "a text or a list of texts or None",
        ),
        (
            ["stop_token_ids"],
            [5, "5", b"5", ["sys"], [1.5], [-1], [True], [None]],
            "a list of token ids of 0 or more or None",
        ),
        (["ignore_eos"], ["no", 0, None], "True or False"),
    ],
)
def test_kinds_of_sampling_parameters(names, values, must):
    for name in names:
        for value in values:
            with pytest.raises(UserError) as caught:
                SamplingParams(**{name: value})
            message = str(caught.value)
            assert message.startswith(f"sampling parameters: {name} is ") and message.endswith(
                f", must be {must}"
            )


def test_numbers_of_numpy_become_pythons():
    given = dict(
        max_tokens=np.int32(3), top_k=np.int64(2), seed=np.int64(-5), temperature=np.float32(0.5)
    )
    params = SamplingParams(
        **given, top_p=np.float64(0.5), stop_token_ids=[np.int64(4)], ignore_eos=np.True_
    )
    plain = dict(
        max_tokens=3,
        top_k=2,
        seed=-5,
        temperature=0.5,
        top_p=0.5,
        stop_token_ids=[4],
        ignore_eos=True,
    )
    assert params == SamplingParams(**plain)
    held = [*vars(params).values(), *params.stop_token_ids]
    assert not [value for value in held if isinstance(value, np.generic)]


@pytest.mark.parametrize(
    "setting", [{"temperature": 0}, {"seed": -1}, {"stop_token_ids": {3}}, {"stop": ("a", "b")}]
)
def test_values_that_are_fine(setting):
    ((name, value),) = setting.items()
    assert getattr(SamplingParams(**setting), name) == (
        tuple(value) if isinstance(value, set) else value
    )


def test_all_problems_are_named():
    with pytest.raises(UserError, match=r"max_tokens is 0.*temperature is -1"):
        SamplingParams(temperature=-1, max_tokens=0)


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_texts_are_unicode(name):
    with pytest.raises(UserError, match=f"{name} is .*, must be valid Unicode"):
        SamplingParams(**{name: ["a", "\ud800"]})


def test_stop_is_normalised():
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams(stop=["x", "y"], stop_token_ids=[1]).stop_token_ids == (1,)
    assert SamplingParams(temperature=1e-6).greedy and not SamplingParams(temperature=1e-4).greedy


@each(
    ("setting", "message"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"num_speculative_tokens": 4, "max_num_batched_tokens": 4}, "must be at least 5"),
        ({"state_rollback": "undo"}, "'undo', must be 'replay' or 'snapshot'"),
        (
            {"num_speculative_tokens": 4, "max_num_batched_tokens": 4, "block_size": "8"},
            "block_size is '8'.*least 5",
        ),
        (
            {"num_speculative_tokens": True},
            "num_speculative_tokens is True, must be a whole number",
        ),
        ({"max_num_batched_tokens": "9"}, "max_num_batched_tokens is '9', must be a whole number"),
        (
            {"graphs": 1, "seed": "x"},
            "graphs is 1, must be True or False; seed is 'x', must be a whole number or None",
        ),
    ],
)
def test_engine_settings(setting, message):
    with pytest.raises(UserError, match=message):
        EngineConfig(max_model_len=10, **setting)


@each(
    ("made", "setting"),
    [
        *(
            (SamplingParams, {name: sign * 10**30})
            for name in ("max_tokens", "top_k", "seed")
            for sign in (1, -1)
        ),
        (SamplingParams, {"seed": 2**63}),
        *(
            (lambda **named: EngineConfig(**{"max_model_len": 10, **named}), {name: 10**30})
            for name in (
                "max_model_len",
                "num_speculative_tokens",
                "block_size",
                "max_num_seqs",
                "seed",
            )
        ),
    ],
)
def test_numbers_that_no_machine_counts_to(made, setting):
    """Seeds are 64 bits, so that no two of them draw the same numbers."""
    ((name, value),) = setting.items()
    with pytest.raises(UserError, match=f"{name} is {value}, must be from "):
        made(**setting)
