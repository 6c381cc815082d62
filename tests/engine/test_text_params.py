"""What sampling parameters ask of the text and of the prompt: special tokens, stop strings, why an
output stopped, and prompts that are shortened."""

import asyncio
import itertools
from dataclasses import replace
from functools import partial

import pytest

from mtpkit import SamplingParams
from mtpkit.engine import AsyncLLM, RequestOutputKind
from mtpkit.errors import UserError
from tests.engine import tokenizers
from tests.engine.fakes import HashModel, fake_engine, run
from tests.engine.tiny import greedy, make_llm, tiny_model
from tests.shared import each

GREEDY = dict(temperature=0, max_tokens=24, ignore_eos=True)
END = "<end>"


def outputs_of(kind, params, k, prompts, **settings):
    """The outputs, and the tokens without any stop, of prompts that one engine decodes."""
    tokenizer = tokenizers.of_kind(kind)
    model = HashModel(len(tokenizer))
    # So that it is drawn now and then; bytes make few characters.
    model.table[:, tokenizer.convert_tokens_to_ids(END)] += 1.5
    if kind == "byte_fallback":
        model.table[:, : tokenizer.convert_tokens_to_ids("▁")] -= 50
    known = dict(num_speculative_tokens=k, tokenizer=tokenizer) | settings
    engine = fake_engine(model, **{"drafts": "always"} | known)
    for index, prompt in enumerate(prompts):
        engine.add_request(prompt, params, str(index))
    outputs = run(engine)
    plain = SamplingParams(**GREEDY)
    return [
        (outputs[str(index)].outputs[0], model.decode(prompt, plain))
        for index, prompt in enumerate(prompts)
    ]


def first_with(tokenizer, prompt, tokens, stop):
    """Number of the first tokens whose text contains a stop string, and that text; the whole text
    if none does."""
    before = tokenizer.decode(prompt)
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(prompt + tokens[:count])[len(before) :]
        if stop in text:
            return count, text
    return len(tokens), text


def prompts_of(tokenizer):
    """Prompts of one token each: a word, so that the output's text is what follows it."""
    words = tokenizer.convert_tokens_to_ids(["the"]) if "the" in tokenizer.get_vocab() else [116]
    return [words * (1 + number) for number in range(8)]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("k", range(4))
