"""Text of a growing token sequence, and the stop strings in it."""

from typing import Any

_PROMPT_TAIL = 5
"""Prompt tokens decoded along, so that a tokenizer that marks word starts joins prompt and output as in one text."""
_REPLACEMENT = "\ufffd"
"""What a decoder shows for the bytes of an unfinished character."""


class Detokenizer:
    """Decodes the output of one request token by token.

    Text appears once its characters are complete. The first occurrence of a stop string ends the text before it; until
    the request is finished, an end of the text that may turn into a stop string is not shown. Without stop strings
    nothing is decoded before somebody looks at the text, or the request ends.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: list[int], stop_strings: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._token_ids = list(prompt_token_ids[-_PROMPT_TAIL:])
        self._window = 0
        self._read = len(self._token_ids)
        self._stop_strings = stop_strings
        self._longest_stop = max(map(len, stop_strings), default=0)
        self._text = ""

    def append(self, token_id: int) -> bool:
        """Add one token; whether it completed a stop string."""
        self._token_ids.append(token_id)
        return bool(self._stop_strings) and self._read_on()

    def flush(self) -> None:
        """Show what is left of an unfinished character; nothing may be appended afterwards."""
        self._read_on()
        if self._read < len(self._token_ids):
            self._extend(self._new_text(len(self._token_ids)))
            self._read = len(self._token_ids)

    def visible_text(self, finished: bool) -> str:
        """The text so far, as far as it is certain."""
        if not finished:
            self._read_on()
        hidden = 0 if finished or not self._longest_stop else self._longest_stop - 1
        return self._text[: len(self._text) - hidden] if len(self._text) > hidden else ""

    def _read_on(self) -> bool:
        """Decode what came since the last time, but for an unfinished character; whether it completed a stop string.

        What broken characters look like depends on what is decoded with them: then token by token, so that the text is
        the same however often somebody looks.
        """
        newest = len(self._token_ids)
        if newest > self._read + 1 and _REPLACEMENT not in self._new_text(newest):
            stopped = self._advance(newest)
            if self._read == newest:  # the next text is decoded after the last character alone, as token by token
                starts = range(newest - 1, self._window, -1)
                self._window = next((start for start in starts if self._is_whole(start)), self._window)
            return stopped
        return any(self._advance(end) for end in range(self._read + 1, newest + 1))

    def _advance(self, end: int) -> bool:
        """Read the tokens before `end`, if they end with a character; whether that completed a stop string."""
        new = self._new_text(end)
        if not new or new.endswith(_REPLACEMENT):
            return False
        self._window, self._read = self._read, end
        return self._extend(new)

    def _new_text(self, end: int) -> str:
        """What the tokens from those that were read to `end` add to the text."""
        before = self._decode(self._window, self._read)
        return self._decode(self._window, end)[len(before) :]

    def _is_whole(self, start: int) -> bool:
        """Whether the tokens from `start` on are text without a broken character."""
        text = self._decode(start, len(self._token_ids))
        return bool(text) and _REPLACEMENT not in text

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._token_ids[start:end], skip_special_tokens=True)

    def _extend(self, new: str) -> bool:
        """Append `new` and cut the text at the first stop string that ends in it."""
        searched = max(0, len(self._text) - self._longest_stop + 1)
        self._text += new
        found = [at for stop in self._stop_strings if (at := self._text.find(stop, searched)) >= 0]
        if found:
            self._text = self._text[: min(found)]
        return bool(found)
