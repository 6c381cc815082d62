"""Incremental detokenization, and the search for stop strings."""

from collections.abc import Sequence

from mtpkit.engine.requests.token_texts import CleanUp, RawText, Tokenizer, TokenTexts


class Detokenizer:
    """Decodes the output of one request token by token.

    The text is that of the whole output, and whatever was visible stays. A character appears once
    all its tokens are known, and before the tokenizer's clean-up of spaces can no longer change it.
    The text ends before the first stop string, or after it with `include_stop`. Until the request
    is finished, the last characters, which may become part of a stop string that does not belong to
    the text, are not shown. Without stop strings, nothing is decoded until the text is read or the
    request ends. The time is linear in the number of tokens, whatever they are.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | TokenTexts,
        prompt_token_ids: Sequence[int],
        stop_strings: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        texts = tokenizer if isinstance(tokenizer, TokenTexts) else TokenTexts(tokenizer)
        self._texts = texts
        self._raw = RawText(texts)
        self._clean_up = CleanUp() if texts.cleans else None
        self._prompt: Sequence[int] = prompt_token_ids
        self._unread: list[int] = []
        self._stop_strings = stop_strings
        self._longest_stop = max(map(len, stop_strings), default=0)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._ending = ""
        self.stop_string: str | None = None
        """The stop string at which the text ends; None: none was found."""
        self._parts: list[str] = []
        self._tail = ""
        """End of the text, in which a stop string may begin."""

    def token_text(self, token_id: int) -> str:
        """Text of a token alone."""
        return self._texts.alone(token_id)

    def append(self, token_id: int) -> bool:
        """Add one token; returns whether it completed a stop string."""
        self._unread.append(token_id)
        self._num_tokens += 1
        # Decoding takes longer than scheduling. Without stop strings it waits until somebody reads.
        return bool(self._stop_strings) and self._read_on()

    def end_with(self, text: str) -> None:
        """Let the text end with one that no token has; no token may be appended afterwards."""
        self._ending = text

    def flush(self) -> bool:
        """Show what was held back, such as the bytes of an unfinished character; no token may be
        appended afterwards. Returns whether that completed a stop string."""
        self._read_on()
        rest = self._raw.flush()
        if self._clean_up:
            rest = self._clean_up.read(rest) + self._clean_up.flush()
        found_stop = self._extend(rest)
        if self.stop_string is None:
            self._parts.append(self._ending)
        return found_stop

    def visible_text(self, finished: bool) -> str:
        """The part of the text that later tokens cannot change."""
        if not finished:
            self._read_on()
        text = "".join(self._parts)
        self._parts = [text]
        # All characters of a stop string but its last one may be there already.
        shows_all = finished or self._include_stop
        hidden = 0 if shows_all else max(0, self._longest_stop - 1)
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
        if self.stop_string is not None or not new:
            return False
        self._parts.append(new)
        if not self._stop_strings:
            return False
        searched = self._tail + new
        known = len(self._tail)
        found = [
            (start, start + len(stop), stop)
            for stop in self._stop_strings
            # A stop string that is in the tail as a whole ended before `min_tokens`.
            if (start := searched.find(stop, max(0, known - len(stop) + 1))) >= 0
        ]
        if found and self._num_tokens > self._min_tokens:
            start, end, self.stop_string = min(found)
            text = "".join(self._parts)
            kept = end if self._include_stop else start
            self._parts = [text[: len(text) - len(searched) + kept]]
        # One character less than the longest stop string: a whole one would have been found.
        self._tail = searched[max(0, len(searched) - self._longest_stop + 1) :]
        return self.stop_string is not None
