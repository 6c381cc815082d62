"""Incremental text equals the text of all tokens, and stop strings end it."""

import copy
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.engine import SamplingParams
from mtpkit.engine.requests.detokenizer import Detokenizer
from mtpkit.engine.requests.token_texts import CleanUp, TokenTexts
from tests.engine import tokenizers
from tests.engine.fakes import HashModel, fake_engine, run
from tests.shared import each


class Bytes:
    """A token a byte."""

    def decode(self, token_ids, skip_special_tokens=True):
        return bytes(token_ids).decode("utf-8", errors="replace")


class ByteFallback:
    """As tokenizers with byte fallback: of a run of bytes that is not UTF-8 each is replaced.

    256 and on are letters, 999 is a special token.
    """

    def decode(self, token_ids, skip_special_tokens=True):
        text = ""
        kept = [token_id for token_id in token_ids if token_id != 999]
        for is_byte, group in itertools.groupby(kept, lambda token_id: token_id < 256):
            ids = list(group)
            try:
                text += (
                    bytes(ids).decode()
                    if is_byte
                    else "".join(chr(97 + token_id - 256) for token_id in ids)
                )
            except UnicodeDecodeError:
                text += "\ufffd" * len(ids)
        return text


class Letters:
    """Token i is the i-th letter."""

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(chr(97 + token_id) for token_id in token_ids)


@given(st.text(min_size=1), st.text())
def test_text_grows_by_whole_characters_to_the_full_text(text, prompt):
    detokenizer = Detokenizer(Bytes(), list(prompt.encode()))
    for byte in text.encode():
        assert not detokenizer.append(byte)
        assert text.startswith(detokenizer.visible_text(False))
    detokenizer.flush()
    assert detokenizer.visible_text(True) == text


@given(st.text(min_size=1), st.data())
def test_text_is_the_same_however_often_it_is_looked_at(text, data):
    """A look decodes all that came since the last one, but for an unfinished character, which
    U+FFFD looks like."""
    detokenizer = Detokenizer(Bytes(), [])
    encoded = text.encode()
    looks = data.draw(st.sets(st.integers(1, len(encoded))))
    for count, byte in enumerate(encoded, 1):
        detokenizer.append(byte)
        if count in looks:
            assert detokenizer.visible_text(False) == encoded[:count].decode(
                errors="ignore"
            ).rstrip("\ufffd")
    detokenizer.flush()
    assert detokenizer.visible_text(True) == text


fallback_tokens = st.lists(
    st.sampled_from(
        [[256], [257], [999], [0x80], [0xF0], list("é".encode()), list("😀".encode()), list(b"ab")]
    )
).map(lambda groups: [token_id for group in groups for token_id in group])


@given(fallback_tokens, fallback_tokens, st.data())
def test_broken_characters_look_the_same_however_often_they_are_looked_at(prompt, tokens, data):
    looks = data.draw(st.sets(st.integers(0, len(tokens))))
    always, sometimes = (Detokenizer(ByteFallback(), prompt) for _ in range(2))
    for count, token_id in enumerate(tokens):
        always.append(token_id)
        sometimes.append(token_id)
        shown = always.visible_text(False)
        assert count not in looks or sometimes.visible_text(False) == shown
    always.flush()
    sometimes.flush()
    assert sometimes.visible_text(True) == always.visible_text(True)


def test_a_broken_byte_takes_no_more_of_the_text_before_it_for_being_seldom_looked_at():
    tokens = [*"😀😁😂".encode(), 0x80, 256]
    texts = []
    for looks in (range(14), [11], []):
        detokenizer = Detokenizer(ByteFallback(), [])
        for count, token_id in enumerate(tokens):
            detokenizer.append(token_id)
            if count in looks:
                detokenizer.visible_text(False)
        detokenizer.flush()
        texts.append(detokenizer.visible_text(True))
    assert texts == [texts[0]] * 3 and texts[0].startswith("😀😁")


def test_nothing_is_decoded_before_it_is_looked_at():
    class Counting(Letters):
        calls = 0

        def decode(self, token_ids, skip_special_tokens=True):
            self.calls += 1
            return super().decode(token_ids)

    tokenizer = Counting()
    detokenizer = Detokenizer(tokenizer, [1, 2])
    for token_id in range(20):
        assert not detokenizer.append(token_id) and tokenizer.calls == 0
    assert detokenizer.visible_text(False) == Letters().decode(range(20))
    calls = tokenizer.calls
    assert calls < 6
    detokenizer.visible_text(False)
    detokenizer.flush()
    assert tokenizer.calls == calls


