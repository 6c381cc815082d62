"""Invalid prompts and sampling parameters are refused in one line before anything runs."""

import pytest
import torch

from mtpkit import SamplingParams
from mtpkit.engine.prompts import list_params
from mtpkit.errors import UserError
from tests.engine.tiny import greedy, make_llm, tiny_model


class Numbers:
    """Numbers as text; as real tokenizers, it takes valid Unicode only."""

    def encode(self, text):
        return [int(word) for word in text.encode().split()]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(f"{token_id} " for token_id in token_ids)


@pytest.mark.parametrize("tokenizer", [None, Numbers()])
@pytest.mark.parametrize(
    "prompts, params, message",
    [
        ([[1], []], greedy(), r"^prompts\[1\]: the prompt is empty"),
        ([1] * 128, greedy(), "^the prompt: 128 prompt tokens leave no room"),
        ([[1], {"prompt_token_ids": [61], "name": "a.txt:7"}], greedy(), r"^a.txt:7: tokens \[61\] are outside"),
        ([[1], {"prompt": [1], "name": 7}], greedy(), r"^prompts\[1\]: name is 7, must be a text"),
        ({"prompt": [1], "checkpoint_at": 0}, greedy(), "^the prompt: checkpoint_at is 0, must be from 1 to"),
        ({"prompt": [1], "checkpoint_at": 1.0}, greedy(), "^the prompt: checkpoint_at is 1.0, must be a whole number"),
        (
            [[1], {"prompt": [1, 2], "checkpoint_at": 3}],
            greedy(),
            r"^prompts\[1\]: checkpoint_at is 3, .*s 2 tokens",
        ),
        (5, greedy(), "prompts are of type int: give texts, or lists of token ids"),
        ([1.5, 2.0], greedy(), r"prompts\[0\] is a float: give a text, or token ids"),
        ([True, 1], greedy(), r"prompts\[0\] is a bool: give a text, or token ids"),
        (torch.tensor([1, 2]), greedy(), "prompts are of type Tensor: give texts, or lists of token ids"),
        ([[1, "a"]], greedy(), r"prompts\[0\] is a list: give a text, or token ids as a list of integers"),
        ([[1], [1, True]], greedy(), r"prompts\[1\] is a list: give a text, or token ids as a list of integers"),
        (b"\x01\x02", greedy(), "prompts are of type bytes: give texts, or lists of token ids"),
        ([[1], b"\x01\x02"], greedy(), r"prompts\[1\] is a bytes: give a text, or token ids"),
        ({"prompt": b"\x01\x02"}, greedy(), "the prompt is a bytes: give a text, or token ids"),
        ([{}], greedy(), r"prompts\[0\] is {}, which has neither 'prompt' nor 'prompt_token_ids'"),
        ([[1], [61]], greedy(), r"^prompts\[1\]: tokens \[61\] are outside the vocabulary of 61"),
        ([[1]], [greedy(), greedy()], "1 prompts but 2 sampling parameters"),
        ([[1]], [], "1 prompts but 0 sampling parameters"),
        ([[1]], {"max_tokens": 3}, r"sampling_params is {'max_tokens': 3}: give SamplingParams\(...\), or a list"),
        ([[1]], 5, r"sampling_params is 5: give SamplingParams\(...\), or a list of them"),
        ([[1]], "x", r"sampling_params is 'x': give SamplingParams\(...\), or a list of them"),
        ([[1]], ["x"], r"sampling_params\[0\] is 'x': give SamplingParams\(...\) for each prompt"),
        ([[1], [2]], [greedy(), None], r"sampling_params\[1\] is None: give SamplingParams\(...\) for each prompt"),
    ],
)
def test_bad_prompts_run_nothing(tokenizer, prompts, params, message):
    llm = make_llm(tiny_model(), 1, tokenizer=tokenizer)
    with pytest.raises(UserError, match=message) as caught:
        llm.generate(prompts, params)
    assert "\n" not in str(caught.value) and not llm.engine.has_unfinished


@pytest.mark.parametrize(
    "prompts, params, message",
    [
        (["text"], greedy(), r"prompts\[0\] is a text, which needs a tokenizer: put one beside the model"),
        ([[1]], SamplingParams(stop="x"), r"prompts\[0\]: stop strings need a tokenizer"),
    ],
)
def test_what_needs_a_tokenizer(prompts, params, message):
    with pytest.raises(UserError, match=message):
        make_llm(tiny_model(), 1).generate(prompts, params)


@pytest.mark.parametrize("form", [lambda text: text, lambda text: [text], lambda text: {"prompt": text}])
def test_half_a_surrogate_pair_is_no_text(form):
    llm = make_llm(tiny_model(), 1, tokenizer=Numbers())
    with pytest.raises(UserError, match=r"not valid Unicode: character 2 is the lone surrogate '\\ud800'"):
        llm.generate(form("1 \ud800 2"), greedy())
    assert not llm.engine.has_unfinished


def test_no_parameters_are_the_defaults():
    one = SamplingParams(max_tokens=3)
    assert list_params(None, 2) == [SamplingParams()] * 2 and list_params(one, 2) == [one] * 2
    assert list_params((one,), 1) == [one] and list_params([], 0) == []
