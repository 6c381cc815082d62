"""Separates reasoning, `<think>..</think>`, from the answer after it, in texts that come in
parts."""

from mtpkit.server.answers.pieces import Content, Piece, Reasoning, held_back

OPEN = "<think>"
CLOSE = "</think>"


class ReasoningReader:
    """Reads an answer. Newlines beside the two markers belong to neither text.

    Args:
        opened: whether the generation prompt has opened the reasoning already. Otherwise the answer
            has reasoning if it begins with `<think>`.
    """

    def __init__(self, opened: bool) -> None:
        self._buffer = ""
        self._read = self._read_reasoning if opened else self._read_start
        self._fresh = True
        """Whether nothing of the current text was told, but newlines perhaps dropped."""

    def read(self, text: str) -> list[Piece]:
        """What is sure after more text has come."""
        self._buffer += text
        pieces: list[Piece] = []
        while True:
            reading = self._read
            found = reading()
            pieces += [found] if found else []
            if self._read == reading:
                return pieces

    def end(self) -> list[Piece]:
        """What was held back."""
        rest = self._buffer
        self._buffer = ""
        if not rest:
            return []
        return [Reasoning(rest) if self._read == self._read_reasoning else Content(rest)]

    def _read_start(self) -> Piece | None:
        begun = self._buffer.lstrip()
        if begun.startswith(OPEN):
            self._buffer = begun.removeprefix(OPEN)
            self._read = self._read_reasoning
        elif not OPEN.startswith(begun):
            self._fresh = False
            self._read = self._read_content
        return None

    def _read_reasoning(self) -> Piece | None:
        if self._fresh:
            self._buffer = self._buffer.lstrip("\n")
        text, closed, rest = self._buffer.partition(CLOSE)
        if closed:
            self._buffer = rest
            self._fresh = True
            self._read = self._read_content
            text = text.rstrip("\n")
        else:
            sure = len(text) - held_back(text, CLOSE)
            text = text[:sure].rstrip("\n")
            self._buffer = self._buffer[len(text) :]
            self._fresh = self._fresh and not text
        return Reasoning(text) if text else None

    def _read_content(self) -> Piece | None:
        text = self._buffer.lstrip("\n") if self._fresh else self._buffer
        self._buffer = ""
        self._fresh = self._fresh and not text
        return Content(text) if text else None
