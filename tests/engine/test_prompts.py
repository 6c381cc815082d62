"""Invalid prompts and sampling parameters are refused in one line before anything runs."""

import re

import pytest
import torch

from mtpkit import SamplingParams
from mtpkit.engine.requests.prompts import list_params
from mtpkit.engine.requests.request import RequestError, require_whole
from mtpkit.errors import UserError
from tests.engine.tiny import greedy, make_llm, tiny_model
from tests.shared import each


class Numbers:
    """Numbers as text; as real tokenizers, it takes valid Unicode only."""

    def encode(self, text):
        return [int(word) for word in text.encode().split()]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(f"{token_id} " for token_id in token_ids)


@pytest.mark.parametrize("tokenizer", [None, Numbers()])
@each(
    ("prompts", "params", "message"),
    [
        ([1] * 128, greedy(), "^the prompt: 128 prompt tokens leave no room"),
        (
            {"prompt_token_ids": [61], "name": "a.txt:7"},
            greedy(),
            r"^a.txt:7: tokens \[61\] are outside",
        ),
        ({"prompt": [1], "name": 7}, greedy(), "^the prompt: name is 7, must be a text"),
        ({"prompt": []}, greedy(), "^the prompt: the prompt is empty"),
        (
            {"prompt": [1], "checkpoint_at": 0},
            greedy(),
            "^the prompt: checkpoint_at is 0, must be from 1 to",
        ),
        (
            {"prompt": [1], "checkpoint_at": 1.0},
            greedy(),
            "^the prompt: checkpoint_at is 1.0, must be a whole number",
        ),
        (
            {"prompt": [1, 2], "checkpoint_at": 3},
            greedy(),
            "^the prompt: checkpoint_at is 3, .*s 2 tokens",
        ),
        (5, greedy(), "prompts are of type int: give texts, or lists of token ids"),
        ([1.5, 2.0], greedy(), r"prompts\[0\] is a float: give a text, or token ids"),
        ([True, 1], greedy(), r"prompts\[0\] is a bool: give a text, or token ids"),
        (
            torch.tensor([1, 2]),
            greedy(),
            "prompts are of type Tensor: give texts, or lists of token ids",
        ),
        (
            [1, "a"],
            greedy(),
            "the prompt is a list: give a text, or token ids as a list of integers",
        ),
        (
            [1, True],
            greedy(),
            "the prompt is a list: give a text, or token ids as a list of integers",
        ),
        (b"\x01\x02", greedy(), "prompts are of type bytes: give texts, or lists of token ids"),
        ([[1], b"\x01\x02"], greedy(), r"prompts\[1\] is a bytes: give a text, or token ids"),
        ({"prompt": b"\x01\x02"}, greedy(), "the prompt is a bytes: give a text, or token ids"),
        ({}, greedy(), "the prompt is {}, which has neither 'prompt' nor 'prompt_token_ids'"),
        ([1, 61], greedy(), r"^the prompt: tokens \[61\] are outside the vocabulary of 61"),
        ([[1]], [greedy(), greedy()], "1 prompts but 2 sampling parameters"),
        ([[1]], [], "1 prompts but 0 sampling parameters"),
        (
            [[1]],
            {"max_tokens": 3},
            r"sampling_params is {'max_tokens': 3}: give SamplingParams\(...\), or a list",
        ),
        ([[1]], 5, r"sampling_params is 5: give SamplingParams\(...\), or a list of them"),
        ([[1]], "x", r"sampling_params is 'x': give SamplingParams\(...\), or a list of them"),
        ([[1]], ["x"], r"sampling_params\[0\] is 'x': give SamplingParams\(...\) for each prompt"),
        (
            [[1], [2]],
            [greedy(), None],
            r"sampling_params\[1\] is None: give SamplingParams\(...\) for each prompt",
        ),
    ],
)
def test_a_bad_prompt_alone_and_bad_parameters_run_nothing(tokenizer, prompts, params, message):
    llm = make_llm(tiny_model(), 1, tokenizer=tokenizer)
    with pytest.raises(UserError, match=message) as caught:
        llm.generate(prompts, params)
    assert "\n" not in str(caught.value) and not llm.engine.has_unfinished


