"""Incremental detokenization, and the search for stop strings."""

from collections.abc import Sequence

from mtpkit.engine.requests.token_texts import CleanUp, RawText, Tokenizer, TokenTexts


class Detokenizer:
    """Decodes the output of one request token by token.

    The text is that of the whole output, and whatever was visible stays. A character appears once
    all its tokens are known, and before the tokenizer's clean-up of spaces can no longer change it.
    The text ends before the first stop string. Until the request is finished, the last characters,
    which may become part of a stop string, are not shown. Without stop strings, nothing is decoded
    until the text is read or the request ends. The time is linear in the number of tokens, whatever
    they are.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | TokenTexts,
        prompt_token_ids: Sequence[int],
        stop_strings: tuple[str, ...] = (),
    ) -> None:
        texts = tokenizer if isinstance(tokenizer, TokenTexts) else TokenTexts(tokenizer)
        self._raw = RawText(texts)
        self._clean_up = CleanUp() if texts.cleans else None
        self._prompt: Sequence[int] = prompt_token_ids
        self._unread: list[int] = []
        self._stop_strings = stop_strings
        self._longest_stop = max(map(len, stop_strings), default=0)
        self._stopped = False
        self._parts: list[str] = []
        self._tail = ""
        """End of the text, in which a stop string may begin."""

    def append(self, token_id: int) -> bool:
        """Add one token; returns whether it completed a stop string."""
        self._unread.append(token_id)
        # Decoding takes longer than scheduling. Without stop strings it waits until somebody reads.
        return bool(self._stop_strings) and self._read_on()

    def flush(self) -> bool:
        """Show what was held back, such as the bytes of an unfinished character; no token may be
        appended afterwards. Returns whether that completed a stop string."""
        self._read_on()
        rest = self._raw.flush()
        if self._clean_up:
            rest = self._clean_up.read(rest) + self._clean_up.flush()
        return self._extend(rest)

    def visible_text(self, finished: bool) -> str:
        """The part of the text that later tokens cannot change."""
        if not finished:
            self._read_on()
        text = "".join(self._parts)
        self._parts = [text]
        # All characters of a stop string but its last one may be there already.
        hidden = 0 if finished else max(0, self._longest_stop - 1)
        return text[: max(0, len(text) - hidden)]

    def _read_on(self) -> bool:
        """Decode the tokens that are unread; returns whether they completed a stop string."""
        # The text of the first tokens may depend on the prompt's last ones: spaces between words,
        # bytes of a character.
        if self._prompt and self._unread:
            self._raw.skip(self._prompt)
            self._prompt = ()
        new = self._raw.read(self._unread)
        self._unread = []
        if self._clean_up:
            new = self._clean_up.read(new)
        return self._extend(new)

    def _extend(self, new: str) -> bool:
        """Append `new` and cut the text at the first stop string; returns whether one was found."""
        if self._stopped or not new:
            return False
        self._parts.append(new)
        if not self._stop_strings:
            return False
        searched = self._tail + new
        found = [at for stop in self._stop_strings if (at := searched.find(stop)) >= 0]
        if found:
            text = "".join(self._parts)
            self._parts = [text[: len(text) - len(searched) + min(found)]]
            self._stopped = True
        # One character less than the longest stop string: a whole one would have been found.
        self._tail = searched[max(0, len(searched) - self._longest_stop + 1) :]
        return self._stopped
