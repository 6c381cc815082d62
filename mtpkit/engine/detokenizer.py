"""Incremental detokenization, and the search for stop strings."""

from collections.abc import Sequence
from typing import Protocol

_PROMPT_TAIL = 5
"""Prompt tokens that are decoded with the output, so that tokenizers that mark word starts join the two as one text."""
_REPLACEMENT = "\ufffd"
"""Character that a decoder shows for the bytes of an unfinished character."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that an engine calls."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the token ids of a text, special tokens included."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        ...


class Detokenizer:
    """Decodes the output of one request token by token.

    A character appears once all its tokens are known. The text ends before the first stop string. Until the request is
    finished, the last characters, which may become part of a stop string, are not shown. Without stop strings, nothing
    is decoded until the text is read or the request ends.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int], stop_strings: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._token_ids = list(prompt_token_ids[-_PROMPT_TAIL:])
        self._window = 0
        self._read = len(self._token_ids)
        self._stop_strings = stop_strings
        self._longest_stop = max(map(len, stop_strings), default=0)
        self._text = ""

    def append(self, token_id: int) -> bool:
        """Add one token; returns whether it completed a stop string."""
        self._token_ids.append(token_id)
        return bool(self._stop_strings) and self._read_on()

    def flush(self) -> None:
        """Show the bytes of an unfinished character; no token may be appended afterwards."""
        self._read_on()
        if self._read < len(self._token_ids):
            self._extend(self._new_text(len(self._token_ids)))
            self._read = len(self._token_ids)

    def visible_text(self, finished: bool) -> str:
        """The part of the text that later tokens cannot change."""
        if not finished:
            self._read_on()
        hidden = 0 if finished or not self._longest_stop else self._longest_stop - 1
        return self._text[: len(self._text) - hidden] if len(self._text) > hidden else ""

    def _read_on(self) -> bool:
        """Decode new tokens, except for an unfinished character; returns whether they completed a stop string.

        How broken characters are shown depends on the tokens that are decoded with them. If the new text has broken
        characters, its tokens are decoded one by one, so that the text does not depend on how often it is read.
        """
        newest = len(self._token_ids)
        if newest > self._read + 1 and _REPLACEMENT not in self._new_text(newest):
            stopped = self._advance(newest)
            if self._read == newest:  # decode the next text after the last whole character, as if token by token
                starts = range(newest - 1, self._window, -1)
                self._window = next((start for start in starts if self._is_whole(start)), self._window)
            return stopped
        return any(self._advance(end) for end in range(self._read + 1, newest + 1))

    def _advance(self, end: int) -> bool:
        """Read the tokens before `end` if they end with a whole character; returns whether a stop string was found."""
        new = self._new_text(end)
        if not new or new.endswith(_REPLACEMENT):
            return False
        self._window, self._read = self._read, end
        return self._extend(new)

    def _new_text(self, end: int) -> str:
        """The text that the unread tokens before `end` add."""
        before = self._decode(self._window, self._read)
        return self._decode(self._window, end)[len(before) :]

    def _is_whole(self, start: int) -> bool:
        """Whether the tokens from `start` on decode to text without broken characters."""
        text = self._decode(start, len(self._token_ids))
        return bool(text) and _REPLACEMENT not in text

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._token_ids[start:end], skip_special_tokens=True)

    def _extend(self, new: str) -> bool:
        """Append `new` and cut the text at the first stop string; returns whether one was found."""
        searched = max(0, len(self._text) - self._longest_stop + 1)
        self._text += new
        found = [at for stop in self._stop_strings if (at := self._text.find(stop, searched)) >= 0]
        if found:
            self._text = self._text[: min(found)]
        return bool(found)