def test_an_unfinished_character_is_shown_at_the_end_alone():
    detokenizer = Detokenizer(Bytes(), [])
    for byte in "aé".encode()[:-1]:
        detokenizer.append(byte)
    assert detokenizer.visible_text(False) == "a"
    detokenizer.flush()
    assert detokenizer.visible_text(True) == "a\ufffd"


letters = st.text("abc", min_size=1, max_size=4)


@given(st.text("abc", min_size=1, max_size=30), st.lists(letters, min_size=1, max_size=3))
def test_stop_strings_cut_at_the_token_that_completes_one(text, stops):
    detokenizer = Detokenizer(Bytes(), [], tuple(stops))
    ends = [
        end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)
    ]
    for count, byte in enumerate(text.encode(), 1):
        shown = detokenizer.visible_text(False)
        stopped = detokenizer.append(byte)
        assert stopped == (count in ends)
        if stopped:
            final = detokenizer.visible_text(True)
            assert final == min(
                (text[:count].removesuffix(s) for s in stops if text[:count].endswith(s)), key=len
            )
            assert final.startswith(shown)
            return
    assert not ends and detokenizer.visible_text(True) == text


def test_a_real_tokenizer(tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    text = "def add(left, right):\n    return the cat — é\n"
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("the mat\n"))
    for token_id in tokenizer.encode(text):
        detokenizer.append(token_id)
    detokenizer.flush()
    assert detokenizer.visible_text(True) == text


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("k", [0, 2, 5])
def test_stop_strings_among_accepted_drafts(k, ahead):
    model = HashModel()
    params = SamplingParams(temperature=0, max_tokens=12)
    tokens = model.decode([1, 2], params)
    text = Letters().decode(tokens)
    stop = text[4:6]
    end = text.index(stop) + 2
    settings = dict(num_speculative_tokens=k, tokenizer=Letters(), async_scheduling=ahead)
    engine = fake_engine(model, drafts="always", **settings)
    engine.add_request([1, 2], SamplingParams(temperature=0, max_tokens=12, stop=stop), "a")
    output = run(engine)["a"]
    assert output.outputs[0].token_ids == tokens[:end]
    assert output.outputs[0].text == text[: end - 2]
    assert output.outputs[0].finish_reason == "stop"
    assert output.stats.accepted == sum(output.stats.reached_per_depth)


def shown_in_steps(tokenizer, prompt, tokens, ends, stops=(), skip=True):
    """What is visible after each step, and at the end; a step ends before each of `ends`."""
    detokenizer = Detokenizer(TokenTexts(tokenizer, skip), prompt, stops)
    shown = []
    for count, token_id in enumerate(tokens, 1):
        detokenizer.append(token_id)
        if count in ends:
            shown.append(detokenizer.visible_text(False))
    detokenizer.flush()
    return [*shown, detokenizer.visible_text(True)]


def decode(tokenizer, token_ids, skip=True):
    return tokenizer.decode(token_ids, skip_special_tokens=skip)


def late_breaks(tokenizer, token_ids, skip=True):
    """Whether a run of byte tokens has a character before what makes it no UTF-8: `decode` replaces
    the character too, which was shown by then."""
    tokens = [
        token
        for token in tokenizer.convert_ids_to_tokens(token_ids)
        if not (skip and token in tokenizers.SPECIAL)
    ]
    for is_byte, group in itertools.groupby(tokens, lambda token: token.startswith("<0x")):
        try:
            if is_byte:
                bytes(int(token[3:5], 16) for token in group).decode()
        except UnicodeDecodeError as error:
            if error.start:
                return True
    return False


