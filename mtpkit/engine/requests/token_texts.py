"""Text of single tokens: what a detokenizer must know of a tokenizer, and text that grows token by
token."""

import codecs
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
"""Character that decoders show for bytes that are no character, or not yet."""

_LONGEST_START = 3
"""Most bytes of an unfinished character in UTF-8."""
_PROMPT_TAIL = 5
"""Prompt tokens that are decoded before the output, so that it continues their text and their last
character."""
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""Texts that lose their spaces, one after the other, in `clean_up_tokenization` of transformers."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that an engine calls."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the token ids of a text, special tokens included."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        ...


class TokenTexts:
    """How a tokenizer decodes. Make one per tokenizer and share it: making it takes hundreds of
    look-ups.

    Args:
        skip_special_tokens: leave special tokens out of texts.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer: Any = tokenizer
        self._decode: Callable[..., str] = tokenizer.decode
        self._named = hasattr(tokenizer, "convert_tokens_to_ids") and hasattr(
            tokenizer, "convert_ids_to_tokens"
        )
        self._options: dict[str, bool] = {"skip_special_tokens": skip_special_tokens}
        self.cleans = self._find_clean_up()
        """Whether the tokenizer's own `decode` removes spaces before punctuation. `decode` here
        never does."""
        backend = _backend(tokenizer)
        if backend is not None:
            # What the tokenizer does around this call takes five times as long as the call.
            self._decode = backend.decode
            self._options = {"skip_special_tokens": skip_special_tokens}
        self._alone: dict[int, str] = {}
        """Texts of tokens alone, as far as they were asked for."""
        self.bytes = self._find_bytes()
        """Bytes of the tokens such as `<0xE2>` that tokenizers with byte fallback have."""
        self.most_unfinished = _LONGEST_START
        """Most replacement characters that later tokens, byte tokens aside, may turn into one
        character."""
        if self.bytes:
            self.most_unfinished = 0
        elif self._named:
            # byte-level tokenizers show one for all bytes of an unfinished character
            self.most_unfinished = 1

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, before any clean-up."""
        return self._decode(token_ids, **self._options)

    def alone(self, token_id: int) -> str:
        """Text of a token alone, before any clean-up."""
        text = self._alone.get(token_id)
        if text is None:
            text = self._alone[token_id] = self.decode([token_id])
        return text

    def is_skipped(self, token_id: int) -> bool:
        """Whether a token has no text. (Alone, a token that is only a word's start may have none
        either.)"""
        return not self.decode([token_id, token_id])

    def special_token(self, text: str) -> int | None:
        """The special token with this text that texts leave out; None if there is none."""
        token_id = self._token_id(text)
        if token_id is None or not self.is_skipped(token_id):
            return None
        return token_id

    def added_token(self, text: str) -> int | None:
        """The token with this text that was added to the vocabulary, special or, as `</think>`
        often is, not; None if there is none."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        if not any(str(token) == text for token in added):
            return None
        return self._token_id(text)

    def special_inside(self, text: str) -> str | None:
        """The longest special token that is a part of this text; None if there is none."""
        inside = (special for special in self._special_texts if special in text)
        return max(inside, key=len, default=None)

    @functools.cached_property
    def _special_texts(self) -> set[str]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        named = getattr(self._tokenizer, "all_special_tokens", ())
        return {*(token.content for token in added if token.special), *named}

    def _token_id(self, token: str) -> int | None:
        if not self._named:
            return None
        token_id = self._tokenizer.convert_tokens_to_ids(token)
        if token_id is None:
            return None
        # Tokenizers answer with the id of the unknown token for what they do not know.
        is_known = self._tokenizer.convert_ids_to_tokens(token_id) == token
        return token_id if is_known else None

    def _find_clean_up(self) -> bool:
        """Turn the clean-up of `decode` off; returns whether it was on. Its flag alone does not
        tell: releases of transformers differ in the kinds of tokenizers for which they heed it."""
        if not getattr(self._tokenizer, "clean_up_tokenization_spaces", False):
            return False
        token_ids = self._tokenizer.encode("a" + "".join(f"{text} a" for text in _CLEANED))
        cleaned = self.decode(token_ids)
        self._options["clean_up_tokenization_spaces"] = False
        return self.decode(token_ids) != cleaned

    def _find_bytes(self) -> dict[int, int]:
        found = {byte: self._token_id(f"<0x{byte:02X}>") for byte in range(256)}
        token_ids = {token_id: byte for byte, token_id in found.items() if token_id is not None}
        e_acute = [found[byte] for byte in "é".encode()]
        # In other vocabularies such a name is a text like any other.
        if (
            None in e_acute
            or self.decode([token_id for token_id in e_acute if token_id is not None]) != "é"
        ):
            return {}
        return token_ids


class RawText:
    """Text of tokens, before clean-up, as it becomes known; the tokens may come in groups of any
    size.

    A token's text may depend on whether any token precedes it (the first word has no space before
    it), so that tokens are decoded after a `context`: a token whose text is known. Tokens that end
    inside a character stay `pending` until later tokens finish it, or show that it is broken.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._context: list[int] = []
        self._context_length = 0
        self._pending: list[int] = []
        self._shown = 0
        """Number of characters of the pending tokens that were returned."""
        self._foreign = 0
        """Number of pending tokens, or unfinished bytes, that belong to the prompt."""
        self._bytes = b""
        """Bytes of an unfinished character, from byte fallback."""
        self._broken = False
        """Whether the current run of byte tokens is not UTF-8: decoders then replace each of its
        bytes."""

    def skip(self, prompt_token_ids: Sequence[int]) -> None:
        """Begin after a prompt. If it ends inside a character, the character is returned once it is
        finished."""
        # The whole prompt may have 100,000 tokens. Only its last characters matter here.
        tail = prompt_token_ids[-_PROMPT_TAIL:]
        while len(tail) < len(prompt_token_ids) and not self._texts.decode(tail):
            tail = prompt_token_ids[-2 * len(tail) :]  # special tokens alone are no context
        self.read(tail)
        run = bytes(self._texts.bytes.get(token_id, 0) for token_id in tail[-_LONGEST_START:])
        starts = (run[-length:] for length in range(len(run), 0, -1))
        self._bytes = next(filter(_is_unfinished, starts), b"")
        self._broken = False
        self._foreign = len(self._bytes) or len(self._pending)

    def read(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that later tokens cannot change."""
        new = []
        for is_byte, group in itertools.groupby(token_ids, self._texts.bytes.__contains__):
            if is_byte:
                new += [self._read_byte(token_id) for token_id in group]
            else:
                new += self._read_group(list(group))
        return "".join(new)

    def flush(self) -> str:
        """Text of the tokens that are still pending. No token may be added afterwards."""
        text = ""
        if self._pending:
            text = self._text(self._pending)
            if self._foreign:
                self._leave_out_prompt(self._pending, text)
        return text[self._shown :] + self._end_bytes()

    def _read_byte(self, token_id: int) -> str:
        if not self._context:
            text = self._texts.alone(token_id)
            self._set_context(token_id, text)
            if not text:  # a space, which decoders drop at the start
                return ""
        if self._broken:
            return REPLACEMENT
        self._bytes += bytes([self._texts.bytes[token_id]])
        try:
            text, _ = codecs.utf_8_decode(self._bytes, "strict", False)
        except UnicodeDecodeError:
            text = self._end_bytes()
            self._broken = True
            return text
        if text:
            self._bytes = b""
            self._foreign = 0
        return text

    def _end_bytes(self) -> str:
        """End a run of byte tokens; returns a replacement character for each byte that does not
        belong to a prompt."""
        text = ""
        if self._bytes:
            text = REPLACEMENT * (len(self._bytes) - self._foreign)
            self._foreign = 0
        self._bytes = b""
        self._broken = False
        return text

    def _read_group(self, token_ids: list[int]) -> list[str]:
        """Add tokens that are no byte tokens, at once if all of them end whole characters, else one
        by one."""
        if len(token_ids) == 1:
            return [self._read_token(token_ids[0])]
        # Without stop strings, the whole output may come as one group: one call decodes it.
        text = self._text([*self._pending, *token_ids])
        if self._foreign or REPLACEMENT in text:
            return [self._read_token(token_id) for token_id in token_ids]
        new = text[self._shown :]
        if new:
            new = self._end_bytes() + new
        self._forget_pending(token_ids)
        return [new]

    def _read_token(self, token_id: int) -> str:
        tokens = [*self._pending, token_id]
        text = self._text(tokens)
        if self._pending and not self._texts.alone(token_id) and text == self._text(self._pending):
            # A special token inside a character, which later tokens may still finish.
            return ""
        # A run of byte tokens ends where other text begins.
        before = self._end_bytes() if text else ""

        unfinished = min(len(text) - len(text.rstrip(REPLACEMENT)), self._texts.most_unfinished)
        end = len(text) - unfinished
        if self._foreign and end > self._shown:
            self._leave_out_prompt(tokens, text)
        new = text[self._shown : end]
        self._pending = tokens
        self._shown = max(self._shown, end)
        if not unfinished:
            self._forget_pending([token_id])
        elif len(tokens) > _LONGEST_START:
            new += self._cut(text)
        return before + new

    def _cut(self, text: str) -> str:
        """Shorten pending tokens to the last three, which contain all bytes of an unfinished
        character.

        What is held back is the end of `text`, replacement characters. It is also the end of what
        the last three decode to, whose beginning may differ. Returns the held-back text of the
        other tokens.
        """
        if self._foreign:
            self._leave_out_prompt(self._pending, text)
        held = text[self._shown :]
        self._pending = self._pending[-_LONGEST_START:]
        length = len(self._text(self._pending))
        kept = min(len(held), length)
        self._shown = length - kept
        return held[: len(held) - kept]

    def _leave_out_prompt(self, tokens: list[int], text: str) -> None:
        """Count as shown the text that pending tokens of the prompt have alone, but not a character
        that ends later."""
        head = self._text(tokens[: self._foreign])
        own = len(head)
        if head + self._text(tokens[self._foreign :]) != text:
            same = (one == other for one, other in zip(head, text, strict=False))
            own = min(len(head) - 1, sum(itertools.takewhile(bool, same)))
        self._shown = max(self._shown, own)
        self._foreign = 0

    def _forget_pending(self, token_ids: list[int]) -> None:
        """Forget pending tokens, whose text is returned, and decode later ones after the newest
        whole token."""
        self._pending = []
        self._shown = 0
        for token_id in reversed(token_ids):
            text = self._texts.alone(token_id)
            if text and (REPLACEMENT not in text or not self._texts.most_unfinished):
                self._set_context(token_id, text)
                return
        if not self._context:
            alone = (token_id for token_id in token_ids if not self._texts.alone(token_id))
            for token_id in itertools.filterfalse(self._texts.is_skipped, alone):
                # a word's start without a word, whose space comes with the next token
                self._set_context(token_id, "")
                return

    def _set_context(self, token_id: int, text: str) -> None:
        self._context = [token_id]
        self._context_length = len(text)

    def _text(self, token_ids: Iterable[int]) -> str:
        return self._texts.decode([*self._context, *token_ids])[self._context_length :]


class CleanUp:
    """`clean_up_tokenization` of transformers on a text that comes in pieces; holds back what it
    may still change."""

    def __init__(self) -> None:
        self._held = [""] * len(_CLEANED)

    def read(self, text: str) -> str:
        """Add text; returns the cleaned text that later text cannot change."""
        for stage, searched in enumerate(_CLEANED):
            *whole, rest = (self._held[stage] + text).split(searched)
            starts = (
                length
                for length in range(len(searched) - 1, 0, -1)
                if rest.endswith(searched[:length])
            )
            end = len(rest) - next(starts, 0)
            self._held[stage] = rest[end:]
            text = searched.strip().join([*whole, rest[:end]])
        return text

    def flush(self) -> str:
        """The text that is still held back, cleaned. No text may be added afterwards."""
        text = ""
        for stage, searched in enumerate(_CLEANED):
            text = (self._held[stage] + text).replace(searched, searched.strip())
        self._held = [""] * len(_CLEANED)
        return text


def _backend(tokenizer: Any) -> Any:
    """What a tokenizer's `decode` calls, if it does nothing else but clean up; else None."""
    # Tokenizers of transformers have imported it, and others need not.
    transformers = sys.modules.get("transformers")
    usual = getattr(transformers, "PreTrainedTokenizerFast", None)
    if usual is None or not isinstance(tokenizer, usual):
        return None
    kind = type(tokenizer)
    calls_it = kind.decode is usual.decode and kind._decode is usual._decode
    return tokenizer.backend_tokenizer if calls_it else None


def _is_unfinished(start: bytes) -> bool:
    """Whether bytes are the beginning of one character in UTF-8."""
    try:
        return codecs.utf_8_decode(start, "strict", False) == ("", 0)
    except UnicodeDecodeError:
        return False
