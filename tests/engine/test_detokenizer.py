"""Incremental text equals the text of all tokens, and stop strings end it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.engine import SamplingParams
from mtpkit.engine.detokenizer import Detokenizer
from tests.engine.fakes import HashModel, fake_engine, run


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
                text += bytes(ids).decode() if is_byte else "".join(chr(97 + token_id - 256) for token_id in ids)
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
    """A look decodes all that came since the last one, but for an unfinished character, which U+FFFD looks like."""
    detokenizer, encoded = Detokenizer(Bytes(), []), text.encode()
    looks = data.draw(st.sets(st.integers(1, len(encoded))))
    for count, byte in enumerate(encoded, 1):
        detokenizer.append(byte)
        if count in looks:
            assert detokenizer.visible_text(False) == encoded[:count].decode(errors="ignore").rstrip("\ufffd")
    detokenizer.flush()
    assert detokenizer.visible_text(True) == text


fallback_tokens = st.lists(
    st.sampled_from([[256], [257], [999], [0x80], [0xF0], list("é".encode()), list("😀".encode()), list(b"ab")])
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
    tokens, texts = [*"😀😁😂".encode(), 0x80, 256], []
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
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    for count, byte in enumerate(text.encode(), 1):
        shown = detokenizer.visible_text(False)
        stopped = detokenizer.append(byte)
        assert stopped == (count in ends)
        if stopped:
            final = detokenizer.visible_text(True)
            assert final == min((text[:count].removesuffix(s) for s in stops if text[:count].endswith(s)), key=len)
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