BAD = {
    r"^prompts\[1\]: the prompt is empty": [],
    r"^prompts\[1\]: 128 prompt tokens leave no room for output in max_model_len 128": [1] * 128,
    r"^prompts\[1\]: tokens \[61\] are outside the vocabulary of 61": [61, 3],
    r"^a.txt:7: tokens \[-1\] are outside": {"prompt_token_ids": [-1], "name": "a.txt:7"},
    r"^prompts\[1\]: name is 7, must be a text": {"prompt": [1], "name": 7},
    r"^prompts\[1\]: checkpoint_at is 3, .*s 2 tokens": {"prompt": [1, 2], "checkpoint_at": 3},
    r"^prompts\[1\]: checkpoint_at is 1.0, must be a whole number": {
        "prompt": [1],
        "checkpoint_at": 1.0,
    },
    r"^prompts\[1\] is a list: give a text, or token ids as a list of integers": [1, "a"],
    r"^prompts\[1\] is {}, which has neither 'prompt' nor 'prompt_token_ids'": {},
    r"^prompts\[1\] is not valid Unicode: character 2 is the lone surrogate": "1 \ud800 2",
    r"^prompts\[1\]: the prompt is empty, give it at least one token$": "",
    r"^prompts\[1\]: 100 prompt tokens \+ 28 output tokens .* 16 blocks of 8, the cache has 12": (
        [1] * 100
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_prompt_of_a_list_has_an_output_with_its_error(message):
    """The others run, also drawn ones without seeds, which are those of a list with a good prompt
    in its place."""
    drawn = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    good = make_llm(tiny_model(), 1, tokenizer=Numbers()).generate([[1], [2], [3, 4]], drawn)
    llm = make_llm(tiny_model(), 1, tokenizer=Numbers(), num_blocks=12)
    outputs = llm.generate([[1], BAD[message], [3, 4]], drawn)
    assert [one.request_id for one in outputs] == ["0", "1", "2"] and all(
        one.finished for one in outputs
    )
    bad = outputs[1]
    assert re.search(message, bad.error) and "\n" not in bad.error
    assert (bad.outputs[0].finish_reason, bad.outputs[0].token_ids, bad.outputs[0].text) == (
        "error",
        [],
        "",
    )
    for index in (0, 2):
        assert outputs[index].outputs[0].token_ids == good[index].outputs[0].token_ids
        assert outputs[index].error is None
    with pytest.raises(RequestError, match=message):
        require_whole(outputs)
    streamed = {one.request_id: one for one in llm.stream([BAD[message], [5]], greedy(3))}
    assert [streamed[name].outputs[0].finish_reason for name in ("3", "4")] == ["error", "length"]
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (
            ["text"],
            greedy(),
            r"prompts\[0\] is a text, which needs a tokenizer: put one beside the model",
        ),
        ([[1]], SamplingParams(stop="x"), r"prompts\[0\]: stop strings need a tokenizer"),
    ],
)
def test_what_needs_a_tokenizer(prompts, params, message):
    with pytest.raises(UserError, match=message):
        make_llm(tiny_model(), 1).generate(prompts, params)


@pytest.mark.parametrize("form", [lambda text: text, lambda text: {"prompt": text}])
def test_half_a_surrogate_pair_is_no_text(form):
    llm = make_llm(tiny_model(), 1, tokenizer=Numbers())
    with pytest.raises(
        UserError, match=r"not valid Unicode: character 2 is the lone surrogate '\\ud800'"
    ):
        llm.generate(form("1 \ud800 2"), greedy())
    assert not llm.engine.has_unfinished


def test_no_parameters_are_the_defaults():
    one = SamplingParams(max_tokens=3)
    assert list_params(None, 2) == [SamplingParams()] * 2 and list_params(one, 2) == [one] * 2
    assert list_params((one,), 1) == [one] and list_params([], 0) == []