@st.composite
def tokens_of(draw, kind):
    """Prompt and output of few kinds of tokens, since bytes drawn from all seldom make a
    character."""
    tokenizer = tokenizers.of_kind(kind)
    names = tokenizers.letters_of_bytes()
    bytes_ = [0x80, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x20, 0x41, 0xEF, 0xBF, 0xBD]
    names = (
        [names[byte] for byte in bytes_]
        if kind == "byte_level"
        else [f"<0x{byte:02X}>" for byte in bytes_]
    )
    vocabulary = tokenizer.get_vocab()
    texts = sorted(token for token in vocabulary if len(token) > 1 and not token.startswith("<0x"))
    pool = st.sampled_from([vocabulary[name] for name in [*names, *texts] if name in vocabulary])
    few = st.sampled_from(draw(st.lists(pool, min_size=1, max_size=5)))
    return draw(st.just([]) | st.lists(few, max_size=9)), draw(st.lists(few, max_size=12))


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", tokenizers.KINDS)
@given(data=st.data())
def test_the_text_is_that_of_the_whole_in_steps_of_any_size(kind, skip, data):
    """For any tokens, after any prompt; and nothing that was shown is taken back."""
    tokenizer = tokenizers.of_kind(kind)
    prompt, tokens = data.draw(tokens_of(kind))
    ends = data.draw(st.sets(st.integers(1, len(tokens) or 1)))
    shown = shown_in_steps(tokenizer, prompt, tokens, ends, skip=skip)
    assert all(shown[-1].startswith(before) for before in shown)
    assert shown[-1] == shown_in_steps(tokenizer, prompt, tokens, range(99), skip=skip)[-1]
    whole = decode(tokenizer, prompt + tokens, skip)
    before = decode(tokenizer, prompt, skip)
    if whole.startswith(before) and not (
        before.endswith("\ufffd") or late_breaks(tokenizer, prompt + tokens, skip)
    ):
        assert shown[-1] == whole[len(before) :]


@pytest.mark.parametrize(
    "kind", ["byte_level", "byte_fallback", "word_piece, as written", "unigram, as written"]
)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_no_more_than_a_character_is_held_back(kind, skip, data):
    tokenizer = tokenizers.of_kind(kind)
    _, tokens = data.draw(tokens_of(kind))
    *shown, _ = shown_in_steps(tokenizer, [], tokens, range(99), skip=skip)
    for count, text in enumerate(shown, 1):
        held = decode(tokenizer, tokens[:count], skip)[len(text) :]
        assert late_breaks(tokenizer, tokens[:count], skip) or held in (
            "",
            "\ufffd",
            "\ufffd" * 2,
            "\ufffd" * 3,
        )


@pytest.mark.parametrize(
    "make", [Bytes, ByteFallback, tokenizers.byte_level, tokenizers.byte_fallback]
)
@given(text=st.text("aé€😀\ufffd ", min_size=1, max_size=6), data=st.data())
def test_a_character_that_begins_in_the_prompt_is_shown(make, text, data):
    """A prompt of token ids may end anywhere."""
    if make is ByteFallback:
        # without names of tokens, it looks like three broken bytes
        text = text[0].replace("\ufffd", "€")
    tokenizer = make()
    encoded = text.encode()
    start = data.draw(st.integers(0, len(encoded)))
    tokens = list(encoded)
    if make is tokenizers.byte_fallback:
        tokens = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in encoded])
    shown = shown_in_steps(
        tokenizer, tokens[:start], tokens[start:], data.draw(st.sets(st.integers(0, 24)))
    )
    expected = text[len(encoded[:start].decode(errors="ignore")) :]
    if make is tokenizers.byte_fallback and not start:
        expected = expected.removeprefix(" ")  # as at the start of any text
    assert shown[-1] == expected
    assert all(expected.startswith(before) for before in shown)


@pytest.mark.parametrize("kind", ["word_piece", "unigram"])
def test_clean_up_sees_the_text_of_the_whole(kind):
    tokenizer = tokenizers.of_kind(kind)
    tokens = tokenizer.encode("we 're the cat , don n't ' x ' .")
    for ends in ([], range(99)):
        *_, text = shown_in_steps(tokenizer, [], tokens, ends)
        assert text == decode(tokenizer, tokens) and text.startswith("we're the cat, don")


@each(("continued", "expected"), [([], ""), ([0x41], "A"), ([0x80], "\u00c0")])
def test_what_a_prompt_breaks_is_no_part_of_the_output(continued, expected):
    for tokenizer in (Bytes(), tokenizers.of_kind("byte_level")):
        assert shown_in_steps(tokenizer, [97, 0x80, 0xC3], continued, range(9))[-1] == expected


@each(
    ("continued", "expected"),
    [([], ""), (["the"], "the"), (["<0x80>"], "\u00c0"), (["<0xC3>"], "\ufffd")],
)
def test_bytes_of_a_prompt_that_break_are_no_part_of_the_output(continued, expected):
    tokenizer = tokenizers.of_kind("byte_fallback")
    prompt, tokens = map(tokenizer.convert_tokens_to_ids, (["the", "<0xC3>"], continued))
    assert shown_in_steps(tokenizer, prompt, tokens, range(9))[-1] == expected


