"""Settings out of range are refused, all at once."""

import pytest

from mtpkit.engine import EngineConfig, SamplingParams
from mtpkit.errors import UserError


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5, must be a whole number"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -2}, "top_k is -2"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"n": 2}, "n is 2"),
        ({"stop": ["x", ""]}, "empty string"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"presence_penalty": 3.0}, "presence_penalty is 3.0"),
        ({"frequency_penalty": -3.0}, "frequency_penalty is -3.0"),
    ],
)
def test_sampling_parameters(setting, message):
    with pytest.raises(UserError, match=message):
        SamplingParams(**setting)


def test_all_problems_are_named():
    with pytest.raises(UserError, match=r"max_tokens is 0.*temperature is -1"):
        SamplingParams(temperature=-1, max_tokens=0)


def test_stop_is_normalised():
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams(stop=["x", "y"], stop_token_ids=[1]).stop_token_ids == (1,)
    assert SamplingParams(temperature=1e-6).greedy and not SamplingParams(temperature=1e-4).greedy


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"num_speculative_tokens": 4, "max_num_batched_tokens": 4}, "must be at least 5"),
        ({"state_rollback": "undo"}, "'undo', must be 'replay' or 'snapshot'"),
    ],
)
def test_engine_settings(setting, message):
    with pytest.raises(UserError, match=message):
        EngineConfig(max_model_len=10, **setting)