@pytest.mark.parametrize("kind", ["word_piece, as written", "byte_fallback"])
def test_a_special_token_in_the_text_is_found_as_a_stop_string(kind, k, include):
    """Also among accepted drafts. The text is transformers' own, cut before or after the string."""
    tokenizer = tokenizers.of_kind(kind)
    prompts = prompts_of(tokenizer)
    params = SamplingParams(
        **GREEDY, stop=[END], skip_special_tokens=False, include_stop_str_in_output=include
    )
    stopped = 0
    for prompt, (output, tokens) in zip(prompts, outputs_of(kind, params, k, prompts), strict=True):
        count, text = first_with(tokenizer, prompt, tokens, END)
        assert output.token_ids == tokens[:count]
        if END not in text:
            assert (output.text, output.finish_reason, output.stop_reason) == (text, "length", None)
            continue
        stopped += 1
        assert output.text == text[: text.index(END) + len(END) * include]
        assert (output.finish_reason, output.stop_reason) == ("stop", END)
    assert stopped > 0


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("k", [0, 3])
def test_a_special_token_that_the_text_leaves_out_is_the_stop_string_too(k, include):
    kind = "unigram, as written"
    tokenizer = tokenizers.of_kind(kind)
    prompts = prompts_of(tokenizer)
    params = SamplingParams(**GREEDY, stop=END, include_stop_str_in_output=include)
    end = tokenizer.convert_tokens_to_ids(END)
    stopped = 0
    for output, tokens in outputs_of(kind, params, k, prompts):
        if end not in tokens:
            assert (output.finish_reason, output.stop_reason) == ("length", None)
            continue
        stopped += 1
        assert output.token_ids == tokens[: tokens.index(end) + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", END)
        assert output.text.endswith(END) == include
        assert END not in output.text.removesuffix(END)
    assert stopped > 0


@pytest.mark.parametrize("k", [0, 3])
def test_the_reason_is_the_token_the_string_or_none(k):
    """None for an end-of-sequence token, also where it is a stop token besides."""
    kind = "unigram, as written"
    prompt = [tokenizers.of_kind(kind).convert_tokens_to_ids("the")]
    ((whole, tokens),) = outputs_of(kind, SamplingParams(**GREEDY), k, [prompt])
    assert whole.token_ids == tokens and whole.stop_reason is None
    token = tokens[5]
    end = tokens.index(token) + 1
    decode = partial(tokenizers.of_kind(kind).decode, skip_special_tokens=True)
    text = decode(tokens[:end])
    for params, eos, reason in [
        (dict(stop_token_ids=[token]), (), token),
        (dict(ignore_eos=False), (token,), None),
        (dict(stop_token_ids=[token], ignore_eos=False), (token,), None),
        (dict(stop_token_ids=[token]), (token,), token),
    ]:
        for include in (False, True):
            asked = SamplingParams(**GREEDY | params, include_stop_str_in_output=include)
            ((output, _),) = outputs_of(kind, asked, k, [prompt], eos=eos)
            assert (output.finish_reason, output.stop_reason) == ("stop", reason)
            assert output.token_ids == tokens[:end]
            shown = text if include else decode(tokens[: end - 1])
            assert output.text.strip() == shown.strip()
    string = text.strip()[-2:]
    ((output, _),) = outputs_of(kind, SamplingParams(**GREEDY, stop=["never", string]), k, [prompt])
    assert (output.finish_reason, output.stop_reason) == ("stop", string)


@pytest.mark.parametrize("include", [False, True])
def test_pieces_add_up_with_stop_strings_and_special_tokens(include):
    """Cumulative outputs only grow, and new pieces add up to the whole."""
    tokenizer = tokenizers.of_kind("unigram")
    llm = make_llm(tiny_model(), 3, tokenizer=tokenizer)
    prompts = [[number] for number in range(1, 9)]
    texts = {}
    for kind in RequestOutputKind:
        params = SamplingParams(
            temperature=3.0,
            seed=4,
            max_tokens=60,
            stop=["<s>", " cat"],
            skip_special_tokens=False,
            include_stop_str_in_output=include,
            output_kind=kind,
        )
        shown = [""] * len(prompts)
        for output in llm.stream(prompts, params):
            place = int(output.request_id) % len(prompts)
            completion = output.outputs[0]
            if kind == RequestOutputKind.DELTA:
                shown[place] += completion.text
            else:
                assert completion.text.startswith(shown[place])
                shown[place] = completion.text
            if output.finished and completion.stop_reason:
                assert completion.text.endswith(completion.stop_reason) or not include
        texts[kind] = shown
    assert len({tuple(shown) for shown in texts.values()}) == 1
    assert any("<s>" in text for text in shown) == include


@each(
    ("stops", "include", "text", "reason"),
    [
        (["cde", "bc"], False, "a", "bc"),
        (["cde", "bc"], True, "abc", "bc"),
        (["bcd", "b"], True, "ab", "b"),
        (["x", "e"], True, "abcde", "e"),
    ],
)
def test_the_first_stop_string_of_a_token_is_the_reason(stops, include, text, reason):
    class Alphabet:
        def decode(self, token_ids, skip_special_tokens=True):
            return "abcdef" * len(token_ids)

    engine = fake_engine(HashModel(), tokenizer=Alphabet())
    params = SamplingParams(**GREEDY, stop=stops, include_stop_str_in_output=include)
    engine.add_request([1], params, "a")
    output = run(engine)["a"].outputs[0]
    assert (output.text, output.stop_reason) == (text, reason)


def test_without_texts_there_is_none_and_no_stop_string():
    llm = make_llm(tiny_model(), 2, tokenizer=tokenizers.of_kind("unigram"))
    with_text, without = (
        llm.generate([[1, 2]], SamplingParams(**GREEDY, detokenize=detokenize))[0].outputs[0]
        for detokenize in (True, False)
    )
    assert with_text.text and without.text == ""
    assert without.token_ids == with_text.token_ids
    with pytest.raises(UserError, match="stop needs the text: leave detokenize at True"):
        SamplingParams(stop="a", detokenize=False)


@each(
    ("kept", "most"),
    [(None, 12), (30, 12), (12, 12), (5, 5), (1, 1), (-1, 12)],
)
def test_prompts_keep_their_last_tokens(kept, most):
    llm = make_llm(tiny_model(), 2, max_model_len=20)
    prompt = list(range(1, 13))
    params = SamplingParams(**GREEDY | {"max_tokens": 3}, truncate_prompt_tokens=kept)
    output = llm.generate([{"prompt_token_ids": prompt, "checkpoint_at": 10}], params)[0]
    assert output.prompt_token_ids == prompt[-most:]
    (expected,) = llm.generate([prompt[-most:]], greedy(3))
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    request = llm.engine.intake.make(prompt, params, checkpoint_at=10)
    at = 10 - (12 - most)
    assert request.checkpoint_at == (at if at > 0 else None)


def test_a_prompt_is_shortened_to_what_the_model_has_room_for():
    prompt = list(range(1, 31))
    params = SamplingParams(**GREEDY | {"max_tokens": 3}, truncate_prompt_tokens=-1)
    llm = make_llm(tiny_model(), 2, max_model_len=20)
    expected = llm.generate([prompt], params)[0]
    assert expected.prompt_token_ids == prompt[-19:] and len(expected.outputs[0].token_ids) == 1

    async def decoded() -> list:
        small = dict(num_blocks=40, block_size=8, max_num_seqs=4, warm_up=False)
        async with AsyncLLM(tiny_model(), 2, max_model_len=20, **small) as engine:
            return [output async for output in engine.generate(prompt, params)]

    *_, last = asyncio.run(decoded())
    assert last.prompt_token_ids == expected.prompt_token_ids
    assert last.outputs[0].token_ids == expected.outputs[0].token_ids


@each("tokens", [0, -2, 1.0, "5", True])
def test_lengths_that_no_prompt_can_be_cut_to(tokens):
    with pytest.raises(UserError, match="truncate_prompt_tokens is"):
        SamplingParams(truncate_prompt_tokens=tokens)


@pytest.mark.parametrize("k", [0, 3])
def test_stop_strings_wait_for_min_tokens(k):
    """One that ends before counts no more; one that begins before and ends after does."""
    llm = make_llm(tiny_model(), k, tokenizer=Pairs())
    plain = llm.generate([5, 9], greedy(30))[0].outputs[0].token_ids
    text = Pairs().decode(plain)
    for stop, min_tokens in itertools.product(
        {text[at : at + 3] for at in range(0, 40, 5)}, (1, 9)
    ):
        # The longer one makes the detokenizer look further back.
        params = replace(greedy(30), stop=[stop, "never found"], min_tokens=min_tokens)
        completion = llm.generate([5, 9], params)[0].outputs[0]
        # The token that a character belongs to is half of its place.
        ends = [at + 3 for at in range(len(text)) if text[at : at + 3] == stop]
        late = [end for end in ends if (end + 1) // 2 > min_tokens]
        assert (completion.finish_reason == "stop") == bool(late)
        if late:
            assert len(completion.token_ids) == (late[0] + 1) // 2
            assert completion.text == text[: late[0] - 3] and completion.stop_reason == stop


class Pairs:
    """Each token is two letters."""

    def encode(self, text: str) -> list[int]:
        raise AssertionError("prompts are token ids")

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token % 5) + chr(97 + token // 5) for token in token_ids)