@pytest.mark.parametrize("kind", ["word_piece", "unigram", "byte_level"])
def test_a_stop_string_in_what_the_last_token_held_back_is_the_reason(kind):
    """The clean-up of spaces and unfinished characters hold text back, which ends with
    `max_tokens`."""
    tokenizer = tokenizers.of_kind(kind)
    model = HashModel(len(tokenizer))
    found = 0
    for prompt in ([number] for number in range(len(tokenizer))):
        params = dict(temperature=0, max_tokens=3)
        tokens = model.decode(prompt, SamplingParams(**params))
        shown, whole = shown_in_steps(tokenizer, prompt, tokens, [3])
        if shown == whole:
            continue
        stop = whole[len(shown) :]
        engine = fake_engine(model, num_speculative_tokens=2, tokenizer=tokenizer)
        engine.add_request(prompt, SamplingParams(**params, stop=stop), "a")
        output = run(engine)["a"].outputs[0]
        assert output.text == whole[: whole.index(stop)] and output.finish_reason == "stop"
        found += len(output.token_ids) == 3
    assert found


class Counting:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.count = 0

    def decode(self, token_ids, **options):
        self.count += len(token_ids)
        return self.tokenizer.decode(token_ids, **options)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("stops", [(), ("END",)])
@pytest.mark.parametrize("kind", tokenizers.KINDS)
def test_the_time_is_linear_whatever_the_tokens_are(kind, stops, skip):
    """Literal U+FFFD, one broken byte, and tokens that all end inside a character, of which each
    continues the last."""
    tokenizer = tokenizers.of_kind(kind)
    names = {
        "byte_level": ["\u0122", tokenizers.letters_of_bytes()[0x80], "\u00ac\u00f0"],
        "byte_fallback": ["\ufffd", "<0x80>", "<0xE2>"],
    }
    for name in [*names.get(kind, ["\ufffd"]), "<end>"]:
        token_id = tokenizer.convert_tokens_to_ids(name)
        decoded = []
        for length in (100, 400):
            counting = Counting(tokenizer)
            *_, shown, final = shown_in_steps(
                counting, [], [token_id] * length, range(length + 1), stops, skip
            )
            assert final == decode(tokenizer, [token_id] * length, skip)
            assert len(final) - len(shown) <= (3 if not stops else 6)
            decoded.append(counting.count)
        assert decoded[1] < 4.1 * decoded[0] < 4.1 * 100 * 40


def test_a_tokenizer_of_ones_own_is_decoded_in_linear_time_too():
    for length in (100, 400):
        counting = Counting(Bytes())
        *_, shown, final = shown_in_steps(counting, [], [0x80] * length, range(length + 1))
        assert len(final) == length and len(shown) >= length - 4 and counting.count < 40 * length


def test_the_clean_up_is_that_of_transformers():
    """Also of a text in pieces, with spaces that one rule frees for the next."""
    tokenizer = tokenizers.of_kind("unigram")
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(
            rng.choices([" ", "'", "n", "t", "s", "ve", "re", "m", ".", ",", "?", "!", "x"], k=12)
        )
        clean_up = CleanUp()
        shown = ""
        for piece in itertools.batched(text, rng.randint(1, 5)):
            shown += clean_up.read("".join(piece))
        assert shown + clean_up.flush() == tokenizer.clean_up_tokenization(text)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("k", [0, 3])
def test_a_special_token_as_stop_string_stops_where_it_is_generated(k, ahead, caplog):
    """The text leaves special tokens out, so that a search in the text would never find it."""
    tokenizer = tokenizers.of_kind("byte_level")
    model = HashModel(len(tokenizers.of_kind("byte_level")))
    tokens = model.decode([1, 2], SamplingParams(temperature=0, max_tokens=12))
    special = tokenizer.convert_ids_to_tokens(tokens[5])
    marked = copy.deepcopy(tokenizer)
    marked.add_special_tokens({"additional_special_tokens": [special]})
    settings = dict(num_speculative_tokens=k, tokenizer=marked, async_scheduling=ahead)
    engine = fake_engine(model, drafts="always", **settings)
    stop = ["never", special, "a" + special]
    engine.add_request([1, 2], SamplingParams(temperature=0, max_tokens=12, stop=stop), "a")
    output = run(engine)["a"].outputs[0]
    end = tokens.index(tokens[5]) + 1
    assert output.token_ids == tokens[:end] and output.finish_reason == "stop"
    assert output.text == decode(marked, tokens[: end - 1])
    (warning,) = caplog.messages
    assert (
        warning.startswith(f"the stop string {'a' + special!r} is never found")
        and f"use {special!r} alone" in warning
    )
