"""Arguments and methods of vLLM's that are not there are answered in one line, before a model is
opened."""

import copy
import inspect
import pickle

import pytest

from mtpkit import LLM, SamplingParams
from mtpkit.engine.requests import absent
from mtpkit.errors import UserError
from tests.engine.tiny import greedy, make_llm, tiny_model

TABLES = {
    "LLM": (lambda **named: LLM("nowhere", **named), absent.LLM_ARGUMENTS),
    "SamplingParams": (SamplingParams, absent.SAMPLING_ARGUMENTS),
    "LLM.generate": (
        lambda **named: LLM.generate(object.__new__(LLM), [[1]], **named),
        absent.GENERATE_ARGUMENTS,
    ),
    "LLM.chat": (
        lambda **named: LLM.chat(object.__new__(LLM), [[]], **named),
        absent.CHAT_ARGUMENTS,
    ),
    "LLM.stream": (
        lambda **named: LLM.stream(object.__new__(LLM), [[1]], **named),
        absent.GENERATE_ARGUMENTS,
    ),
}


def message_of(call, **named) -> str:
    with pytest.raises(UserError) as caught:
        call(**named)
    text = str(caught.value)
    assert len(text) <= 400 and "\n" not in text
    return text


@pytest.mark.parametrize("what", TABLES)
def test_each_is_answered_unless_its_value_asks_for_nothing(what):
    call, table = TABLES[what]
    for name, answer in table.items():
        said = message_of(call, **{name: object()})
        assert said.startswith(f"{what} has no argument {name} (")
        assert said.endswith(f"); see help({what})")
        for value in (None, [], *answer.neutral):
            try:
                call(**{name: value})
            # there is no model in the places that are called here
            except (UserError, AttributeError) as error:
                assert "no argument" not in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data_parallel_size", True),
        ("data_parallel_size", 2),
        ("trust_remote_code", 0),
    ],
)
def test_what_is_nearly_neutral_is_not(name, value):
    assert f"no argument {name} (" in message_of(TABLES["LLM"][0], **{name: value})


def test_no_table_hides_an_argument_that_is_there():
    for function, table in (
        (LLM.__init__, absent.LLM_ARGUMENTS),
        (SamplingParams, absent.SAMPLING_ARGUMENTS),
        (LLM.generate, absent.GENERATE_ARGUMENTS),
        (LLM.stream, absent.GENERATE_ARGUMENTS),
        (LLM.chat, absent.CHAT_ARGUMENTS),
    ):
        assert not table.keys() & inspect.signature(function).parameters.keys()
    assert not [name for name in absent.LLM_METHODS if hasattr(LLM, name)]


def test_all_are_named_and_misspelt_ones_are_guessed():
    wrong = dict(data_parallel_size=2, max_modellen=3, zzz=1)
    assert (
        message_of(TABLES["LLM"][0], **wrong)
        == "LLM has no argument data_parallel_size (use mtpkit generate --data-parallel-size, or"
        " mtpkit.engine.Replicas), max_modellen (did you mean max_model_len?), zzz; see"
        " help(LLM)"
    )
    names = [
        "data_parallel_size",
        "quantization_param_path",
        "trust_remote_code",
        "swap_space",
        "speculative_config",
    ]
    names += ["calculate_kv_scales", "hf_overrides", "enable_lora"]
    text = message_of(TABLES["LLM"][0], **dict.fromkeys(names, "x"))
    assert not [name for name in names if name not in text]
    assert text.endswith("more; see help(LLM)")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: LLM(), "LLM: missing a required argument: 'model'"),
        (lambda: LLM("a", 0, model="b"), "LLM: multiple values for argument 'model'"),
        (lambda: SamplingParams(*range(99)), "SamplingParams: too many positional arguments"),
        (
            lambda: LLM.generate(object.__new__(LLM)),
            "LLM.generate: missing a required argument: 'prompts'",
        ),
    ],
)
def test_missing_and_doubled_arguments_are_one_line_too(call, says):
    assert message_of(call).startswith(says)


def test_neutral_arguments_change_nothing():
    llm = LLM(
        tiny_model(),
        num_blocks=50,
        tensor_parallel_size=1,
        quantization=None,
        trust_remote_code=False,
    )
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, logprobs=None, min_tokens=0, best_of=1
    )
    got = llm.generate([[1, 2]], params, lora_request=None)[0].outputs[0].token_ids
    want = (
        make_llm(tiny_model(), 0).generate([[1, 2]], greedy(max_tokens=8))[0].outputs[0].token_ids
    )
    assert got == want


def test_methods_of_vllm_say_what_to_do():
    llm = object.__new__(LLM)
    for name in absent.LLM_METHODS:
        said = message_of(lambda name=name: getattr(llm, name))
        assert said.startswith(f"'LLM' object has no attribute {name!r}: ")
        assert not hasattr(llm, name)
    said = message_of(lambda: llm.sleep)
    assert said == "'LLM' object has no attribute 'sleep': delete the LLM and make a new one"
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'zzz'"):
        llm.zzz  # noqa: B018


def test_signatures_and_copies_are_what_they_were():
    assert str(inspect.signature(LLM)).startswith("(model: Any, num_speculative_tokens: ")
    assert list(inspect.signature(SamplingParams).parameters)[:2] == ["n", "max_tokens"]
    assert "Decode all prompts to their end" in LLM.generate.__doc__
    params = SamplingParams(seed=3)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
