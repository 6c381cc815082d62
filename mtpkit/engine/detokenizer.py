"""Text of a growing token sequence, and the stop strings in it."""

from typing import Any

_PROMPT_TAIL = 5
"""Prompt tokens decoded along, so that a tokenizer that marks word starts joins prompt and output as in one text."""
_CHARACTER = 4
"""Most tokens of one character: a byte each, in UTF-8."""
_REPLACEMENT = "\ufffd"
"""What a decoder shows for the bytes of an unfinished character."""


class Detokenizer:
    """Decodes the output of one request token by token.

    Text appears once its characters are complete. The first occurrence of a stop string ends the text before it; until
    the request is finished, an end of the text that may turn into a stop string is not shown. Without stop strings
    nothing is decoded before somebody looks at the text.
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
            before = self._decode(self._window, self._read)
            self._extend(self._decode(self._window, len(self._token_ids))[len(before) :])
            self._read = len(self._token_ids)

    def visible_text(self, finished: bool) -> str:
        """The text so far, as far as it is certain."""
        if not finished:
            self._read_on()
        hidden = 0 if finished or not self._longest_stop else self._longest_stop - 1
        return self._text[: len(self._text) - hidden] if len(self._text) > hidden else ""

    def _read_on(self) -> bool:
        """Decode what came since the last time, but for an unfinished character; whether it completed a stop string."""
        newest = len(self._token_ids)
        if newest == self._read:
            return False
        before = self._decode(self._window, self._read)
        for end in range(newest, max(self._read, newest - _CHARACTER), -1):
            after = self._decode(self._window, end)
            if len(after) > len(before) and not after.endswith(_REPLACEMENT):
                self._window, self._read = self._read, end
                return self._extend(after[len(before) :])
        return False

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
